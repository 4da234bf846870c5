"""Supervised warm-up: what it learns, that it takes no more memory than an update, and what names the toy's cache."""

from __future__ import annotations

import gc
import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import build, data_file, ragged, tiny_config, trajectory

import train
from nano_exgrpo import toy
from nano_exgrpo.config import PRESETS, resolve
from nano_exgrpo.errors import InputError
from nano_exgrpo.infra import prepare, session
from nano_exgrpo.infra.precision import make_optimizer
from nano_exgrpo.infra.stop import StopRequest
from nano_exgrpo.policy import Policy, Scores, recomputed
from nano_exgrpo.questions import Question
from nano_exgrpo.rollout import generate_responses
from nano_exgrpo.trajectory import Trajectory
from nano_exgrpo.warmup import encode_demonstrations, warm_up


def adamw(policy: Policy, lr: float) -> torch.optim.Optimizer:
    return make_optimizer(policy.model.parameters(), "adamw", lr=lr, weight_decay=0.0)


def test_it_learns_its_demonstrations_and_to_stop():
    """Ten pairs, learned by heart: greedy decoding gives each response back, EOS included."""
    policy = toy.build_policy(seed=0, hidden=32, layers=1)
    pairs = toy.demonstrations(toy.sum_questions(10, seed=0), reasoning=0.5, seed=0)
    examples = encode_demonstrations(policy, pairs, "")
    losses = []
    optimizer = adamw(policy, 1e-2)
    warm_up(policy, optimizer, examples, steps=150, batch_size=10, seed=0, on_step=lambda *pair: losses.append(pair))
    assert [step for step, _ in losses] == list(range(150))
    assert losses[0][1] > 4 and losses[-1][1] < 0.1
    answers = generate_responses(policy.at(0), [e.prompt_ids for e in examples], 1, max_new_tokens=15)
    assert sum(a[0].tolist() == e.response_ids.tolist() for a, e in zip(answers, examples)) >= 9


def test_the_loss_is_the_mean_over_response_tokens(policy):
    """The first loss, before any step, recomputed: prompt and padding play no part."""
    examples = ragged(policy, [(3, 2), (5, 6)])
    with torch.no_grad():
        logprobs, _, mask = policy.score(examples)
    possible = []
    for pick in ([0, 0], [0, 1], [1, 0], [1, 1]):  # a batch of two is drawn with replacement
        possible.append((-sum(logprobs[i].sum() for i in pick) / sum(mask[i].sum() for i in pick)).item())
    seen, optimizer = [], adamw(policy, 1e-3)
    warm_up(policy, optimizer, examples, steps=1, batch_size=2, seed=0, on_step=lambda step, loss: seen.append(loss))
    assert any(seen[0] == pytest.approx(p, abs=1e-5) for p in possible)


def test_the_rate_rises_and_cools_to_a_tenth(policy):
    rates = []
    optimizer = adamw(policy, 1.0)
    optimizer.step = lambda: rates.append(optimizer.param_groups[0]["lr"])
    warm_up(policy, optimizer, ragged(policy, [(3, 2)]), steps=100, batch_size=1, seed=0)
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0]) and rates[-1] == pytest.approx(0.1, abs=1e-3)
    assert rates[5:] == sorted(rates[5:], reverse=True)


# ------------------------------------------------------------------------------------------ a real model


