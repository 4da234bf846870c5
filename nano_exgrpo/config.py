"""Every setting, with its meaning, its unit and the paper's value; the command line is made from it.

A value is resolved in the order: flag on the command line, then preset, then the default written here.
`runs/<name>/config.json` records what came out.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from nano_exgrpo.errors import InputError
from nano_exgrpo.infra.run_folder import read_config

SYSTEM_PROMPT = "Please reason step by step, and put your final answer within \\boxed{}."


def setting(default: Any, help: str, *, paper: Any = None, choices: tuple[str, ...] | None = None) -> Any:
    """A dataclass field that explains itself. paper: the released run's value, the paper's but for
    what TUTORIAL.md lists as departures."""
    return dataclasses.field(default=default, metadata={"help": help, "paper": paper, "choices": choices})


@dataclass
class TrainConfig:
    """train.py's settings; `python train.py --help` prints them with their meaning, unit and the paper's value."""

    # ---- what to train, on what
    model: str = setting("toy", "toy, a model folder, a hub id, or a short name such as Qwen2.5-Math-1.5B")
    data: str = setting(
        "",
        "questions: a .jsonl file or a hub id[:configuration]; empty: toy sums for the toy, GSM8K for a real model",
        paper="Elliott/Openr1-Math-46k-8192",
    )
    question_field: str = setting("question", "name of the question's field in the data")
    answer_field: str = setting("answer", "name of the answer's field in the data")
    split: str = setting("train", "split of a hub data set")
    held_out: int = setting(200, "questions set aside for evaluation, never trained on")
    system_prompt: str = setting(SYSTEM_PROMPT, "system message of every prompt; empty leaves it out")
    preset: str = setting(
        "auto",
        "settings to start from: toy; hard (a toy where replay pays); 24gb or 12gb (one small GPU); paper (the released run as far as settings can say it, without its system prompt); auto: toy for the toy, else 24gb",
        choices=("auto", "toy", "hard", "24gb", "12gb", "paper", "none"),
    )
    # ---- the method
    algo: str = setting(
        "exgrpo", "exgrpo, or grpo: the same loop without replay and retirement", choices=("exgrpo", "grpo")
    )
    steps: int = setting(100, "training steps", paper=700)
    questions_per_step: int = setting(32, "B, questions a step", paper=128)
    group_size: int = setting(8, "K, trajectories a question", paper=8)
    replay_ratio: float = setting(0.5, "rho, the largest share of a step's questions that is replayed", paper=0.5)
    start_threshold: float = setting(
        0.35,
        "delayed start: store and replay once a step's fresh success rate exceeds this; -1 starts at once",
        paper=0.35,
    )
    question_draw: str = setting(
        "gaussian", "which questions to replay", paper="gaussian", choices=("gaussian", "uniform")
    )
    draw_sigma: float = setting(
        1.0, "sigma of the question draw, in counts of successes; K makes it 1 in rates", paper=1.0
    )
    trajectory_choice: str = setting(
        "lowest",
        "which stored success to replay, by entropy under the current policy; none: ask the question again without one",
        paper="lowest",
        choices=("lowest", "random", "highest", "none"),
    )
    max_per_question: int = setting(0, "most stored successes of one question, the newest; 0 keeps all", paper=0)
    retire: bool = setting(True, "never ask again what all K trajectories solved", paper=True)
    shaping: bool = setting(True, "shape the replayed weight, f(w) = w/(w+beta)", paper=True)
    beta: float = setting(0.1, "beta of the shaping", paper=0.1)
    importance_correction: bool = setting(True, "weigh replayed tokens by pi_theta/pi_past", paper=True)
    clip_range: float = setting(0.2, "epsilon of the PPO clip", paper=0.2)
    clip_when_mixed: bool = setting(
        True, "clip fresh rows also once replay has started (the released code does not)", paper=False
    )
    normalize_rows: bool = setting(
        True, "divide the loss by the number of rows as well as by L (the released code: by L alone)", paper=False
    )
    normalize_std: bool = setting(False, "divide advantages by the group's standard deviation", paper=False)
    entropy_coef: float = setting(0.0, "entropy bonus, times the mean entropy of the trained tokens", paper=0.001)
    difficulty: str = setting(
        "all",
        "learn only from groups in which at most a quarter succeeds (hard), at least three quarters do (easy), or between (medium): for studies",
        choices=("all", "hard", "medium", "easy"),
    )
    temperature: float = setting(
        1.0, "sampling temperature of rollouts; the trained distribution is the sampled one", paper=1.0
    )
    max_prompt_length: int = setting(1024, "tokens; longer prompts are skipped and counted", paper=1024)
    max_response_length: int = setting(1024, "L, tokens; also the loss's constant length", paper=8192)
    wrong_answers: float = setting(
        0.0, "share of the training questions whose answer is replaced by another question's: label noise, for studies"
    )
    out_of_reach: float = setting(
        0.0, "share of the toy's training questions replaced by sums of twice --toy-most-terms: too hard, for studies"
    )
    # ---- optimisation
    updates_per_step: int = setting(1, "optimiser steps a batch, each on its share of the groups", paper=2)
    lr: float = setting(1e-6, "learning rate, constant", paper=1e-6)
    weight_decay: float = setting(0.0, "AdamW's weight decay", paper=0.01)
    grad_clip: float = setting(1.0, "largest gradient norm", paper=1.0)
    # ---- memory and speed
    device: str = setting("auto", "auto (CUDA, then MPS, then CPU), or a torch device")
    dtype: str = setting(
        "auto",
        "float32, or bfloat16: products in bf16 on fp32 weights, but bf16 weights with adamw16, adamw8bit or LoRA; auto: bfloat16 on CUDA",
        choices=("auto", "float32", "bfloat16"),
    )
    optimizer: str = setting(
        "adamw",
        "adamw; adamw16: bf16 weights and moments, rounded stochastically; adamw8bit: bf16 weights, 8-bit moments (needs torchao)",
        choices=("adamw", "adamw16", "adamw8bit"),
    )
    lora_rank: int = setting(
        0,
        "train adapters of this rank on frozen weights, with about ten times the lr (needs peft); 0: train all weights",
    )
    sampler: str = setting(
        "generate",
        "rollouts by HF generate, or by our own loop over tokens (decode.py): the same distribution, faster",
        choices=("generate", "loop"),
    )
    train_batch_tokens: int = setting(8192, "tokens, padding included, in one forward and backward")
    rollout_batch: int = setting(64, "sequences in one generate call")
    logits_megabytes: int = setting(256, "most megabytes of fp32 logits at a time")
    gradient_checkpointing: bool = setting(False, "recompute activations in backward: less memory, a third more time")
    compile: bool = setting(
        False,
        "torch.compile the layers for updates: up to a minute at the start, then updates 8 % faster on two CPU cores, unmeasured on CUDA (needs a C++ compiler, there Triton)",
    )
    threads: int = setting(0, "CPU threads; 0 leaves torch's choice")
    dry_run: bool = setting(False, "only print how much memory these settings take, and which to change")
    # ---- supervised warm-up
    warmup_steps: int = setting(0, "supervised steps before RL; 0 for none")
    warmup_data: str = setting(
        "", "demonstrations for the --warmup-steps of a real model: .jsonl of question and response"
    )
    warmup_batch: int = setting(64, "demonstrations a warm-up step")
    warmup_lr: float = setting(7e-6, "peak learning rate of the warm-up; with LoRA about ten times as much")
    warmup_cache: bool = setting(True, "reuse a toy policy that was warmed up with the same settings")
    # ---- the toy
    toy_questions: int = setting(1000, "training questions")
    toy_fewest_terms: int = setting(2, "fewest terms of a sum")
    toy_most_terms: int = setting(5, "most terms of a sum")
    toy_largest: int = setting(9, "every term of a sum lies in 1..largest")
    toy_reasoning: float = setting(0.2, "share of the demonstrations that reason; the rest guess")
    toy_widest_guess: int = setting(0, "guesses are drawn from 1 to this; 0: from the sums that so many terms can have")
    toy_demonstrations: int = setting(
        0, "different sums in the demonstrations, none of them held out; 0: the training questions"
    )
    toy_skill_steps: int = setting(
        0,
        "warm-up steps on reasoning alone, before the demonstrations that mostly guess: first the skill, then the bad habit",
    )
    toy_skill_lr: float = setting(6e-3, "peak learning rate of those steps")
    toy_hidden: int = setting(96, "width of the toy policy")
    toy_layers: int = setting(3, "layers of the toy policy")
    # ---- the run
    seed: int = setting(0, "seed of everything random")
    run: str = setting(
        "",
        "run folder; empty: runs/<model>-<algo>-seed<seed>, with the preset's name if it is not the model's usual one",
    )
    overwrite: bool = setting(False, "replace the run that is already in the run folder")
    eval_every: int = setting(20, "steps between evaluations on held-out questions; 0: only before and after")
    eval_samples: int = setting(1, "responses to each held-out question")
    eval_temperature: float = setting(0.6, "sampling temperature of evaluations", paper=0.6)
    save_every: int = setting(
        0,
        "steps between checkpoints, the last step included; 0: only when interrupted, and at the end of a resumed run",
    )
    log_samples: int = setting(
        8,
        "trajectories of each step written to samples.jsonl, with the entropy of each token; -1 for all (of several processes the first one's)",
    )
    resume: str = setting("", "run folder to go on with, at its last checkpoint")


@dataclass
class EvalConfig:
    """eval.py's settings; `python eval.py --help` prints them."""

    # ---- what to measure
    model: str = setting(
        "", "a run folder of train.py, a model folder, a hub id, or a short name such as Qwen2.5-Math-1.5B"
    )
    bench: str = setting(
        "",
        "benchmarks, separated by commas: names, in-distribution, ood or all; empty: the run's own held-out questions",
    )
    data: str = setting(
        "", "a .jsonl file with the questions, in place of the hub; or a folder with <benchmark>.jsonl files"
    )
    limit: int = setting(0, "questions of each benchmark, drawn by --seed; 0: all")
    samples: int = setting(
        0, "responses to each question; 0: as the benchmark is scored", paper="32 for AIME and AMC, else 1"
    )
    k: str = setting("", "the k of pass@k and maj@k, separated by commas; empty: the number of samples")
    shuffle_options: bool = setting(
        False, "shuffle the options of multiple-choice questions by --seed (GPQA's always are)"
    )
    # ---- how the policy answers
    temperature: float = setting(0.6, "sampling temperature; 0 is greedy", paper=0.6)
    top_p: float = setting(1.0, "nucleus sampling; 1 is off", paper=1.0)
    max_new_tokens: int = setting(
        1024, "longest response in tokens; default for a run: its --max-response-length", paper=8192
    )
    system_prompt: str = setting(
        SYSTEM_PROMPT, "system message of every prompt; default for a run: the run's; empty leaves it out"
    )
    seed: int = setting(0, "seed of sampling, of --limit and of --shuffle-options")
    # ---- memory and speed
    device: str = setting("auto", "auto (CUDA, then MPS, then CPU), or a torch device")
    dtype: str = setting(
        "auto",
        "weights: auto takes a run as it was trained, merged LoRA in float32; other models as they are stored on CUDA, elsewhere float32",
        choices=("auto", "float32", "bfloat16"),
    )
    sampler: str = setting(
        "generate",
        "responses by HF generate, or by our own loop over tokens (decode.py): the same distribution, faster",
        choices=("generate", "loop"),
    )
    batch_tokens: int = setting(
        32768, "tokens in one batch, prompts and longest responses; halved when memory runs out"
    )
    threads: int = setting(0, "CPU threads; 0 leaves torch's choice")
    # ---- what is kept
    out: str = setting("", "folder of generations.jsonl and results.json; empty: <run>/eval, or evals/<model>")
    overwrite: bool = setting(False, "generate anew what is already in that folder")
    regrade: bool = setting(False, "grade the folder's generations anew, without the model")
    show: str = setting(
        "",
        "page through the folder's generations, without the model",
        choices=("wrong", "truncated", "unparsable", "right"),
    )


