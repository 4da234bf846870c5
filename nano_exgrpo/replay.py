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
from dataclasses import replace
from typing import Any

import torch

from nano_exgrpo.policy import Policy
from nano_exgrpo.questions import Question
from nano_exgrpo.trajectory import Trajectory


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

    def question(self, id: str) -> Question:
        return self.stored[id][0].question

    # --------------------------------------------------------------------- which questions

    def draw_questions(self, count: int, *, method: str = "gaussian", sigma: float = 1.0) -> list[Question]:
        """min(count, eligible) different questions to replay (paper, section 4.1).

        method "gaussian": draw a bucket with probability ∝ Normal(k; K/2, σ), then a question uniformly
        inside it, without replacement; what an emptied bucket cannot give goes to the others. "uniform"
        (the paper's ablation): every eligible question alike.
        sigma: in counts of successes, as in the released code. The paper writes N(Acc; 0.5, 1) in rates,
        which is σ = K in counts and nearly flat.
        """
        buckets = self.eligible()
        if method == "uniform":
            everyone = [id for ids in buckets.values() for id in ids]
            return [self.question(id) for id in self.rng.sample(everyone, min(count, len(everyone)))]
        drawn: list[Question] = []
        while buckets and len(drawn) < count:
            # Weights in logs, less the largest: far from K/2 with a small σ they would all underflow to 0.
            logits = {k: -((k - self.group_size / 2) ** 2) / (2 * sigma**2) for k in buckets}
            best = max(logits.values())
            weights = [math.exp(value - best) for value in logits.values()]
            k = self.rng.choices(list(buckets), weights=weights)[0]
            ids = buckets[k]
            drawn.append(self.question(ids.pop(self.rng.randrange(len(ids)))))
            if not ids:
                del buckets[k]
        return drawn

    # ------------------------------------------------------------------- which trajectory

    def choose(self, question: Question, entropies: Sequence[float], *, method: str = "lowest") -> Trajectory:
        """The stored success of this question to replay, a copy marked as replayed (paper, section 4.1).

        entropies: mean token entropy of each of `stored[question.id]` under the *current* policy, in nats. method:
        "lowest" entropy; "highest" or "random" are the paper's ablations, and "random" needs no entropies. Ties go to
        the oldest."""
        trajectories = self.stored[question.id]
        if method == "random":
            return replace(trajectories[self.rng.randrange(len(trajectories))], replayed=True)
        pick = min if method == "lowest" else max
        index = pick(range(len(trajectories)), key=lambda i: entropies[i])
        return replace(trajectories[index], replayed=True, entropy=float(entropies[index]))

    # ------------------------------------------------------------------------------ update

    def update(self, group: Sequence[Trajectory], *, may_retire: bool = True) -> None:
        """Learn from one group of K trajectories of one question, rewarded and with log-probabilities.

        A replayed trajectory counts among the group's successes, as it does in the group's mean reward.
        All K succeed: the question is retired and forgotten. 1..K−1 succeed: k becomes its bucket, and every new
        fresh success is stored, identical token sequences once. Log-probabilities that are not finite are never stored:
        each replay of them would spoil another batch.
        All K succeed, but may_retire is False: K becomes the bucket of what is stored, to which nothing is added,
        for trajectories that taught nothing have no log-probabilities.
        None succeeds: what is stored stays as it is, and so does the bucket.
        """
        id = group[0].question.id
        successes = [t for t in group if t.right]
        if not successes or id in self.retired:
            return
        if len(successes) == len(group) and may_retire:
            self.retired[id] = None
            self.stored.pop(id, None)
            self.bucket.pop(id, None)
            return
        known = list(self.stored.get(id, ()))
        seen = {tuple(t.response_ids.tolist()) for t in known}
        for trajectory in successes:
            key = tuple(trajectory.response_ids.tolist())
            if trajectory.logprobs is not None and trajectory.logprobs.isfinite().all() and key not in seen:
                seen.add(key)
                known.append(trajectory)
        if self.max_per_question:
            known = known[-self.max_per_question :]
        if known:
            self.stored[id] = known
            self.bucket[id] = len(successes)

    # ------------------------------------------------------------------------ save and load

    def state_dict(self) -> dict[str, Any]:
        """Plain containers and tensors only: what `torch.load(weights_only=True)` reads back. Questions by their
        ids."""
        return {
            "stored": {id: [plain(t) for t in trajectories] for id, trajectories in self.stored.items()},
            "bucket": dict(self.bucket),
            "retired": list(self.retired),
            "rng": self.rng.getstate(),
        }

    def load_state_dict(self, state: dict[str, Any], questions: dict[str, Question]) -> None:
        """questions: those that are trained on, by id."""
        self.stored = {id: [Trajectory(questions[id], **t) for t in kept] for id, kept in state["stored"].items()}
        self.bucket = dict(state["bucket"])
        self.retired = dict.fromkeys(state["retired"])
        version, internal, gauss = state["rng"]
        self.rng.setstate((version, tuple(internal), gauss))


def plain(trajectory: Trajectory) -> dict[str, Any]:
    """The fields of a trajectory but its question."""
    return {name: value for name, value in vars(trajectory).items() if name != "question"}


def choose_trajectories(
    policy: Policy, buffer: ReplayBuffer, questions: Sequence[Question], *, method: str = "lowest"
) -> tuple[list[Trajectory], int]:
    """(one stored success of each question, tokens read to choose them): step 3, under the current policy.

    The mean entropy runs over the response tokens only, EOS included. (The released code's mask is inverted, so it
    averages over the padding.) method: as in `ReplayBuffer.choose`; "random" reads nothing, and "none" chooses nothing:
    then the buffer only says which questions to ask again."""
    if method == "none":
        return [], 0
    stored = [t for question in questions for t in buffer.stored[question.id]]
    entropies = torch.full((len(stored),), math.nan)
    if method != "random":
        with torch.no_grad():
            for batch in policy.batches(stored):
                scores = policy.score([stored[i] for i in batch])
                entropies[batch] = (scores.entropies.sum(-1) / scores.mask.sum(-1)).float().cpu()  # 0 outside the mask
    counts = [len(buffer.stored[question.id]) for question in questions]
    chosen = [
        buffer.choose(question, part.tolist(), method=method)
        for question, part in zip(questions, entropies.split(counts), strict=True)
    ]
    return chosen, 0 if method == "random" else sum(len(t.response_ids) for t in stored)
