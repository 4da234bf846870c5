"""A trajectory: one response o to one question q, with all that the method needs to know about it.

What flows through the program is `Question -> Trajectory -> reward -> group -> advantages -> loss`, and on the side
`Trajectory -> replay buffer -> Trajectory`. Nothing has to be carried beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from nano_exgrpo.questions import Question

RIGHT = 1.0  # the reward of a right response; a custom reward may give less, for a response that is only better


@dataclass
class Trajectory:
    """A response is written to in three places only: its reward, its log-probabilities, and the mark that it is
    replayed.

    question: q, with its prompt as token ids. response_ids [T]: token ids on the CPU; the EOS that ends a response is
        its last token. text: the response without special tokens, as the checker reads it.
    truncated: it reached the length limit without an EOS.
    reward: r. entropy: mean token entropy in nats when it was last scored.
    logprobs [T]: log π_past of each token under the policy that generated it, in nats, on the CPU; None until they
        are computed. replayed: it comes from the buffer, so its behavior policy is a past one.
    """

    question: Question
    response_ids: Tensor
    text: str
    truncated: bool = False
    reward: float = 0.0
    entropy: float = float("nan")
    logprobs: Tensor | None = field(default=None, repr=False)
    replayed: bool = False

    @property
    def prompt_ids(self) -> Tensor:
        """Token ids of the prompt [P]."""
        return self.question.prompt_ids

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def right(self) -> bool:
        """Success. Buffer, retirement, delayed start, metrics and studies all ask this, not the reward."""
        return self.reward == RIGHT