# Sums of numbers up to 5 and a policy of 100k weights: what both presets for the toy start from.
TOY: dict[str, Any] = dict(
    steps=120, max_response_length=10, system_prompt="", rollout_batch=512, train_batch_tokens=8192, threads=1, eval_every=20,
    toy_largest=5, toy_fewest_terms=3, toy_most_terms=5, toy_questions=1500, toy_demonstrations=20_000, held_out=300,
    toy_hidden=64, toy_layers=2, warmup_steps=120, warmup_lr=8e-4,
)  # fmt: skip
# What a preset changes. A flag on the command line still wins.
PRESETS: dict[str, dict[str, Any]] = {
    "none": {},
    # A laptop's two cores: from nothing to a learned skill in two minutes.
    "toy": dict(TOY, questions_per_step=32, lr=3e-4, max_prompt_length=16, toy_skill_steps=800),
    # A toy where replay pays (RESULTS.md): 98 of 100 questions are out of the policy's reach, and a failed group teaches nothing.
    "hard": dict(TOY, questions_per_step=16, lr=5e-5, max_prompt_length=24, toy_skill_steps=500, start_threshold=-1.0, out_of_reach=0.98),
    # Qwen2.5-Math-1.5B, all weights, on one 24 GB card: estimated peak 17 GB, in the update (--dry-run). fp32 weights
    # with their gradients and moments would take 25 GB by themselves, hence bf16 with stochastic rounding.
    "24gb": dict(
        steps=200, questions_per_step=32, max_prompt_length=512, max_response_length=1024, rollout_batch=128,
        train_batch_tokens=8192, gradient_checkpointing=True, save_every=20, max_per_question=8, optimizer="adamw16",
    ),
    # The same with LoRA on one 12 GB card: estimated peak 8 GB. Adapters take ten times the learning rates of all weights:
    # those are the paper's for RL, and for the warm-up what Qwen2.5 itself was fine-tuned with (7e-6, cooled to a tenth of
    # it; arXiv 2412.15115).
    "12gb": dict(
        steps=200, questions_per_step=32, max_prompt_length=512, max_response_length=1024, rollout_batch=64,
        train_batch_tokens=4096, gradient_checkpointing=True, save_every=20, max_per_question=8, lora_rank=32, lr=1e-5, warmup_lr=7e-5,
    ),
    # The released run (8 GPUs), as its code computes: for reference, and for those who have them. Its system message, which
    # asks for a <think> section before the solution, is not here; give it with --system-prompt.
    "paper": dict(
        data="Elliott/Openr1-Math-46k-8192", steps=700, questions_per_step=128, updates_per_step=2,
        max_prompt_length=1024, max_response_length=8192, entropy_coef=0.001, weight_decay=0.01,
        normalize_rows=False, clip_when_mixed=False, gradient_checkpointing=True, save_every=20,
    ),
}  # fmt: skip


