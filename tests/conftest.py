"""What several test files share: tiny real models, runs of milliseconds, and folders outside the project."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for the network
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

import train
from nano_exgrpo import toy
from nano_exgrpo.config import TrainConfig, resolve
from nano_exgrpo.infra import prepare, session
from nano_exgrpo.infra.run_folder import read_lines
from nano_exgrpo.infra.session import State
from nano_exgrpo.policy import Policy, make_policy
from nano_exgrpo.questions import Question
from nano_exgrpo.trajectory import Trajectory

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"
QWEN_TOKENIZER = SHARED / "tokenizers" / "qwen2.5-math"

torch.set_num_threads(1)  # the models here are so small that a second thread costs more than it gives


def tiny_toy(seed: int = 0) -> Policy:
    """The toy's tokenizer with a still smaller Qwen2, untrained: every token has about the same probability."""
    return toy.build_policy(seed=seed, hidden=16, layers=1)


@pytest.fixture
def policy() -> Policy:
    return tiny_toy()


def word_tokenizer(words: int = 40) -> Any:
    """A tokenizer without chat template, as GPT-2 and base Llamas have: w0 w1 … and <eos>."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<eos>": 0, "<unk>": 1, **{f"w{i}": i + 2 for i in range(words - 2)}}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", unk_token="<unk>")


def build(family: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Policy:
    """A random tiny model of a family: "qwen2" (tied embeddings), "llama" (untied) or "gpt2" (learned positions)."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    if family == "qwen2":
        policy = tiny_toy(seed)
        policy.model.to(dtype)
        return policy
    tokenizer = word_tokenizer()
    if family == "llama":
        config = LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, eos_token_id=0, bos_token_id=None,
        )  # fmt: skip
        return make_policy(LlamaForCausalLM(config).to(dtype), tokenizer)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_embd=16, n_layer=2, n_head=2, n_positions=64, eos_token_id=0, bos_token_id=None
    )
    return make_policy(GPT2LMHeadModel(config).to(dtype), tokenizer)


def ragged(policy: Policy, lengths: list[tuple[int, int]], seed: int = 0) -> list[Trajectory]:
    """Trajectories of random tokens, of the given (prompt, response) lengths."""
    generator = torch.Generator().manual_seed(seed)
    size = policy.model.get_output_embeddings().weight.shape[0]

    def draw(n: int) -> torch.Tensor:
        return torch.randint(1, size, (n,), generator=generator)

    prompts = [draw(p) for p, _ in lengths]
    return [trajectory(p, draw(r)) for p, (_, r) in zip(prompts, lengths)]


def trajectory(prompt_ids: Any, response_ids: Any, *, id: str = "q", answer: str = "", **fields: Any) -> Trajectory:
    """One with these token ids, given as tensors or lists."""
    prompt = torch.as_tensor(prompt_ids, dtype=torch.long)
    question = Question(id, "?", answer, prompt_ids=prompt)
    return Trajectory(question, torch.as_tensor(response_ids, dtype=torch.long), **{"text": "", **fields})


HIDDEN_DEFAULTS = dict(do_sample=True, top_k=20, top_p=0.8, temperature=0.7, repetition_penalty=1.1, max_new_tokens=3)


def give_hidden_defaults(policy):
    """A generation_config such as Qwen2.5's checkpoints carry, and worse."""
    for name, value in HIDDEN_DEFAULTS.items():
        setattr(policy.model.generation_config, name, value)


@pytest.fixture
def mac(monkeypatch):
    """A Mac's generator of random numbers, seeded by torch.manual_seed as there; draws with `mac.draw()`."""

    class Metal:
        generator = torch.Generator()

        def draw(self):
            return torch.rand(3, generator=self.generator)

    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "manual_seed", lambda seed: Metal.generator.manual_seed(seed))
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: Metal.generator.get_state())
    monkeypatch.setattr(torch.mps, "set_rng_state", lambda state: Metal.generator.set_state(state))
    return Metal()


# ------------------------------------------------------------ runs of train.py with an untrained policy


def tiny_config(folder: Path, **changes: Any) -> TrainConfig:
    """A run of milliseconds a step on an untrained policy."""
    given = dict(
        run=str(folder / "run"), steps=4, questions_per_step=4, group_size=4, max_response_length=6, warmup_steps=0,
        toy_questions=24, toy_skill_steps=0, held_out=5, eval_every=0, log_samples=0, threads=0, device="cpu",
        max_prompt_length=32,
    )  # fmt: skip
    return resolve({**given, **changes})


@pytest.fixture
def tiny(monkeypatch):
    """A checker that a random policy satisfies about half of the time; and no time spent on plots."""
    monkeypatch.setattr(session, "plot_curves", lambda *args: None)
    monkeypatch.setattr(prepare, "reward_of", lambda t: coin(t.text, t.question.answer))


def in_step(monkeypatch: pytest.MonkeyPatch, number: int, action: Callable[[State], Any]) -> None:
    """Let something happen in step `number` of train.py's loop."""
    original = train.train_step

    def step(state: State, config: TrainConfig) -> Any:
        if state.step + 1 == number:
            action(state)
        return original(state, config)

    monkeypatch.setattr(train, "train_step", step)


def files_of(folder: Path | str) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def coin(text: str, gold: str) -> float:
    return float(hashlib.sha256((text + gold).encode()).digest()[0] < 128)


def metrics(config: TrainConfig) -> list[dict[str, Any]]:
    return read_lines(Path(config.run) / "metrics.jsonl")


def flags_of(config: TrainConfig) -> list[str]:
    """The command line that gives this configuration."""
    flags = []
    for name, value in vars(config).items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(flag if value else flag.replace("--", "--no-", 1))
        elif value != "":
            flags += [flag, str(value)]
    return flags


def data_file(folder: Path, count: int = 12) -> Path:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps({"question": f"{i} + 1", "answer": str(i + 1)}) + "\n" for i in range(count)))
    return path
