"""What is measured while training: nothing in here changes what is learned.

Names are TRL's where it has the same quantity (`reward`, `clip_ratio`, `completions/mean_length`, …), so that runs can
be compared. `entropy` is near to TRL's, which is over all completions: here it is over the tokens that were trained on,
replayed ones included, since rows without an advantage never see a forward pass. With several processes every figure is
that of all of them together.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nano_exgrpo.config import TrainConfig
from nano_exgrpo.evaluation.statistics import accuracy_interval
from nano_exgrpo.infra import distributed
from nano_exgrpo.infra.run_folder import list_checkpoints, read_lines
from nano_exgrpo.policy import Policy
from nano_exgrpo.replay import ReplayBuffer
from nano_exgrpo.trajectory import Trajectory


def step_metrics(
    groups: Sequence[Sequence[Trajectory]], buffer: ReplayBuffer, *, replayed_questions: int, scored_tokens: int
) -> dict[str, Any]:
    """Metrics of one step's groups, rewarded, and of the buffer after it.

    reward: mean of the fresh rollouts. questions/solved, /failed: shares of groups whose K trajectories, the replayed
    one included, are all right or none. num_tokens: of this step's rollouts.
    replayed_questions: asked because the buffer said so, with a stored trajectory or (--trajectory-choice none)
    without.
    scored_tokens: of stored successes that were scored to choose the replayed ones.
    """
    new = [t for group in groups for t in group if not t.replayed]
    eligible = buffer.eligible()
    sums = distributed.total(
        {
            "reward": sum(t.reward for t in new),
            "rollouts": len(new),
            "tokens": sum(len(t.response_ids) for t in new),
            "truncated": sum(t.truncated for t in new),
            "groups": len(groups),
            "solved": sum(all(t.right for t in group) for group in groups),
            "failed": sum(not any(t.right for t in group) for group in groups),
            "replayed": replayed_questions,
            "stored": len(buffer.stored),
            "trajectories": len(buffer),
            "retired": len(buffer.retired),
            "scored": scored_tokens,
            **{f"bucket {k}": len(eligible.get(k, ())) for k in range(1, buffer.group_size)},
        }
    )
    return {
        "reward": sums["reward"] / sums["rollouts"],
        "questions/solved": sums["solved"] / sums["groups"],
        "questions/failed": sums["failed"] / sums["groups"],
        "completions/mean_length": sums["tokens"] / sums["rollouts"],
        "completions/clipped_ratio": sums["truncated"] / sums["rollouts"],
        "replay/questions": int(sums["replayed"]),
        "buffer/questions": int(sums["stored"]),
        "buffer/trajectories": int(sums["trajectories"]),
        "buffer/retired": int(sums["retired"]),
        "buffer/buckets": {k: int(sums[f"bucket {k}"]) for k in range(1, buffer.group_size) if sums[f"bucket {k}"]},
        "rollouts": int(sums["rollouts"]),
        "num_tokens": int(sums["tokens"]),
        "scored_tokens": int(sums["scored"]),
    }


def sample_rows(policy: Policy, groups: Sequence[Sequence[Trajectory]], count: int) -> list[dict[str, Any]]:
    """Rows of samples.jsonl: `choose_samples` of this step's trajectories, under the policy that produced them."""
    logged = choose_samples(groups, count)
    rows: list[dict[str, Any]] = [{} for _ in logged]
    for batch in policy.batches(logged):
        with torch.no_grad():
            entropies = policy.score([logged[i] for i in batch]).entropies  # [B, T]
        for place, i in enumerate(batch):
            t = logged[i]
            values = entropies[place, : len(t.response_ids)].cpu()  # [T]
            rows[i] = {
                "question": t.question.id,
                "prompt": policy.tokenizer.decode(t.prompt_ids),
                "response": t.text,
                "reward": t.reward,
                "entropy": round(values.mean().item(), 5),
                "replayed": t.replayed,
                "truncated": t.truncated,
                "tokens": [policy.tokenizer.decode([id]) for id in t.response_ids.tolist()],
                "token_entropies": [round(value, 4) for value in values.tolist()],
            }
    return rows


