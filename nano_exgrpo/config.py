"""Every setting: its meaning, its unit, its bounds and the paper's value. The command line is made from it.

A value is resolved in the order: flag on the command line, then preset, then the default written here.
`runs/<name>/config.json` records what came out.
"""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from nano_exgrpo.errors import InputError
from nano_exgrpo.infra.files import read_json

SYSTEM_PROMPT = "Please reason step by step, and put your final answer within \\boxed{}."
MANY = 10**9  # more than any count needs, less than any number that a library chokes on


def setting(
    default: Any,
    help: str,
    *,
    paper: Any = None,
    low: float = 0,
    high: float = MANY,
    choices: str = "",
    group: str = "",
) -> Any:
    """A dataclass field that explains itself. paper: the released run's value. low, high: bounds of a number, both
    allowed. choices: words that are allowed, separated by spaces. group: the heading of those that begin here."""
    about = {"help": help, "paper": paper, "low": low, "high": high, "choices": choices.split(), "group": group}
    return dataclasses.field(default=default, metadata=about)


@dataclass
class TrainConfig:
    """train.py's settings; `python train.py --help` prints them. Whatever it is made from, it raises InputError, naming
    the flag, for a value with which training could not work."""

    model: str = setting(
        "toy",
        "toy, a model folder, a hub id, or a short name such as Qwen2.5-Math-1.5B",
        group="what to train, on what",
    )
    data: str = setting(
        "",
        "questions: a .jsonl file, a hub id[:configuration[:split]], or generated ones: arithmetic, arithmetic:easy, "
        "arithmetic:hard; empty: toy sums for the toy, GSM8K for a real model",
        paper="Elliott/Openr1-Math-46k-8192",
    )
    question_field: str = setting("question", "name of the question's field in the data")
    answer_field: str = setting("answer", "name of the answer's field in the data")
    held_out: int = setting(200, "questions set aside for evaluation, never trained on", low=1)
    system_prompt: str = setting(SYSTEM_PROMPT, "system message of every prompt; empty leaves it out")
    preset: str = setting(
        "auto",
        "settings to start from. toy; hard: a toy where replay pays; 24gb, 12gb: one small GPU; laptop: a model of "
        "135M weights learns arithmetic on two CPU cores; paper: the released run, "
        "without its system prompt; auto: toy for the toy, else 24gb",
        choices="auto toy hard laptop 24gb 12gb paper none",
    )

    algo: str = setting(
        "exgrpo",
        "exgrpo, or grpo: the same loop without replay and retirement",
        choices="exgrpo grpo",
        group="the method",
    )
    steps: int = setting(100, "training steps", paper=700)
    questions_per_step: int = setting(32, "B, questions a step", paper=128, low=1)
    group_size: int = setting(8, "K, trajectories a question; one alone has no mean to differ from", paper=8, low=2)
    replay_ratio: float = setting(
        0.5, "rho, the largest share of a step's questions that is replayed", paper=0.5, high=1
    )
    start_threshold: float = setting(
        0.35,
        "delayed start: store and replay once a step's fresh success rate exceeds this; -1 starts at once",
        paper=0.35,
        low=-1,
        high=1,
    )
    question_draw: str = setting("gaussian", "which questions to replay", paper="gaussian", choices="gaussian uniform")
    draw_sigma: float = setting(
        1.0, "sigma of the question draw, in counts of successes; K makes it 1 in rates", paper=1.0, low=1e-3, high=1e6
    )
    trajectory_choice: str = setting(
        "lowest",
        "which stored success to replay, by entropy under the current policy; none: ask the question again without one",
        paper="lowest",
        choices="lowest random highest none",
    )
    max_per_question: int = setting(0, "most stored successes of one question, the newest; 0 keeps all", paper=0)
    retire: bool = setting(True, "never ask again what all K trajectories solved", paper=True)
    shaping: bool = setting(True, "shape the replayed weight, f(w) = w/(w+beta)", paper=True)
    beta: float = setting(0.1, "beta of the shaping", paper=0.1, low=1e-6, high=1e6)
    importance_correction: bool = setting(True, "weigh replayed tokens by pi_theta/pi_past", paper=True)
    clip_range: float = setting(0.2, "epsilon of the PPO clip", paper=0.2, low=1e-6, high=1)
    clip_when_mixed: bool = setting(
        True, "clip fresh rows also once replay has started (the released code does not)", paper=False
    )
    normalize_rows: bool = setting(
        True, "divide the loss by the number of rows as well as by L (the released code: by L alone)", paper=False
    )
    normalize_std: bool = setting(False, "divide advantages by the group's standard deviation", paper=False)
    entropy_coef: float = setting(
        0.0, "entropy bonus, times the mean entropy of the trained tokens", paper=0.001, high=10
    )
    difficulty: str = setting(
        "all",
        "learn only from groups of which at most a quarter succeeds (hard), at least three quarters do (easy), or "
        "between (medium): for studies",
        choices="all hard medium easy",
    )
    temperature: float = setting(
        1.0,
        "sampling temperature of rollouts; the trained distribution is the sampled one",
        paper=1.0,
        low=0.01,
        high=100,
    )
    max_prompt_length: int = setting(1024, "tokens; longer prompts are skipped and counted", paper=1024, low=1)
    max_response_length: int = setting(1024, "L, tokens; also the loss's constant length", paper=8192, low=1)
    wrong_answers: float = setting(
        0.0, "share of the training questions that get another question's answer: label noise, for studies", high=1
    )
    out_of_reach: float = setting(
        0.0, "share of the toy's training questions that are far too long for it, for studies", high=1
    )

    updates_per_step: int = setting(
        1, "optimiser steps a batch, each on its share of the groups", paper=2, low=1, group="optimisation"
    )
    lr: float = setting(1e-6, "learning rate, constant", paper=1e-6, low=1e-12, high=1)
    weight_decay: float = setting(0.0, "AdamW's weight decay", paper=0.01, high=1)

    device: str = setting("auto", "auto (CUDA, then MPS, then CPU), or a torch device", group="memory and speed")
    dtype: str = setting(
        "auto",
        "float32; bfloat16: products in bf16 on fp32 weights, but bf16 weights with adamw16 or LoRA; auto: bfloat16 on "
        "CUDA",
        choices="auto float32 bfloat16",
    )
    optimizer: str = setting(
        "adamw", "adamw; adamw16: bf16 weights and moments, rounded stochastically", choices="adamw adamw16"
    )
    lora_rank: int = setting(
        0,
        "train adapters of this rank on frozen weights, with about ten times the lr; 0: all weights",
        high=4096,
    )
    sampler: str = setting(
        "generate",
        "rollouts by HF generate, or by our own loop over tokens: the same distribution, faster",
        choices="generate loop",
    )
    train_batch_tokens: int = setting(8192, "tokens, padding included, in one forward and backward", low=1)
    rollout_batch: int = setting(64, "sequences in one generate call", low=1)
    gradient_checkpointing: bool = setting(False, "recompute activations in backward: less memory, a third more time")
    threads: int = setting(0, "CPU threads; 0 leaves torch's choice", high=1024)

    warmup_steps: int = setting(0, "supervised steps before RL; 0 for none", group="supervised warm-up")
    warmup_data: str = setting(
        "", "demonstrations for the --warmup-steps of a real model: .jsonl of question and response"
    )
    warmup_lr: float = setting(
        7e-6, "peak learning rate of the warm-up; with LoRA about ten times as much", low=1e-12, high=1
    )

    toy_questions: int = setting(1000, "training questions", low=1, group="the toy")
    toy_reasoning: float = setting(0.2, "share of the demonstrations that reason; the rest guess", high=1)
    toy_skill_steps: int = setting(0, "warm-up steps on reasoning alone, before the demonstrations that mostly guess")

    seed: int = setting(0, "seed of everything random", high=2**63 - 1, group="the run")
    run: str = setting(
        "",
        "run folder; empty: runs/<model>-<algo>-seed<seed>, with the preset's name if it is not the model's usual one",
    )
    overwrite: bool = setting(False, "replace the run that is already in the run folder")
    eval_every: int = setting(20, "steps between evaluations on held-out questions; 0: only before and after")
    save_every: int = setting(
        0,
        "steps between checkpoints, the last step included; 0: only when interrupted, and at the end of a resumed run",
    )
    log_samples: int = setting(
        8,
        "trajectories of each step written to samples.jsonl, with the entropy of each token; -1 for all",
        low=-1,
    )
    tracker: str = setting(
        "none", "where else the metrics go, for watching a run live", choices="none tensorboard wandb trackio"
    )
    resume: str = setting("", "run folder to go on with, at its last checkpoint")

    def __post_init__(self) -> None:
        check_fields(self)
        toy = self.model == "toy" and not self.data
        require(
            self, "updates_per_step", self.updates_per_step <= self.questions_per_step, "at most --questions-per-step"
        )
        require(self, "out_of_reach", self.out_of_reach == 0 or toy, "0 unless the questions are the toy's sums")


