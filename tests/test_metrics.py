"""What is measured: every metric against an independent computation, the samples, and the summary."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch
from conftest import tiny_config, trajectory
from scripted import Script, Step, plain

import train
from nano_exgrpo.config import resolve
from nano_exgrpo.infra.metrics import choose_samples, summary

L, BETA = 5, 0.1


def mean(values) -> float | None:
    values = torch.as_tensor([float(value) for value in values])
    return values.mean().item() if len(values) else None


def expected_of_rollouts(step: Step) -> dict[str, float]:
    """From the trajectories alone."""
    lengths = [len(t.response_ids) for t in step.fresh]
    wins = [sum(t.reward for t in group) for group in step.groups]
    end = step.policy.tokenizer.eos_token_id
    return {
        "reward": mean(t.reward for t in step.fresh),
        "questions/solved": mean(n == 4 for n in wins),
        "questions/failed": mean(n == 0 for n in wins),
        "completions/mean_length": mean(lengths),
        "completions/clipped_ratio": mean(end not in t.response_ids.tolist() for t in step.fresh),
        "rollouts": len(lengths),
        "replay/started": True,
        "replay/questions": len(step.replayed),
        "buffer/questions": len(step.bucket),
        "buffer/trajectories": step.trajectories,
        "buffer/retired": len(step.retired),
        "buffer/buckets": {k: n for k in (1, 2, 3) if (n := list(step.bucket.values()).count(k))},
        "scored_tokens": sum(len(t.response_ids) for r in step.replayed for t in step.stored[r.question.id]),
    }


def expected_of_update(step: Step) -> dict[str, float | None]:
    """From the weights before the step: plain logits, one row at a time, and the loss as the paper writes it."""
    rows = [
        (t, t.reward - sum(o.reward for o in group) / 4)
        for group in step.groups
        for t in group
        if len({o.reward for o in group}) > 1
    ]
    step.policy.model.zero_grad()
    objective, entropies, weights = torch.zeros((), requires_grad=True), [], []
    for t, advantage in rows:
        logp, entropy = plain(step.policy, t)
        entropies += entropy.tolist()
        weight = (logp - (t.logprobs if t.replayed else logp.detach())).exp()
        weights += weight.tolist() if t.replayed else []
        objective = objective - (advantage * (weight / (weight + BETA) if t.replayed else weight)).sum() / (L * 16)
    objective.backward()
    gradients = [p.grad.flatten() for p in step.policy.model.parameters() if p.grad is not None]
    return {
        "loss": objective.item(),
        "entropy": mean(entropies),
        "grad_norm": torch.cat(gradients).norm().item() if rows else None,
        "skipped_updates": 0,
        "clip_ratio": 0.0 if rows else None,  # with one update a step, π_old is the policy itself
        "approx_kl": 0.0 if rows else None,
        "replay/weight_mean": mean(weights),
        "replay/ratio_mean": mean(w / (w + BETA) for w in weights),
        "trained_rows": len(rows) / 16,
        "trained_tokens": len(entropies),
    }


def test_every_metric_equals_an_independent_recomputation():
    plan = lambda step, n, place: (n * 7 + step) % 5  # noqa: E731
    settings = dict(start_threshold=-1.0, lr=1e-2, max_response_length=L, log_samples=-1, temperature=0.9)
    steps = Script(15, plan, **settings).run(6)
    tokens = 0
    for number, step in enumerate(steps, start=1):
        lengths = sum(len(t.response_ids) for t in step.fresh)
        tokens += lengths
        expected = {**expected_of_rollouts(step), **expected_of_update(step), "num_tokens": tokens}
        row = {name: value for name, value in step.row.items() if not name.startswith("time/")}
        speed, _ = row.pop("tokens_per_second"), row.pop("epoch")  # of the sampler: tests/test_questions.py
        assert row.keys() == expected.keys()  # no new metric escapes this test
        for name, value in expected.items():
            assert row[name] == (value if value is None else pytest.approx(value, rel=1e-3, abs=1e-6)), (number, name)
        spent = sum(step.row[f"time/{part}"] for part in ("choose", "generate", "reward", "update"))
        assert speed == pytest.approx(lengths / spent, rel=0.02, abs=1)
    assert sum(len(step.replayed) for step in steps) >= 4 and any(step.retired for step in steps)


def test_every_trajectory_can_be_logged_with_the_entropy_of_each_token():
    """Under the policy that produced it, and with the text of each token."""
    settings = dict(start_threshold=-1.0, lr=1e-2, max_response_length=L, log_samples=-1, temperature=0.9)
    for step in Script(15, lambda step, n, place: (n * 7 + step) % 5, **settings).run(3):
        for sample, t in zip(step.samples, step.everyone, strict=True):
            with torch.no_grad():
                entropies = plain(step.policy, t)[1].tolist()
            decode = step.policy.tokenizer.decode
            assert sample["token_entropies"] == pytest.approx(entropies, abs=1e-3)
            assert sample["entropy"] == pytest.approx(mean(entropies), abs=1e-3)
            assert sample["tokens"] == [decode([id]) for id in t.response_ids.tolist()]
            found = [sample[name] for name in ("question", "prompt", "response", "reward", "replayed", "truncated")]
            assert found == [t.question.id, decode(t.prompt_ids), t.text, t.reward, t.replayed, t.truncated]
    assert step.replayed


def test_logged_samples_are_of_replayed_and_of_fresh_groups():
    """B 8, K 4, half of it replayed, eight rows a step: two of every second group, the first of each in the order of
    the batch."""
    script = Script(40, lambda step, n, place: 2, questions_per_step=8, start_threshold=-1.0, log_samples=8)
    step = script.run(3)[-1]
    expected = [(t.question.id, t.text, t.replayed) for group in step.groups[::2] for t in group[:2]]
    assert [(s["question"], s["response"], s["replayed"]) for s in step.samples] == expected
    assert [s["replayed"] for s in step.samples] == [True, False, True, False, False, False, False, False]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 8, 15, 16, 31, 32, 99, -1])
def test_as_many_samples_are_logged_as_asked_for(count):
    groups = [[trajectory([0], [k], id=str(g)) for k in range(4)] for g in range(8)]
    chosen = [(t.question.id, int(t.response_ids)) for t in choose_samples(groups, count)]
    assert len(set(chosen)) == len(chosen) == (min(count, 32) if count >= 0 else 32)
    assert chosen == sorted(chosen)
    assert len({id for id, _ in chosen}) == (min(8, math.ceil(count / 2)) if count >= 0 else 8)


def test_the_summary_suggests_what_works(tiny, tmp_path, capsys):
    """Its commands, run as they stand: the evaluation, and then its wrong responses."""
    import eval as script

    train.train(tiny_config(tmp_path, steps=1))
    (flags,) = re.findall(r"python eval\.py (.+), then the same with --show wrong", capsys.readouterr().out)
    assert script.main(flags.split()) == 0 and script.main([*flags.split(), "--show", "wrong"]) == 0


def test_the_summary_says_what_changed_and_how_sure_that_is(tmp_path):
    """By hand: 0.2 in [0.1, 0.3] to 0.6 in [0.5, 0.7] is 0.4 more, give or take the hypotenuse of 0.1 and 0.1."""

    def row(step: int, accuracy: float) -> dict:
        low, high = accuracy - 0.1, accuracy + 0.1
        return {"step": step, "eval/accuracy": accuracy, "eval/low": low, "eval/high": high, "eval/questions": 50}

    for end, words in ((0.6, "improved"), (0.25, "did not change beyond chance"), (-0.1, "fell")):
        rows = [row(0, 0.2), row(5, 0.9), row(10, end)]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        text = summary(tmp_path, resolve({}))
        gain = end - 0.2
        assert f"accuracy {words}: 0.200" in text and "(50 questions, 10 steps of exgrpo" in text
        assert f"difference of {gain:+.3f} [{gain - 0.02**0.5:+.3f}, {gain + 0.02**0.5:+.3f}]" in text