# What may change when a run goes on with --resume: how long, how often, where, with how much memory, or not at all. What is
# learned, and from what, may not: the run's config.json has to stay true for all of its steps.
MAY_CHANGE = frozenset(
    "steps eval_every save_every log_samples sampler device threads dtype rollout_batch train_batch_tokens logits_megabytes "
    "gradient_checkpointing compile dry_run".split()
)


class Parser(argparse.ArgumentParser):
    """A bad flag raises InputError: one sentence, where argparse prints the usage of every option there is."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (--help lists every setting)")


def add_arguments(parser: argparse.ArgumentParser, config: type) -> None:
    """One option for every field: `group_size` becomes --group-size, booleans also get a --no- form.

    Options that are not given stay out of the parsed namespace, so that presets can tell."""
    types_of = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        default, paper = field.default, field.metadata["paper"]
        text = (
            field.metadata["help"]
            + f" (default: {default!r}"
            + (f"; released run: {paper!r})" if paper is not None else ")")
        )
        options: dict[str, Any] = {"help": text.replace("%", "%%"), "default": argparse.SUPPRESS, "dest": field.name}
        if types_of[field.name] is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options.update(type=types_of[field.name], choices=field.metadata["choices"])
            if options["choices"] is None:
                options["metavar"] = types_of[field.name].__name__.upper()
        parser.add_argument("--" + field.name.replace("_", "-"), **options)


def parse_train_config(argv: list[str] | None = None) -> TrainConfig:
    """The resolved configuration. Raises InputError on a bad value."""
    parser = Parser("train.py", description="Train a language model with ExGRPO or GRPO.", allow_abbrev=False)
    add_arguments(parser, TrainConfig)
    given = vars(parser.parse_args(argv))
    return resolve_resumed(given) if given.get("resume") else resolve(given)


def resolve(given: dict[str, Any]) -> TrainConfig:
    """Flags, then preset, then dataclass. Raises InputError on a bad value."""
    model = given.get("model", "toy")
    preset = given.get("preset", "auto")
    usual = "toy" if model == "toy" else "24gb"
    if preset == "auto":
        preset = usual
    config = TrainConfig(**{**PRESETS[preset], **given, "preset": preset})
    if not config.data:
        config.data = "" if model == "toy" else "openai/gsm8k:main"
    if not config.run:
        name = config.model.rstrip("/").split("/")[-1] + ("" if preset == usual else f"-{preset}")
        config.run = f"runs/{name}-{config.algo}-seed{config.seed}"
    validate(config)
    return config


def resolve_resumed(given: dict[str, Any]) -> TrainConfig:
    """The settings of a run that goes on: those in its config.json, and of the flags only what `MAY_CHANGE` allows.

    Raises InputError for a flag that contradicts the run, or when `resume` is not a run's folder."""
    folder = given["resume"]
    recorded = read_config(Path(folder))
    unknown = recorded.keys() - {field.name for field in dataclasses.fields(TrainConfig)}
    if unknown:
        raise InputError(
            f"{folder}/config.json names settings that this version does not have: {', '.join(sorted(unknown))}"
        )
    require_types(recorded, folder)
    changes = {name: value for name, value in given.items() if name in MAY_CHANGE}
    for name, value in given.items():
        if name in MAY_CHANGE or name == "resume":
            continue
        flag = "--" + name.replace("_", "-")
        if name == "overwrite" and value:
            raise InputError("--overwrite replaces a run and --resume goes on with it; give one of them")
        if value != (folder if name == "run" else recorded.get(name)):
            raise InputError(
                f"{flag} {value} contradicts the run in {folder}, which has {recorded.get(name)}; a resumed run keeps its "
                f"settings, so leave {flag} out or start a new run"
            )
    config = TrainConfig(**{**recorded, **changes, "run": folder, "resume": folder})
    validate(config)
    return config


