r"""The policy π_θ: a causal language model at a temperature, its prompts, and the scores that the method needs.

Policy-gradient methods ask two things of a language model. One is samples (`rollout.py`). The other is, for a given
response o to a prompt q, the log-probability of each of its tokens:

    log π_θ(o_t | q, o_<t)  =  log_softmax(logits_t / temperature)[o_t]

The temperature is a part of π_θ: the distribution that is trained must be the one that was sampled from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from nano_exgrpo.errors import InputError
from nano_exgrpo.infra import distributed
from nano_exgrpo.logprobs import CHUNK_BYTES, ProjectedLogprobs, response_mask, token_batches
from nano_exgrpo.questions import Question
from nano_exgrpo.trajectory import Trajectory

PLAIN_TEMPLATE = "{system}\n\nQuestion: {prompt}\nAnswer:"  # for tokenizers without a chat template
NEXT_QUESTION = "\nQuestion:"  # what a model that goes on with that template writes


class Scores(NamedTuple):
    """Of B trajectories, the longest of T tokens: log π_θ [B, T] in nats, entropies [B, T] in nats (None unless asked
    for), mask [B, T], true on response tokens. fp32 (fp64 for an fp64 model), zero outside the mask."""

    logprobs: Tensor
    entropies: Any
    mask: Tensor


@dataclass(frozen=True)
class Policy:
    """A model with what it takes to talk to it.

    model: a HF causal LM, or any module with its interface. tokenizer: the model's tokenizer.
    stop_ids: token ids that end a response. pad_id: fills ragged batches; never read, only masked.
    context: most tokens, prompt and response together, that the model can attend to.
    temperature: of π_θ; 0 samples greedily and cannot be scored.
    autocast: dtype of matrix products where the weights are kept in fp32; None computes in the weights' own.
    sampler: how it generates, "generate" (HF's) or "loop" (`sampling_loop.py`): the same distribution, another speed.
    token_budget: tokens, padding included, in one forward and backward. chunk_bytes: see `logprobs.py`.
    """

    model: Any
    tokenizer: Any
    stop_ids: tuple[int, ...]
    pad_id: int
    context: int
    temperature: float = 1.0
    autocast: torch.dtype | None = None
    sampler: str = "generate"
    token_budget: int = 16_384
    chunk_bytes: int = CHUNK_BYTES

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def at(self, temperature: float) -> Policy:
        """The same weights at another temperature."""
        return replace(self, temperature=temperature)

    def precision(self) -> AbstractContextManager[Any]:
        """The context of every forward pass, in rollouts and in training alike: π_θ is what it computes."""
        return torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None)

    def batches(self, trajectories: Sequence[Trajectory]) -> list[list[int]]:
        """Indices of trajectories of like length that fit one forward pass; see `token_batches`."""
        return token_batches([t.length for t in trajectories], self.token_budget)

    def score(self, trajectories: Sequence[Trajectory], *, with_entropy: bool = True) -> Scores:
        """log π_θ of every response token, and the entropy of the distribution that it was drawn from.

        Gradients flow through both. All trajectories are one batch: `batches` cuts them."""
        device = self.device
        sequences = [torch.cat([t.prompt_ids, t.response_ids]) for t in trajectories]
        ids = pad_sequence(sequences, batch_first=True, padding_value=self.pad_id)  # [B, S]
        mask = response_mask([t.response_ids for t in trajectories])  # [B, T]

        # Padding stands on the right, where causal attention never looks. So positions are 0, 1, 2, … and no mask is
        # passed, which lets attention take its fastest path.
        with self.precision():
            hidden = self.model.base_model(input_ids=ids.to(device), use_cache=False).last_hidden_state  # [B, S, H]

        # The token at position p is predicted by the hidden state at p − 1.
        rows, steps = mask.nonzero(as_tuple=True)  # [N], [N]: the N real response tokens
        positions = torch.tensor([len(t.prompt_ids) for t in trajectories])[rows] + steps  # [N]
        targets = ids[rows, positions].to(device)  # [N]
        hidden = hidden[rows.to(device), (positions - 1).to(device)]  # [N, H]

        projection = self.model.get_output_embeddings()
        chunk = max(1, self.chunk_bytes // (4 * projection.weight.shape[0]))
        with self.precision():
            logprob, entropy = ProjectedLogprobs.apply(
                hidden, projection.weight, projection, targets, self.temperature, chunk, with_entropy
            )  # [N] each

        def unpack(flat: Tensor) -> Tensor:
            return flat.new_zeros(mask.shape).index_put((rows.to(device), steps.to(device)), flat)  # [B, T]

        return Scores(unpack(logprob), unpack(entropy) if with_entropy else None, mask.to(device))


# ------------------------------------------------------------------------------------- from a model


def make_policy(model: Any, tokenizer: Any, **settings: Any) -> Policy:
    """Wrap a model and its tokenizer. settings: fields of `Policy`, such as temperature.

    Raises InputError where no token ends a response."""
    model.eval()  # dropout would make π_θ a different policy at every call
    size = min(m.weight.shape[0] for m in (model.get_input_embeddings(), model.get_output_embeddings()))
    stop_ids = tuple(id for id in find_stop_ids(model, tokenizer) if id < size)
    if not stop_ids:
        raise InputError(
            "neither tokenizer nor generation_config names an end-of-sequence token that the model has; set "
            "tokenizer.eos_token"
        )
    pad_id = tokenizer.pad_token_id
    if pad_id is None or pad_id >= size:  # some published tokenizers name one that the model has no row for
        pad_id = stop_ids[0]
    return Policy(model, tokenizer, stop_ids, pad_id, context_of(model.config), **settings)


def context_of(config: Any) -> int:
    """Most tokens that a model with this configuration can attend to; 2**20 where nothing limits them."""
    config = config.get_text_config(decoder=True)
    names = ("max_position_embeddings", "max_seq_len", "seq_length", "max_target_positions")
    # Sparse attention attends to all tokens up to index_topk of them. Beyond, padding has a say in which.
    limits = [getattr(config, name, None) for name in (*names, "index_topk")]
    if config.model_type == "bloom" and not any(limits):
        limits.append(2048)  # what all published ones were trained on, whether or not they say so
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *rope.values()):  # one for all layers, or one for each type of layer
        if isinstance(parameters, dict) and parameters.get("rope_type") == "longrope":
            # Beyond it, the longest row of a batch decides the frequencies of all.
            limits.append(parameters["original_max_position_embeddings"])
    return min((n for n in limits if isinstance(n, int) and n > 0), default=2**20)


def enable_gradient_checkpointing(model: Any) -> None:
    """Keep no activations inside the layers: backward recomputes them. Raises InputError where a model cannot.

    transformers does so only in training mode, in which layers drop out. So each layer's forward is wrapped here."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise InputError(f"model type {model.config.model_type} cannot do --gradient-checkpointing; leave it out")
    for layer in layers:
        layer.forward = partial(recomputed, layer.forward)


def recomputed(forward: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*arguments, **options)
    return checkpoint(partial(forward, **options), *arguments, use_reentrant=False, preserve_rng_state=False)


def find_stop_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Token ids that end a response: the union of what generation_config, tokenizer and chat template name.

    They differ in practice: base Qwen2.5-Math stops at <|endoftext|> by its tokenizer, while its chat
    template ends a turn with <|im_end|>. Missing one, a policy that wants to stop talks on to the limit.
    """
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = set(named if isinstance(named, (list, tuple)) else [named]) | {tokenizer.eos_token_id}
    ids.add(end_of_turn(tokenizer))
    return tuple(sorted(id for id in ids if id is not None))


def end_of_turn(tokenizer: Any) -> int | None:
    """The token that closes an assistant's turn: what the chat template writes after its words, else EOS."""
    words = "nano exgrpo"
    for content in (words, as_parts(words)):
        turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": content}]
        try:
            text = tokenizer.apply_chat_template(turn, tokenize=False)
            text.encode()
        except Exception:  # no template, one that knows no such turn, or half a surrogate pair in it
            continue
        if words in text:
            after = tokenizer(text[text.rfind(words) + len(words) :].lstrip(), add_special_tokens=False)["input_ids"]
            return after[0] if after and after[0] in tokenizer.added_tokens_decoder else tokenizer.eos_token_id
    return tokenizer.eos_token_id


# ------------------------------------------------------------------------------------- prompts


def encode_prompt(policy: Policy, prompt: str, system_prompt: str) -> Tensor:
    """Prompt ids [P] on the CPU, through the tokenizer's chat template where it has one.

    The template writes its own special tokens, so nothing is added a second time (at most one BOS). Raises InputError
    where the template loses the question or the system prompt, and for a token that the model does not have."""
    tokenizer = policy.tokenizer
    if getattr(tokenizer, "chat_template", None):
        ids = tokenizer(render(tokenizer, prompt, system_prompt), add_special_tokens=False)["input_ids"]
    else:
        ids = tokenizer(PLAIN_TEMPLATE.format(system=system_prompt, prompt=prompt).strip())["input_ids"]
        if ids and ids[-1] in policy.stop_ids:
            ids = ids[:-1]  # some tokenizers close every text with EOS, which would end the response unsaid
    if not ids or max(ids) >= policy.model.get_input_embeddings().weight.shape[0]:
        reason = f"has a token {max(ids)} that the model lacks" if ids else "makes no token of a prompt"
        raise InputError(f"the tokenizer {reason}; save model and tokenizer that belong together")
    return torch.tensor(ids, dtype=torch.long)


def render(tokenizer: Any, prompt: str, system_prompt: str) -> str:
    """The prompt as the chat template writes it, with every word of question and system prompt in it.

    An empty system prompt leaves the system message out. Where the template knows no system role, the user says both.
    Some templates want a message in parts. Raises InputError where none of this gives a text that holds both."""
    problem = "it leaves out the question or the system prompt"
    for form in (str, as_parts):
        for system, user in ((system_prompt, prompt), ("", f"{system_prompt}\n\n{prompt}".strip())):
            messages = [{"role": "system", "content": form(system)}] if system else []
            messages.append({"role": "user", "content": form(user)})
            try:
                text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
                text.encode()  # fails at half a surrogate pair, as the tokenizer would
            except Exception as error:  # a template is a program of its author's, and fails as it likes
                problem = str(error).strip().split("\n")[0][:200]
                continue
            if all(" ".join(words.split()) in " ".join(text.split()) for words in (system_prompt, prompt)):
                if system_prompt and not system:
                    say_once(
                        "the model's chat template has no system role: the system prompt stands before the question"
                    )
                return text
    raise InputError(f"the tokenizer's chat template cannot write a prompt: {problem}")


def as_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


@cache
def say_once(sentence: str) -> None:
    if distributed.is_main():
        print(sentence)


def response_text(policy: Policy, response_ids: Sequence[int]) -> str:
    """The response as the checker reads it, without special tokens. A base model, asked by the plain template, often
    goes on to a question of its own invention, whose answer must not be graded: the text ends before it."""
    text = policy.tokenizer.decode(response_ids, skip_special_tokens=True)
    return text if getattr(policy.tokenizer, "chat_template", None) else text.split(NEXT_QUESTION)[0]


def encode_questions(policy: Policy, questions: Sequence[Question], system_prompt: str) -> list[Question]:
    """The same questions with their prompts as token ids."""
    return [replace(q, prompt_ids=encode_prompt(policy, q.prompt, system_prompt)) for q in questions]
