"""The memory estimate against measured peaks, and what it advises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, build

from nano_exgrpo.config import parse_train_config, resolve, to_dict
from nano_exgrpo.errors import InputError
from nano_exgrpo.infra import memory
from nano_exgrpo.infra.memory import ModelShape, estimate, fit_table, load_shape, shape_of, suggest
from train import main

CPU, CUDA = torch.device("cpu"), torch.device("cuda")

# Two real steps in a process of its own; prints (bytes of the loaded weights + what the steps added, estimate).
CHILD = """
import json, sys, torch
from pathlib import Path
from bench.step import Ours, llama_shape, peak_bytes
from nano_exgrpo.infra.memory import estimate, shape_of
from nano_exgrpo.policy import enable_gradient_checkpointing
size, tokens, dtype, checkpointing = json.loads(sys.argv[1])
torch.set_num_threads(1)
shape = llama_shape(*size)
ours = Ours(shape, tokens=tokens, dtype=dtype)
config = ours.config
config.dtype, config.rollout_batch, config.max_prompt_length = dtype, 512, len(shape.prompt_ids[0])
config.gradient_checkpointing = checkpointing
if checkpointing:
    config.logits_megabytes = 16
    enable_gradient_checkpointing(shape.policy.model)
before = peak_bytes("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
ours.step()
ours.step()
weights = sum(p.numel() * p.element_size() for p in shape.policy.model.parameters())
found = estimate(shape_of(shape.policy.model), config, torch.device("cpu"))
print(json.dumps([peak_bytes() - before + weights, found["total"]]))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
@pytest.mark.parametrize(
    ("size", "tokens", "dtype", "checkpointing"),
    [
        ((8_192, 192, 6, 8, 32, 32), 1024, "float32", False),  # 4 M weights
        pytest.param((16_384, 384, 6, 4, 32, 64), 1024, "bfloat16", False, marks=pytest.mark.slow),  # 15 M
        pytest.param((16_384, 384, 8, 4, 32, 64), 2048, "float32", True, marks=pytest.mark.slow),  # 19 M
        pytest.param((32_768, 576, 8, 2, 64, 128), 768, "float32", False, marks=pytest.mark.slow),  # 47 M
    ],
)
def test_estimate_is_within_a_quarter_of_the_measured_peak(size, tokens, dtype, checkpointing):
    command = [sys.executable, "-c", CHILD, json.dumps([size, tokens, dtype, checkpointing])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    measured, estimated = json.loads(done.stdout.splitlines()[-1])
    assert 0.75 < estimated / measured < 1.25, (measured / 1e6, estimated / 1e6)


def qwen() -> ModelShape:
    """Qwen2.5-Math-1.5B."""
    return ModelShape(
        weights=1_543_714_304,
        linear=1_310_253_056,
        vocabulary=151_936,
        hidden=1536,
        intermediate=8960,
        layers=28,
        query=1536,
        kv=256,
    )


def test_shape_counts_tied_weights_once():
    for family in ("qwen2", "llama"):
        policy = build(family)
        found = shape_of(policy.model)
        assert found.weights == sum(p.numel() for p in policy.model.parameters())
        assert (found.hidden, found.query, found.kv) == (16, 16, 8)
        head = policy.model.get_output_embeddings().weight.numel()
        others = policy.model.get_input_embeddings().weight.numel()
        norms = 16 * (2 * found.layers + 1)
        assert found.linear == found.weights - others - norms - (head if family == "llama" else 0)


def test_known_figures_of_full_fine_tuning():
    """1.54 B weights before activations and cache, in GB: 24.7 in fp32, 9.3 with 8-bit moments, about 3.3 and the
    adapters' gradients and moments with LoRA; 28 kB of bf16 cache a token."""
    common = dict(model="x/y", preset="none", rollout_batch=1, max_prompt_length=1000, max_response_length=1000)

    def state(**settings):
        found = estimate(qwen(), resolve({**common, **settings}), CPU)
        return (found["weights"] + found["gradients"] + found["optimiser"]) / 1e9, found["KV cache"]

    assert state(dtype="float32")[0] == pytest.approx(24.7, abs=0.05)
    assert state(dtype="bfloat16")[0] == pytest.approx(24.7, abs=0.05)
    total, cache = state(dtype="bfloat16", optimizer="adamw8bit")
    assert total == pytest.approx(9.3, abs=0.05)
    assert cache / 2000 == pytest.approx(28_672 * (1 + 1 / 28) + 151_936 * 16 / 2000, rel=1e-3)
    assert state(dtype="bfloat16", lora_rank=8)[0] == pytest.approx(3.3, abs=0.1)


@pytest.mark.parametrize(("preset", "card"), [("24gb", 24e9), ("12gb", 12e9)])
def test_presets_fit_their_card(preset, card):
    config = resolve(dict(model="Qwen2.5-Math-1.5B", preset=preset, dtype="bfloat16"))
    assert estimate(qwen(), config, CUDA)["total"] < 0.85 * card


def test_each_flag_lowers_its_own_row():
    base = resolve(dict(model="x/y", preset="none", dtype="bfloat16"))
    before = estimate(qwen(), base, CPU)
    for name, value, row in [
        ("optimizer", "adamw8bit", "optimiser"), ("lora_rank", 8, "gradients"), ("gradient_checkpointing", True, "activations"),
        ("train_batch_tokens", 4096, "activations"), ("logits_megabytes", 64, "logits"), ("rollout_batch", 16, "KV cache"),
    ]:  # fmt: skip
        changed = resolve(dict(model="x/y", preset="none", dtype="bfloat16", **{name: value}))
        assert estimate(qwen(), changed, CPU)[row] < before[row], name
    assert estimate(qwen(), base, CPU, world_size=4)["optimiser"] == before["optimiser"] / 4


@pytest.mark.parametrize("card", [24e9, 12e9, 8e9])
@pytest.mark.parametrize("preset", ["none", "paper", "24gb"])
def test_advice_followed_gives_the_promised_estimate(preset, card):
    config = resolve(dict(model="x/y", preset=preset, dtype="bfloat16", data="d.jsonl"))
    flags, reached = suggest(qwen(), config, CUDA, card)
    words = " ".join(flags).split()
    settings, i = {}, 0
    while i < len(words):
        name = words[i][2:].replace("-", "_")
        bare = i + 1 == len(words) or words[i + 1].startswith("--")
        value = True if bare else words[i + 1]
        settings[name] = int(value) if value is not True and value.isdigit() else value
        i += 1 if bare else 2
    followed = resolve({**dict(model="x/y", preset=preset, dtype="bfloat16", data="d.jsonl"), **settings})
    assert estimate(qwen(), followed, CUDA)["total"] == pytest.approx(reached)
    assert reached <= card and (flags or estimate(qwen(), config, CUDA)["total"] <= card)


def test_table_says_whether_it_fits(monkeypatch):
    config = resolve(dict(model="x/y", preset="24gb", dtype="bfloat16"))
    for card, word in ((24e9, "fits"), (12e9, "too much for this device's 12.0 GB; "), (2e9, "smaller model")):
        monkeypatch.setattr(memory, "device_memory", lambda device, card=card: card)
        assert word in fit_table(qwen(), config, CUDA)


def test_dry_run_prints_the_table_and_leaves_nothing(tmp_path, capsys):
    build("llama").model.config.save_pretrained(tmp_path / "m")
    for model in ("toy", str(tmp_path / "m")):
        assert main(["--model", model, "--dry-run", "--run", str(tmp_path / "run"), "--device", "cpu"]) == 0
        out = capsys.readouterr().out
        assert "KV cache" in out and "peak" in out and "fits" in out
    assert not (tmp_path / "run").exists()


def test_dry_run_of_an_unreadable_model_is_one_sentence(tmp_path, capsys):
    with pytest.raises(InputError, match="could not be read"):
        (tmp_path / "empty").mkdir()
        load_shape(str(tmp_path / "empty"))
    assert main(["--model", str(tmp_path / "empty"), "--dry-run"]) == 2
    assert capsys.readouterr().err.startswith("train.py: ")


def test_the_warm_up_of_a_real_model_is_in_the_estimate():
    """It is an update of --warmup-batch rows; the toy's, another model's and none at all add nothing."""
    few = dict(
        model="x/y", preset="none", dtype="bfloat16", questions_per_step=2, group_size=2, train_batch_tokens=100_000
    )
    plain, warm = (estimate(qwen(), resolve({**few, **more}), CPU) for more in ({}, {"warmup_steps": 50}))
    assert warm["activations"] == plain["activations"] * 100_000 / (4 * 2048) and warm["KV cache"] == plain["KV cache"]
    assert "the warm-up takes no more" in fit_table(qwen(), resolve({**few, "warmup_steps": 50}), CPU)
    assert "warm-up" not in fit_table(qwen(), resolve(few), CPU) + fit_table(qwen(), resolve({}), CPU)


def test_dry_run_tells_when_prompt_and_response_exceed_the_context(tmp_path, capsys):
    """As the run itself would: it refuses to start, or skips the longest prompts."""
    build("llama").model.config.save_pretrained(tmp_path / "m")  # a context of 64
    for prompt, response, sentence in (
        (8, 64, "will not start: --max-response-length 64 leaves no room for a prompt in the model's context of 64 tokens"),
        (8, 60, "will skip prompts longer than 4 tokens"), (8, 56, ""),
    ):  # fmt: skip
        lengths = ["--max-prompt-length", str(prompt), "--max-response-length", str(response)]
        assert main(["--model", str(tmp_path / "m"), "--dry-run", "--device", "cpu", *lengths]) == 0
        out = capsys.readouterr().out
        assert sentence in out and ("context" in out) == bool(sentence)


def test_the_readme_names_no_lengths_that_its_model_cannot_have():
    """Qwen2.5-Math attends to 4,096 tokens."""
    commands = [
        line.split("#")[0].split()
        for line in (ROOT / "README.md").read_text().splitlines()
        if "train.py --model Qwen2.5-Math-1.5B" in line
    ]
    assert len(commands) >= 4
    for words in commands:
        flags = words[words.index("train.py") + 1 :]
        config = parse_train_config([word for word in flags if word != "--dry-run"])
        assert config.max_prompt_length + config.max_response_length <= 4096, flags


def test_dry_run_counts_the_processes_of_torchrun_and_one_of_them_speaks(capsys, monkeypatch):
    def optimiser() -> str:
        assert (
            main(["--dry-run", "--device", "cpu", "--preset", "none", "--toy-hidden", "1024", "--toy-layers", "4"]) == 0
        )
        out = capsys.readouterr().out
        return out and next(line.split()[1] for line in out.splitlines() if "optimiser" in line)

    alone = float(optimiser())
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    assert float(optimiser()) == pytest.approx(alone / 4, abs=0.01) and alone > 0.1
    monkeypatch.setenv("RANK", "3")
    assert optimiser() == ""


def test_dry_run_of_a_run_that_goes_on(tmp_path, capsys):
    """Tells whether other memory settings would do; the run is left as it is."""
    config = resolve({"run": str(tmp_path / "run"), "toy_hidden": 16})
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / "config.json"
    path.write_text(json.dumps(to_dict(config)))
    before = path.read_text()
    assert main(["--resume", str(tmp_path / "run"), "--dry-run", "--train-batch-tokens", "64", "--device", "cpu"]) == 0
    assert (
        "peak" in capsys.readouterr().out
        and path.read_text() == before
        and list((tmp_path / "run").iterdir()) == [path]
    )