# What both presets for the toy start from.
TOY: dict[str, Any] = dict(
    steps=120, max_response_length=10, system_prompt="", rollout_batch=512, train_batch_tokens=8192, threads=1,
    eval_every=20, toy_questions=1500, held_out=300, warmup_steps=120, warmup_lr=8e-4,
)  # fmt: skip
# What a preset changes. A flag on the command line still wins.
PRESETS: dict[str, dict[str, Any]] = {
    "none": {},
    # A laptop's two cores: from nothing to a learned skill in two minutes.
    "toy": dict(TOY, questions_per_step=32, lr=3e-4, max_prompt_length=16, toy_skill_steps=800),
    # A toy where replay pays (RESULTS.md): 98 of 100 questions are out of the policy's reach, and a failed group
    # teaches nothing.
    "hard": dict(
        TOY, questions_per_step=16, lr=5e-5, max_prompt_length=24, toy_skill_steps=500, start_threshold=-1.0,
        out_of_reach=0.98,
    ),
    # SmolLM2-135M-Instruct on two CPU cores. It boxes nothing at first: the warm-up shows it how, rewards do the rest.
    "laptop": dict(
        data="arithmetic:easy", steps=30, questions_per_step=8, max_prompt_length=64, max_response_length=32, lr=5e-6,
        system_prompt="Box the answer.", start_threshold=-1.0, sampler="loop", train_batch_tokens=2048,
        warmup_steps=8, warmup_lr=4e-5, held_out=100, eval_every=6, log_samples=4,
    ),
    # Qwen2.5-Math-1.5B, all weights, on one 24 GB card: estimated peak 17 GB, in the update (--dry-run). fp32 weights
    # with their gradients and moments would take 25 GB by themselves, hence bf16 with stochastic rounding.
    "24gb": dict(
        steps=200, questions_per_step=32, max_prompt_length=512, max_response_length=1024, rollout_batch=128,
        train_batch_tokens=8192, gradient_checkpointing=True, save_every=20, max_per_question=8, optimizer="adamw16",
    ),
    # The same with LoRA on one 12 GB card: estimated peak 8 GB. Adapters take ten times the learning rates of all
    # weights: those are the paper's for RL, and for the warm-up what Qwen2.5 itself was fine-tuned with (7e-6, cooled
    # to a tenth of it; arXiv 2412.15115).
    "12gb": dict(
        steps=200, questions_per_step=32, max_prompt_length=512, max_response_length=1024, rollout_batch=64,
        train_batch_tokens=4096, gradient_checkpointing=True, save_every=20, max_per_question=8, lora_rank=32,
        lr=1e-5, warmup_lr=7e-5,
    ),
    # The released run (8 GPUs), as its code computes: for reference, and for those who have them. Its system message,
    # which asks for a <think> section before the solution, is not here; give it with --system-prompt.
    "paper": dict(
        data="Elliott/Openr1-Math-46k-8192", steps=700, questions_per_step=128, updates_per_step=2,
        max_prompt_length=1024, max_response_length=8192, entropy_coef=0.001, weight_decay=0.01,
        normalize_rows=False, clip_when_mixed=False, gradient_checkpointing=True, save_every=20,
    ),
}  # fmt: skip