@pytest.mark.parametrize("budget", [1, 20, 40])
def test_micro_batches_equal_one_batch(budget, monkeypatch):
    """Ragged lengths: the gradient, the loss and the weights of three steps; and no micro-batch is above the budget."""
    lengths = [(2 + i % 5, 1 + 3 * i % 11) for i in range(16)]
    original, sizes = Policy.score, []

    def watched(policy: Policy, rows: list[Trajectory], **settings: Any) -> Scores:
        sizes.append((len(rows), len(rows) * max(row.length for row in rows)))
        return original(policy, rows, **settings)

    monkeypatch.setattr(Policy, "score", watched)

    def run(token_budget: int) -> tuple[list[torch.Tensor], torch.Tensor, list[float]]:
        policy = replace(build("llama"), token_budget=token_budget, chunk_bytes=1000)
        parameters = list(policy.model.parameters())
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        gradients, losses, step = [], [], optimizer.step
        optimizer.step = lambda: (gradients.append(torch.cat([p.grad.flatten() for p in parameters])), step())
        on_step = lambda step, loss: losses.append(loss)  # noqa: E731
        warm_up(policy, optimizer, ragged(policy, lengths), steps=3, batch_size=8, seed=0, on_step=on_step)
        return gradients, torch.cat([p.detach().flatten() for p in parameters]), losses

    found = [run(2**30), run(budget)]
    (gradients, weights, losses), (others, other_weights, other_losses) = found
    assert sizes[:3] == [(8, size) for _, size in sizes[:3]] and len(sizes) > 6
    assert all(size <= budget or rows == 1 for rows, size in sizes[3:])
    assert all((a - b).abs().max() <= 1e-6 for a, b in zip(gradients, others, strict=True))
    assert (weights - other_weights).abs().max() <= 1e-6 and losses == pytest.approx(other_losses, abs=1e-6)


def demonstrations_file(folder: Path, response: str = "w7 w8") -> Path:
    path = folder / "demos.jsonl"
    path.write_text("".join(json.dumps({"question": f"w{i}", "response": response}) + "\n" for i in range(6)))
    return path


def model_folder(folder: Path) -> Path:
    policy = build("llama")
    policy.model.save_pretrained(folder / "m")
    policy.tokenizer.save_pretrained(folder / "m")
    return folder / "m"


def flags(folder: Path, *more: str) -> list[str]:
    data = data_file(folder)
    data.write_text("".join(json.dumps({"question": f"w{i}", "answer": str(i)}) + "\n" for i in range(12)))
    return [
        "--model", str(model_folder(folder)), "--data", str(data), "--held-out", "3", "--run", str(folder / "run"),
        "--steps", "1", "--questions-per-step", "2", "--group-size", "2", "--max-response-length", "4",
        "--max-prompt-length", "20", "--device", "cpu", "--eval-every", "0", "--save-every", "1",
        "--system-prompt", "w1", "--warmup-data", str(demonstrations_file(folder)), *more,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [
        ["--preset", "24gb", "--dtype", "bfloat16"],
        ["--preset", "12gb", "--dtype", "bfloat16"],
        ["--optimizer", "adamw8bit", "--dtype", "bfloat16"],
    ],
    ids=["24gb", "12gb", "8 bit"],
)
def test_a_real_model_is_warmed_up_as_it_is_trained(settings, tmp_path, monkeypatch):
    """By the run's optimiser, on the weights that it trains in the run's dtype, with checkpointing and micro-batches;
    what it learns is there in RL and after a resume, which does not learn it again; its moments are gone by then."""
    if "adamw8bit" in settings:
        pytest.importorskip("torchao")
    seen: dict[str, Any] = {}
    original = prepare.warm_up

    def watched(policy: Policy, optimizer: Any, examples: Any, **arguments: Any) -> None:
        assert "optimizer" not in seen  # once
        trained = [p for p in policy.model.parameters() if p.requires_grad]
        seen.update(optimizer=weakref.ref(optimizer), kind=type(optimizer).__name__, budget=policy.token_budget)
        layers = [m for m in policy.model.modules() if type(m).__name__ == "LlamaDecoderLayer"]
        seen["recomputed"] = [getattr(layer.forward, "func", None) is recomputed for layer in layers]
        seen["trained"] = (
            len(trained),
            {p.dtype for p in trained},
            sum(p.numel() for g in optimizer.param_groups for p in g["params"]),
        )
        before = [t.detach().clone() for t in trained]
        losses: list[float] = []
        on_step = arguments.pop("on_step")

        def noted(step: int, loss: float) -> None:
            losses.append(loss)
            on_step(step, loss)

        original(policy, optimizer, examples, on_step=noted, **arguments)
        assert losses[-1] < losses[0] - 0.2
        assert any(not torch.equal(a, b) for a, b in zip(before, trained))
        assert all(p.grad is None for p in trained)

    def update(policy: Policy, *arguments: Any, **named: Any) -> Any:
        gc.disable()  # freed by then, and not only when the collector next runs
        assert seen["optimizer"]() is None
        gc.enable()
        with torch.no_grad():
            seen["after"] = policy.score([trajectory([4], [9, 10, 0])]).logprobs.sum().item()
        return original_update(policy, *arguments, **named)

    original_update = train.update_policy
    monkeypatch.setattr(train, "update_policy", update)
    monkeypatch.setattr(prepare, "warm_up", watched)
    monkeypatch.setattr(session, "plot_curves", lambda *arguments: None)
    lora = settings[1] == "12gb"
    more = ["--warmup-steps", "40", "--warmup-lr", "1e-2", "--train-batch-tokens", "30"]
    assert train.main([*flags(tmp_path, *settings), *more]) == 0
    assert seen["budget"] == 30
    assert seen["kind"] == ("AdamW" if lora else "StochasticAdamW" if settings[1] == "24gb" else "EagerAdamW8bit")
    assert seen["recomputed"] == [True, True]
    count, dtypes, size = seen["trained"]
    assert dtypes == {torch.float32 if lora else torch.bfloat16} and (size < 5000 * 32 if lora else size > 5000)
    learned = seen["after"]
    assert learned > -10.5  # untrained: three times log 40, 11 nats
    assert train.main(["--resume", str(tmp_path / "run"), "--steps", "2"]) == 0
    assert seen["after"] == pytest.approx(learned, abs=0.5)


