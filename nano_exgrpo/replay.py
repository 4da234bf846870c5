"""The replay buffer: past successes, and the choice of which are worth learning from again.

What makes an experience valuable (paper, section 3): a question of medium difficulty, because its groups
hold both successes and failures; and a trajectory of low entropy under the current policy, because a
high-entropy success is often a lucky guess whose broken reasoning would be taught again and again.

    buffer.stored    question id → its stored successes
    buffer.bucket    question id → successes in its latest group that had any, 1..K (K, never replayed, only
                     where a question may not retire)
    buffer.retired   ids of questions that all K trajectories solved: nothing left to learn from them
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

from nano_exgrpo.logprobs import mean_entropies
from nano_exgrpo.policy import Policy
from nano_exgrpo.rollout import Trajectory


class ReplayBuffer:
    """group_size: K. Everything else is state; all of it is in `state_dict`."""

    def __init__(self, group_size: int, *, seed: int, max_per_question: int = 0) -> None:
        """max_per_question: most successes kept of one question, the newest ones; 0 keeps all (the paper)."""
        self.group_size = group_size
        self.max_per_question = max_per_question
        self.rng = random.Random(seed)
        self.stored: dict[str, list[Trajectory]] = {}
        self.bucket: dict[str, int] = {}
        self.retired: dict[str, None] = {}  # a dict as an ordered set, so that runs repeat exactly

    def __len__(self) -> int:
        """Number of stored trajectories."""
        return sum(map(len, self.stored.values()))

    def eligible(self) -> dict[int, list[str]]:
        """Bucket k → ids of the questions that may be replayed: stored, not retired, 1 ≤ k ≤ K−1."""
        buckets: dict[int, list[str]] = {}
        for question_id in self.stored:
            k = self.bucket[question_id]
            if question_id not in self.retired and 1 <= k < self.group_size:
                buckets.setdefault(k, []).append(question_id)
        return dict(sorted(buckets.items()))

    # --------------------------------------------------------------------- which questions

    def draw_questions(self, count: int, *, method: str = "gaussian", sigma: float = 1.0) -> list[str]:
        """min(count, eligible) different question ids to replay (paper, section 4.1).

        method "gaussian": draw a bucket with probability ∝ Normal(k; K/2, σ), then a question uniformly
        inside it, without replacement; what an emptied bucket cannot give goes to the others. "uniform"
        (the paper's ablation): every eligible question alike.
        sigma: in counts of successes, as in the released code. The paper writes N(Acc; 0.5, 1) in rates,
        which is σ = K in counts and nearly flat.
        """
        buckets = self.eligible()
        if method == "uniform":
            everyone = [question_id for ids in buckets.values() for question_id in ids]
            return self.rng.sample(everyone, min(count, len(everyone)))
        drawn: list[str] = []
        while buckets and len(drawn) < count:
            # Weights in logs, less the largest: far from K/2 with a small σ they would all underflow to 0.
            logits = {k: -((k - self.group_size / 2) ** 2) / (2 * sigma**2) for k in buckets}
            best = max(logits.values())
            weights = [math.exp(value - best) for value in logits.values()]
            k = self.rng.choices(list(buckets), weights=weights)[0]
            ids = buckets[k]
            drawn.append(ids.pop(self.rng.randrange(len(ids))))
            if not ids:
                del buckets[k]
        return drawn

    # ------------------------------------------------------------------- which trajectory

    def choose(self, question_id: str, entropies: Sequence[float], *, method: str = "lowest") -> Trajectory:
        """The stored success of this question to replay, marked as replayed (paper, section 4.1).

        entropies: mean token entropy of each of `stored[question_id]` under the *current* policy, in nats
        (`logprobs.mean_entropies`). method: "lowest" entropy; "highest" or "random" are the paper's ablations,
        and "random" needs no entropies. Ties go to the oldest."""
        trajectories = self.stored[question_id]
        if method == "random":
            index = self.rng.randrange(len(trajectories))
        else:
            pick = min if method == "lowest" else max
            index = pick(range(len(trajectories)), key=lambda i: entropies[i])
        chosen = Trajectory(**vars(trajectories[index]))
        chosen.replayed = True
        if method != "random":
            chosen.entropy = float(entropies[index])
        return chosen

    # ------------------------------------------------------------------------------ update

    def update(self, group: Sequence[Trajectory], *, may_retire: bool = True) -> None:
        """Learn from one group of K trajectories of one question, rewarded and with log-probabilities.

        A replayed trajectory counts among the group's successes, as it does in the group's mean reward.
        All K succeed: the question is retired and forgotten. 1..K−1 succeed: k becomes its bucket, and every new
        fresh success is stored, identical token sequences once.
        All K succeed, but may_retire is False: K becomes the bucket of what is stored, to which nothing is added,
        for trajectories that taught nothing have no log-probabilities.
        None succeeds: what is stored stays as it is, and so does the bucket.
        """
        question_id = group[0].question_id
        successes = [t for t in group if t.reward > 0]
        if not successes or question_id in self.retired:
            return
        if len(successes) == len(group) and may_retire:
            self.retired[question_id] = None
            self.stored.pop(question_id, None)
            self.bucket.pop(question_id, None)
            return
        known = self.stored.get(question_id, [])
        seen = {tuple(t.response_ids.tolist()) for t in known}
        for trajectory in successes:
            key = tuple(trajectory.response_ids.tolist())
            if trajectory.logprobs is None or key in seen:
                continue
            seen.add(key)
            known = known + [trajectory]
        if known:
            self.stored[question_id] = known[-self.max_per_question :]  # [-0:] keeps all
            self.bucket[question_id] = len(successes)

    # ------------------------------------------------------------------------ save and load

    def state_dict(self) -> dict[str, Any]:
        """Plain containers and tensors only: what `torch.load(weights_only=True)` reads back."""
        return {
            "stored": {id: [vars(t).copy() for t in trajectories] for id, trajectories in self.stored.items()},
            "bucket": dict(self.bucket),
            "retired": list(self.retired),
            "rng": self.rng.getstate(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stored = {id: [Trajectory(**t) for t in trajectories] for id, trajectories in state["stored"].items()}
        self.bucket = dict(state["bucket"])
        self.retired = dict.fromkeys(state["retired"])
        version, internal, gauss = state["rng"]
        self.rng.setstate((version, tuple(internal), gauss))


def choose_trajectories(
    policy: Policy,
    buffer: ReplayBuffer,
    question_ids: Sequence[str],
    *,
    method: str = "lowest",
    temperature: float = 1.0,
    token_budget: int = 16_384,
    chunk_bytes: int = 256 * 2**20,
) -> tuple[list[Trajectory], int]:
    """(one stored success of each question, tokens read to choose them): step 3, under the current policy.

    method: as in `ReplayBuffer.choose`; "random" reads nothing, and "none" chooses nothing: then the buffer only says
    which questions to ask again. The rest: as in `logprobs.mean_entropies`."""
    if method == "none":
        return [], 0
    stored = [t for id in question_ids for t in buffer.stored[id]]
    entropies, scored_tokens = [math.nan] * len(stored), 0
    if stored and method != "random":
        scored_tokens = sum(len(t.response_ids) for t in stored)
        entropies = mean_entropies(
            policy,
            [t.prompt_ids for t in stored],
            [t.response_ids for t in stored],
            temperature=temperature,
            token_budget=token_budget,
            chunk_bytes=chunk_bytes,
        ).tolist()
    chosen, start = [], 0
    for id in question_ids:
        end = start + len(buffer.stored[id])
        chosen.append(buffer.choose(id, entropies[start:end], method=method))
        start = end
    return chosen, scored_tokens