# What may change when a run goes on with --resume: how long, how often, where, with how much memory, or not at all.
# What
# is learned, and from what, may not: the run's config.json has to stay true for all of its steps.
MAY_CHANGE = frozenset(
    "steps eval_every save_every log_samples sampler device threads dtype rollout_batch train_batch_tokens "
    "gradient_checkpointing tracker".split()
)


# --------------------------------------------------------------------------------------- checking


def check_fields(config: Any) -> None:
    """Types, choices and bounds of every field. Raises InputError, naming the flag."""
    for field in dataclasses.fields(config):
        value, kind, about = getattr(config, field.name), type(field.default), field.metadata
        if kind is float and type(value) is int and abs(value) <= MANY:  # 1 for 1.0 is what JSON and people write
            setattr(config, field.name, value := float(value))
        require(config, field.name, type(value) is kind, f"of type {kind.__name__}")
        if kind is str:  # no half of a surrogate pair, which Python makes of a byte that is no UTF-8, and no zero
            clean = value.encode(errors="ignore").decode().replace("\0", "")
            require(config, field.name, value == clean, "Unicode text")
        if about["choices"]:
            require(config, field.name, value in about["choices"], f"one of {', '.join(about['choices'])}")
        elif kind in (int, float):
            low, high = about["low"], about["high"]
            bounds = f"at least {low:g}" if high == MANY and value < low else f"between {low:g} and {high:g}"
            require(config, field.name, low <= value <= high, bounds)  # NaN is neither


def require(config: Any, name: str, condition: bool, what: str) -> None:
    if not condition:
        raise InputError(f"--{name.replace('_', '-')} must be {what}, got {str(getattr(config, name))[:60]}")


# ------------------------------------------------------------------------------------ command line