def require_types(recorded: dict[str, Any], folder: str) -> None:
    """Raises InputError where a setting in a run's config.json has another type than it was written with."""
    for name, default in to_dict(
        TrainConfig()
    ).items():  # 1 for 1.0 is what JSON makes of it elsewhere; true is no number
        value = recorded.get(name, default)
        if type(value) is not type(default) and not (type(value) is int and type(default) is float):
            raise InputError(f"{folder}/config.json is damaged: {name} is {value!r}; put right what was changed in it")


def validate(config: TrainConfig) -> None:
    """Raises InputError, naming the flag, for a value with which training could not work."""

    def need(condition: bool, name: str, what: str) -> None:
        if not condition:
            flag = "--" + name.replace("_", "-")
            raise InputError(f"{flag} must be {what}, got {getattr(config, name)}")

    for name, value in to_dict(config).items():
        need(not isinstance(value, float) or math.isfinite(value), name, "a finite number")
    need(config.group_size >= 2, "group_size", "at least 2: a group of one has no mean to differ from")
    need(0 <= config.replay_ratio <= 1, "replay_ratio", "between 0 and 1")
    need(config.draw_sigma > 0, "draw_sigma", "above 0")
    need(config.beta > 0, "beta", "above 0")
    need(config.temperature > 0, "temperature", "above 0")
    need(config.eval_temperature >= 0, "eval_temperature", "0 (greedy) or more")
    need(0 < config.clip_range < 1, "clip_range", "between 0 and 1")
    need(config.lr > 0, "lr", "above 0")
    need(config.warmup_lr > 0, "warmup_lr", "above 0")
    need(config.toy_skill_lr > 0, "toy_skill_lr", "above 0")
    need(config.grad_clip > 0, "grad_clip", "above 0")
    need(config.weight_decay >= 0, "weight_decay", "0 or more")
    need(0 <= config.seed < 2**63, "seed", "between 0 and 2**63 - 1")
    need(0 <= config.toy_reasoning <= 1, "toy_reasoning", "between 0 and 1")
    need(config.toy_widest_guess <= 99, "toy_widest_guess", "at most 99, the toy's largest number")
    most_terms = 99 // max(1, config.toy_largest)
    need(
        config.toy_most_terms <= most_terms,
        "toy_most_terms",
        f"at most {most_terms}: the toy has no token for sums above 99",
    )
    need(0 <= config.wrong_answers <= 1, "wrong_answers", "between 0 and 1")
    need(0 <= config.out_of_reach <= 1, "out_of_reach", "between 0 and 1")
    need(
        config.out_of_reach == 0 or not config.data and 2 * config.toy_most_terms <= most_terms,
        "out_of_reach",
        f"0 unless the questions are toy sums of at most {most_terms // 2} terms",
    )
    for name in (
        "questions_per_step", "updates_per_step", "max_prompt_length", "max_response_length", "train_batch_tokens",
        "rollout_batch", "logits_megabytes", "held_out", "eval_samples", "toy_questions", "toy_largest",
        "toy_hidden", "toy_layers", "warmup_batch",
    ):  # fmt: skip
        need(getattr(config, name) >= 1, name, "at least 1")
    for name in (
        "lora_rank",
        "steps",
        "eval_every",
        "save_every",
        "warmup_steps",
        "toy_widest_guess",
        "toy_demonstrations",
        "toy_skill_steps",
        "max_per_question",
        "threads",
    ):
        need(getattr(config, name) >= 0, name, "0 or more")
    need(config.toy_hidden % 8 == 0, "toy_hidden", "a multiple of 8: the toy has four heads of an even size")
    need(config.threads <= 1024, "threads", "at most 1024")
    need(config.updates_per_step <= config.questions_per_step, "updates_per_step", "at most --questions-per-step")


def to_dict(config: Any) -> dict[str, Any]:
    return dataclasses.asdict(config)
