"""eval.py's settings."""

from __future__ import annotations

from dataclasses import dataclass

from nano_exgrpo.config import SYSTEM_PROMPT, check_fields, require, setting


@dataclass
class EvalConfig:
    """eval.py's settings; `python eval.py --help` prints them. Raises InputError, naming the flag, for a bad value."""

    model: str = setting(
        "", "a run folder of train.py, a model folder, a hub id, or a short name such as Qwen2.5-Math-1.5B"
    )
    bench: str = setting(
        "",
        "benchmarks, separated by commas: names, in-distribution, ood or all; empty: the run's own held-out questions",
    )
    data: str = setting(
        "", "a .jsonl file with the questions, or a folder with <benchmark>.jsonl files; empty: the hub"
    )
    limit: int = setting(0, "questions of each benchmark, drawn by --seed; 0: all")
    samples: int = setting(
        0, "responses to each question; 0: as the benchmark is scored", paper="32 for AIME and AMC, else 1"
    )
    k: str = setting("", "the k of pass@k and maj@k, separated by commas; empty: the number of samples")
    temperature: float = setting(0.6, "sampling temperature; 0 is greedy", paper=0.6, high=100)
    top_p: float = setting(1.0, "nucleus sampling; 1 is off", paper=1.0, low=1e-6, high=1)
    max_new_tokens: int = setting(
        1024, "longest response in tokens; default for a run: its --max-response-length", paper=8192, low=1
    )
    system_prompt: str = setting(
        SYSTEM_PROMPT, "system message of every prompt; default for a run: the run's; empty: none"
    )
    seed: int = setting(0, "seed of sampling and of --limit")
    device: str = setting("auto", "auto (CUDA, then MPS, then CPU), or a torch device")
    dtype: str = setting(
        "auto",
        "weights: auto takes a run as it was trained, merged LoRA in float32; other models as they are stored on CUDA, "
        "elsewhere float32",
        choices="auto float32 bfloat16",
    )
    sampler: str = setting(
        "generate", "HF generate, or our own loop over tokens: the same distribution, faster", choices="generate loop"
    )
    batch_tokens: int = setting(
        32768, "tokens in one batch, prompts and longest responses; halved when memory runs out", low=1
    )
    out: str = setting("", "folder of generations.jsonl and results.json; empty: <run>/eval, or evals/<model>")
    overwrite: bool = setting(False, "generate anew what is already in that folder")
    regrade: bool = setting(False, "grade the folder's generations anew, without the model")
    show: str = setting(
        "none",
        "print the folder's generations of this kind, without the model",
        choices="none wrong truncated unparsable right",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        ks = [k.strip() for k in self.k.split(",")] if self.k else []
        whole = all(k.isascii() and k.isdigit() and len(k) < 10 and int(k) > 0 for k in ks)
        require(self, "k", whole, "whole numbers separated by commas")

    @property
    def ks(self) -> list[int]:
        return [int(k) for k in self.k.split(",")] if self.k else []