class CommandLine(argparse.ArgumentParser):
    """A bad flag raises InputError: one sentence, where argparse prints the usage of every option there is."""

    def __init__(self, program: str, description: str) -> None:
        super().__init__(
            program,
            description=description,
            allow_abbrev=False,
            usage="%(prog)s [--setting VALUE ...]",
            formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=30, width=100),
        )

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (--help lists every setting)")

    def add_settings(self, config: type, in_force: dict[str, dict[str, Any]]) -> None:
        """One option for every field: `group_size` becomes --group-size, booleans also get a --no- form. Options that
        are not given stay out of the parsed namespace, so that presets can tell.

        in_force: {title: settings} of the presets whose values --help shows beside the defaults."""
        group: Any = self
        for field in dataclasses.fields(config):
            about, kind = field.metadata, type(field.default)
            if about["group"]:
                group = self.add_argument_group(about["group"])
            values = {title: preset.get(field.name, field.default) for title, preset in in_force.items()}
            if len({str(value) for value in values.values()}) <= 1:
                values = {"default": next(iter(values.values()), field.default)}
            if about["paper"] is not None:
                values["released run"] = about["paper"]
            shown = ", ".join(f"{title}: {'-' if value == '' else value}" for title, value in values.items())
            options: dict[str, Any] = dict(
                help=f"{about['help']} ({shown})".replace("%", "%%"), default=argparse.SUPPRESS
            )
            if kind is bool:
                options["action"] = argparse.BooleanOptionalAction
            else:
                options.update(type=kind, metavar=kind.__name__.upper())
            group.add_argument("--" + field.name.replace("_", "-"), dest=field.name, **options)


def parse_train_config(argv: list[str] | None = None) -> tuple[TrainConfig, float | None]:
    """(the resolved configuration, None or the memory in GB that --dry-run is to compare it with; 0: this machine's).

    Raises InputError on a bad value."""
    parser = CommandLine("train.py", "Train a language model with ExGRPO or GRPO.")
    parser.add_argument("--dry-run", action="store_true", help="only say how much memory these settings take")
    parser.add_argument("--card", type=float, metavar="GB", help="a --dry-run for a card of so much memory")
    parser.add_settings(TrainConfig, {"toy": PRESETS["toy"], "real model": PRESETS["24gb"]})
    given = vars(parser.parse_args(argv))
    dry_run, card = given.pop("dry_run"), given.pop("card")
    if card is not None and not 0 < card < MANY:
        raise InputError(f"--card must be the memory of a card in GB, got {card:g}")
    config = resolve_resumed(given) if "resume" in given else resolve(given)
    return config, card if card is not None else 0.0 if dry_run else None


def resolve(given: dict[str, Any]) -> TrainConfig:
    """Flags, then preset, then dataclass. Raises InputError on a bad value."""
    asked = TrainConfig(**given)
    toy = asked.model == "toy"
    usual = "toy" if toy else "24gb"
    preset = usual if asked.preset == "auto" else asked.preset
    settings = {**PRESETS[preset], **given, "preset": preset}
    if not toy and not settings.get("data"):
        settings["data"] = "openai/gsm8k:main"
    if not settings.get("run"):
        name = asked.model.rstrip("/").split("/")[-1] + ("" if preset == usual else f"-{preset}")
        settings["run"] = f"runs/{name}-{asked.algo}-seed{asked.seed}"
    return TrainConfig(**settings)


def resolve_resumed(given: dict[str, Any]) -> TrainConfig:
    """The settings of a run that goes on: those in its config.json, and of the flags only what `MAY_CHANGE` allows.

    Raises InputError for a flag that contradicts the run, or when `resume` is not a run's folder."""
    folder = given.pop("resume")
    if not folder:
        raise InputError("--resume needs the folder of the run that is to go on")
    recorded = asdict(recorded_config(Path(folder)))
    if given.pop("overwrite", False):
        raise InputError("--overwrite replaces a run and --resume goes on with it; give one of them")
    if Path(given.pop("run", folder)).resolve() != Path(folder).resolve():
        raise InputError(f"--resume goes on in {folder}; leave --run out")
    for name, value in given.items():
        if name not in MAY_CHANGE and value != recorded[name]:
            flag = "--" + name.replace("_", "-")
            raise InputError(
                f"{flag} {value} contradicts the run in {folder}, which has {recorded[name]}; a resumed run keeps its "
                f"settings, so leave {flag} out or start a new run"
            )
    return TrainConfig(**{**recorded, **given, "run": folder, "resume": folder})


def recorded_config(folder: Path) -> TrainConfig:
    """The settings of a run, from its config.json. Raises InputError where it is none of this version's."""
    found = read_json(folder / "config.json", f"{folder} is not a run folder")
    unknown = found.keys() - {field.name for field in dataclasses.fields(TrainConfig)}
    if unknown:
        raise InputError(f"{folder}/config.json has settings that this version has not: {', '.join(sorted(unknown))}")
    try:
        return TrainConfig(**found)
    except InputError as error:
        raise InputError(f"{folder}/config.json is damaged: {error}; put right what was changed in it") from None
