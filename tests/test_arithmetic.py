r"""Arithmetic in words: right answers, held-out questions that nothing else shows, and runs of the preset."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import QWEN_TOKENIZER, metrics

from nano_exgrpo.arithmetic import MIXTURES, arithmetic_demonstrations, arithmetic_questions
from nano_exgrpo.checker import reward
from nano_exgrpo.config import PRESETS, resolve
from nano_exgrpo.errors import InputError
from nano_exgrpo.infra.checkpoint import save_model
from nano_exgrpo.infra.prepare import check_early, load_data, load_demonstrations
from nano_exgrpo.policy import make_policy
from nano_exgrpo.warmup import BATCH
from train import train

SMOLLM2 = os.environ.get("SMOLLM2", "")  # a folder of docs/smollm2.py


def solve(prompt: str) -> int:
    """A second reading of a question, from its words alone."""
    numbers = [int(n) for n in re.findall(r"\d+", prompt)]
    if prompt.startswith("Which"):
        return max(numbers) if "larger" in prompt else min(numbers)
    if "How many" in prompt:
        *factors, change = numbers
        owned = factors[0] * factors[1] if "boxes" in prompt else factors[0]
        return owned + change if "gets" in prompt else owned - change
    total = numbers[0]
    for word, number in zip(re.findall("plus|minus|times", prompt), numbers[1:], strict=True):
        total = {"plus": total + number, "minus": total - number, "times": total * number}[word]
    return total


@pytest.mark.parametrize("data", MIXTURES)
def test_answers_and_worked_answers_are_right(data: str) -> None:
    questions = arithmetic_questions(data, 600, seed=3)
    assert all(int(q.answer) == solve(q.prompt) >= 0 for q in questions)
    assert len({q.prompt for q in questions}) == len({q.id for q in questions}) == 600
    for question, worked in arithmetic_demonstrations(data, 200, seed=3, avoid=[]):
        assert int(question.answer) == solve(question.prompt) and reward(worked, question.answer) == 1, worked
        for left, result in re.findall(r"([\d+*-]+)=(\d+)", worked):
            a, sign, b = re.fullmatch(r"(\d+)([+*-])(\d+)", left).groups()
            assert {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign] == int(result)


def test_the_mixtures_differ_in_their_levels() -> None:
    def share(data: str, levels: str) -> float:
        questions = arithmetic_questions(data, 500, seed=0)
        return sum(q.source[-1] in levels for q in questions) / len(questions)

    assert share("arithmetic:easy", "12") == 1
    assert share("arithmetic:hard", "45") > 0.8 and share("arithmetic:hard", "12") > 0.05
    assert all(share("arithmetic", level) > 0.1 for level in "12345")


def laptop(folder: Path, **changes: Any) -> Any:
    return resolve({"preset": "laptop", "model": "someone/model", "run": str(folder / "run"), **changes})


def test_held_out_questions_are_neither_trained_on_nor_demonstrated(tmp_path: Path) -> None:
    config = laptop(tmp_path, seed=5)
    training, held_out = load_data(config)
    kept = {q.prompt for q in held_out}
    assert len(kept) == config.held_out and not kept & {q.prompt for q in training}
    demonstrations = load_demonstrations(config, held_out)
    assert len(demonstrations) >= BATCH * config.warmup_steps
    assert not kept & {question.prompt for question, _ in demonstrations}
    # Without the list of what to avoid some would be there, so the line above can fail.
    assert kept & {question.prompt for question, _ in arithmetic_demonstrations(config.data, 500, seed=5, avoid=[])}


def test_a_seed_names_the_questions(tmp_path: Path) -> None:
    first, again, other = (load_data(laptop(tmp_path, seed=seed)) for seed in (1, 1, 2))
    assert first == again and first != other


def test_the_warm_up_knows_no_demonstrations_for_other_data(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--warmup-data"):
        check_early(laptop(tmp_path, data="some.jsonl"))


def test_what_cannot_be_generated_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="arithmetic:easy"):
        arithmetic_questions("arithmetic:medium", 5, seed=0)
    monkeypatch.setitem(MIXTURES, "arithmetic:first", (1, 0, 0, 0, 0))  # 361 sums, 190 differences, 684 comparisons
    assert len(arithmetic_questions("arithmetic:first", 1000, seed=0)) == 1000
    with pytest.raises(InputError, match="--held-out"):
        arithmetic_questions("arithmetic:first", 1236, seed=0)


@pytest.mark.skipif(not QWEN_TOKENIZER.is_dir(), reason="needs the tokenizer in shared/")
def test_the_preset_has_room_for_every_question_and_demonstration() -> None:
    """Qwen2.5 splits numbers into digits, as SmolLM2 does."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(QWEN_TOKENIZER)
    preset = PRESETS["laptop"]
    for data in MIXTURES:
        for question, worked in arithmetic_demonstrations(data, 500, seed=0, avoid=[]):
            assert len(tokenizer(worked)["input_ids"]) < preset["max_response_length"]
            assert (
                len(tokenizer(question.prompt)["input_ids"]) < preset["max_prompt_length"] - 25
            )  # the chat template's


def tiny_model(folder: Path) -> Path:
    """A random model that reads and writes any text, byte by byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {"<eos>": 0, **{letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()), 1)}}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=256, eos_token_id=0, bos_token_id=None,
    )  # fmt: skip
    save_model(make_policy(LlamaForCausalLM(shape), tokenizer), folder)
    return folder


def test_the_preset_runs_with_a_tiny_model_in_place_of_the_real_one(tmp_path: Path) -> None:
    changes = dict(
        held_out=4, max_prompt_length=128, max_response_length=40, warmup_steps=3, eval_every=1, device="cpu"
    )
    config = laptop(tmp_path, model=str(tiny_model(tmp_path / "model")), steps=2, **changes)
    train(config)
    rows = metrics(config)
    assert [row["step"] for row in rows] == [0, 1, 2] and all("eval/accuracy" in row for row in rows)
    assert "eval/before_warmup" in rows[0] and "eval/before_warmup" not in rows[1]


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2, reason="SMOLLM2 names no folder of docs/smollm2.py")
def test_five_steps_of_the_real_model(tmp_path: Path) -> None:
    config = laptop(tmp_path, model=SMOLLM2, device="cpu", steps=5, questions_per_step=2, held_out=40)
    train(config)
    rows = metrics(config)
    assert len(rows) == 6 and not any(row["skipped_updates"] for row in rows[1:])
    assert rows[0]["eval/before_warmup"] < 0.1 < rows[0]["eval/accuracy"]  # without its warm-up it boxes nothing
    assert any(row["trained_rows"] > 0 for row in rows[1:])