def test_demonstrations_that_no_rollout_could_equal_are_left_out(capsys):
    policy = build("llama")
    config = resolve(dict(
        model="x/y", preset="none", system_prompt="", max_prompt_length=12, max_response_length=3, warmup_steps=1,
    ))  # fmt: skip
    short, long = Question("a", "w1", ""), Question("b", "w1 " * 20, "")
    pairs = [(short, "w2 w3"), (short, "w2 w3 w4"), (long, "w2")]  # the second with its end has four tokens
    prepare.follow_demonstrations(policy, pairs, config, StopRequest())
    assert "skipped 2 of 3 demonstrations" in capsys.readouterr().out
    with pytest.raises(InputError, match="every demonstration is longer"):
        prepare.follow_demonstrations(policy, pairs[2:], config, StopRequest())


def test_learning_rates_are_those_of_large_models():
    for preset in ("none", "24gb", "12gb", "paper"):
        config = resolve(dict(model="x/y", preset=preset))
        assert config.warmup_lr == (7e-5 if config.lora_rank else 7e-6), preset
    assert all("warmup_lr" in PRESETS[preset] for preset in ("toy", "hard"))


# ---------------------------------------------------------------------------------------- the toy's cache


def test_the_cache_is_named_by_all_that_shapes_the_policy(tmp_path, monkeypatch):
    cpu = torch.device("cpu")

    def key(device: torch.device = cpu, **changes: Any) -> str:
        return prepare.warm_start_key(tiny_config(tmp_path, **{"warmup_steps": 5, **changes}), device)

    names = {key(), key(torch.device("cuda"))}
    changes = dict(
        warmup_steps=6, warmup_lr=1.0, seed=1, held_out=6, system_prompt="x", threads=2, toy_questions=25,
        toy_reasoning=0.5, toy_skill_steps=7,
    )  # fmt: skip
    for name, value in changes.items():
        names.add(key(**{name: value}))
    with (
        monkeypatch.context() as patched
    ):  # its demonstrations, training and size are code, which the version stands for
        patched.setattr(prepare, "WARM_START_VERSION", prepare.WARM_START_VERSION + 1)
        names.add(key())
    assert len(names) == 2 + len(changes) + 1
    assert key() == key(lr=1.0) == key(steps=9) == key(train_batch_tokens=1) == key(optimizer="adamw16")


def test_an_untrained_toy_has_no_cache_and_no_bar(tmp_path, capsys):
    policy = prepare.warmed_up_toy(tiny_config(tmp_path), [], torch.device("cpu"), StopRequest())
    assert not (tmp_path / ".warmup").exists() and "warm-up" not in capsys.readouterr().err
    pairs = zip(policy.model.parameters(), toy.build_policy(seed=0).model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