def choose_samples(groups: Sequence[Sequence[Trajectory]], count: int) -> list[Trajectory]:
    """`count` trajectories, -1 for all: the first two of groups spread evenly over the batch, more of each where the
    groups are too few. Replayed groups stand first in a batch, and the replayed trajectory first in its group: so both
    kinds of groups are seen, and what is replayed beside what is fresh."""
    if count < 0:
        return [t for group in groups for t in group]
    rows = max(2, math.ceil(count / len(groups)))  # of each group
    number = math.ceil(count / rows)  # of groups
    spread = [groups[i * len(groups) // number] for i in range(number)]
    return [t for group in spread for t in group[:rows]][:count]


def eval_metrics(right: list[list[float]]) -> dict[str, Any]:
    """right: 1 or 0 for each of a question's samples."""
    accuracy = accuracy_interval(right)
    return {
        "eval/accuracy": accuracy.value,
        "eval/low": accuracy.low,
        "eval/high": accuracy.high,
        "eval/questions": len(right),
    }


def summary(run: Path, config: TrainConfig) -> str:
    """What a finished run says: what improved, by how much, how sure that is, and what to try next.

    The difference's interval adds the squared distances to the ends of both intervals ("square and add", Newcombe
    1998). It takes them as independent; they share their questions, so if anything it is too wide."""
    rows = [row for row in read_lines(run / "metrics.jsonl") if "eval/accuracy" in row]
    before = rows[0].get("eval/before_warmup")
    first, last = ((row["eval/accuracy"], row["eval/low"], row["eval/high"]) for row in (rows[0], rows[-1]))
    gain = last[0] - first[0]
    low = gain - math.hypot(last[0] - last[1], first[2] - first[0])
    high = gain + math.hypot(last[2] - last[0], first[0] - first[1])
    verdict = "improved" if low > 0 else "fell" if high < 0 else "did not change beyond chance"
    lines = [
        f"\nheld-out accuracy {verdict}: {first[0]:.3f} [{first[1]:.3f}, {first[2]:.3f}] -> {last[0]:.3f} "
        f"[{last[1]:.3f}, {last[2]:.3f}], a difference of {gain:+.3f} [{low:+.3f}, {high:+.3f}]",
        f"({rows[-1]['eval/questions']} questions, {rows[-1]['step']} steps of {config.algo}, 95 % intervals)",
        f"look at   {run}/curves.png, {run}/samples.jsonl, python -m nano_exgrpo.evaluation.html_report {run}",
    ]
    if before is not None:
        lines.insert(
            1, f"(all of it from rewards: the warm-up had raised it from {before:.3f} to {first[0]:.3f} before)"
        )
    other = "grpo" if config.algo == "exgrpo" else "exgrpo"
    if config.model == "toy":
        preset = "" if config.preset == "toy" else f" --preset {config.preset}"
        lines.append(
            f"try next  python train.py{preset} --algo {other}   python eval.py --model {run}, then the same with "
            f"--show wrong"
        )
    else:
        lines.append(
            f"try next  python eval.py --model {run} --bench gsm8k   python train.py --resume {run} "
            f"--steps {2 * config.steps}"
        )
        if not list_checkpoints(run):
            lines[-1] = (
                f"try next  python eval.py --model {run} --bench gsm8k   more --steps, with --save-every to go on later"
            )
    return "\n".join(lines)


class Stopwatch:
    """Seconds spent between laps."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last = time.perf_counter()

    def lap(self, name: str) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[name] = now - self.last
        self.last = now

    def total(self, *names: str) -> float:
        return sum(self.seconds[name] for name in names)

    def metrics(self) -> dict[str, float]:
        return {f"time/{name}": round(value, 4) for name, value in self.seconds.items()}
