"""What a run starts from: questions, policy, optimiser and memory, before the first step or at a checkpoint."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from nano_exgrpo import toy
from nano_exgrpo.arithmetic import (
    DEMONSTRATIONS,
    TRAINING_QUESTIONS,
    arithmetic_demonstrations,
    arithmetic_questions,
    is_arithmetic,
)
from nano_exgrpo.config import TrainConfig
from nano_exgrpo.errors import InputError, Interrupted
from nano_exgrpo.infra import distributed
from nano_exgrpo.infra.checkpoint import load_state, save_model
from nano_exgrpo.infra.loading import load_policy, resolve_device, resolve_model_name
from nano_exgrpo.infra.memory import warms_up
from nano_exgrpo.infra.precision import (
    add_lora,
    make_optimizer,
    resolve_dtypes,
)
from nano_exgrpo.infra.session import Run, State, held_out_metrics
from nano_exgrpo.infra.stop import StopRequest
from nano_exgrpo.infra.tracker import tracker_package
from nano_exgrpo.policy import Policy, enable_gradient_checkpointing, encode_questions
from nano_exgrpo.questions import Question, QuestionSampler, load_questions, mislabel, questions_digest, split_held_out
from nano_exgrpo.replay import ReplayBuffer
from nano_exgrpo.reward import grade, reward_of
from nano_exgrpo.trajectory import RIGHT
from nano_exgrpo.warmup import encode_demonstrations, fitting_demonstrations, read_demonstrations, warm_up

WARM_START_VERSION = 1  # raise it when the toy's warm start changes: runs share it through a cache


def prepare(config: TrainConfig, run: Run) -> State:
    """The state before the first step, or at the run's checkpoint. Raises InputError: see what it calls."""
    check_early(config)
    torch.manual_seed(config.seed)
    checkpoint, saved = load_state(run.folder, config.steps) if run.resumed else (Path(), {})
    train_questions, held_out = load_data(config)
    demonstrations = load_demonstrations(config, held_out) if warms_up(config) and not saved else []
    policy = starting_policy(config, checkpoint if run.resumed else None, held_out, run.stop)
    train_questions = encode_fitting(policy, train_questions, config)
    held_out = encode_fitting(policy, held_out, config)
    check_counts(config, len(train_questions), len(held_out))
    warn_of_unreadable(train_questions)

    questions, seed = distributed.shard(train_questions), config.seed + distributed.rank()
    state = State(
        policy,
        make_optimizer(policy.model.parameters(), config.optimizer, lr=config.lr, weight_decay=config.weight_decay),
        QuestionSampler(questions, seed=seed),
        ReplayBuffer(config.group_size, seed=seed, max_per_question=config.max_per_question),
        questions,
        held_out,
        questions_digest(train_questions + held_out),
        reward_of,
    )
    if saved:
        resume(state, saved, checkpoint, config)
        return state
    if demonstrations:
        run.before = {"eval/before_warmup": held_out_metrics(state, config)["eval/accuracy"]}
        follow_demonstrations(policy, demonstrations, config, run.stop)
    torch.manual_seed(seed)  # the same rollouts whether the warmed-up policy was made or read from its cache
    return state


def starting_policy(
    config: TrainConfig, checkpoint: Path | None, held_out: Sequence[Question], stop: StopRequest
) -> Policy:
    """The policy as it is trained: a checkpoint's, a model's, or the warmed-up toy's weights. Raises InputError."""
    device = resolve_device(config.device)
    weights, autocast = resolve_dtypes(config.dtype, config.optimizer, config.lora_rank, device)
    settings: dict[str, Any] = dict(
        temperature=config.temperature,
        autocast=autocast,
        sampler=config.sampler,
        token_budget=config.train_batch_tokens,
    )
    if checkpoint is None and config.model == "toy":
        policy = replace(warmed_up_toy(config, held_out, device, stop), **settings)
        for parameter in policy.model.parameters():
            parameter.data = parameter.data.to(weights)  # not model.to, which would also round the tables of RoPE
    else:
        source = config.model if checkpoint is None else str(checkpoint / "model")
        if distributed.is_main():
            print(f"loading {source}", flush=True)
        policy = load_policy(source, device=device, dtype=weights, **settings)
    if config.lora_rank:
        add_lora(policy.model, config.lora_rank)
    distributed.same_everywhere(policy.model.parameters())
    if config.gradient_checkpointing:
        enable_gradient_checkpointing(policy.model)
    return policy


def resume(state: State, saved: dict[str, Any], checkpoint: Path, config: TrainConfig) -> None:
    """Put a checkpoint's state in. Raises InputError where it is not this run's."""
    if saved["questions"] != state.digest:  # ids may be line numbers, and the buffer goes by ids
        raise InputError(
            f"the questions of {config.data or 'the toy'}, or the prompts that the chat template makes of them, are "
            f"not those that run {config.run} was trained on; put them back, or start a new run"
        )
    try:
        state.load_state_dict(saved)
    except Exception as error:  # each kind of damage raises its own kind
        raise InputError(
            f"checkpoint {checkpoint} does not fit this run ({type(error).__name__}: {str(error)[:120]}); delete that "
            f"folder to resume from the one before"
        ) from None


def check_early(config: TrainConfig) -> None:
    """What would fail late, before anything costly is done. Raises InputError."""
    resolve_device(config.device)
    distributed.share_of(config.questions_per_step, "--questions-per-step")
    if config.model != "toy" and not config.resume:
        resolve_model_name(config.model)
    if warms_up(config) and not config.warmup_data and not is_arithmetic(config.data):
        raise InputError("--warmup-steps on a real model needs demonstrations: name them with --warmup-data")
    tracker_package(config.tracker)
    if config.threads:
        torch.set_num_threads(config.threads)


def load_data(config: TrainConfig) -> tuple[list[Question], list[Question]]:
    """(training questions, held-out questions)."""
    if is_arithmetic(config.data):
        questions = arithmetic_questions(config.data, TRAINING_QUESTIONS + config.held_out, seed=config.seed)
    elif config.data:
        questions = load_questions(config.data, question_field=config.question_field, answer_field=config.answer_field)
    else:
        questions = toy.sum_questions(config.toy_questions + config.held_out, seed=config.seed)
    train_questions, held_out = split_held_out(questions, config.held_out, seed=config.seed)
    if config.out_of_reach:
        train_questions = toy.put_out_of_reach(train_questions, config.out_of_reach, seed=config.seed)
    return mislabel(train_questions, config.wrong_answers, seed=config.seed), held_out


def load_demonstrations(config: TrainConfig, held_out: Sequence[Question]) -> list[tuple[Question, str]]:
    """What a real model is shown first: the user's demonstrations, or generated ones of questions not held out."""
    if config.warmup_data:
        return read_demonstrations(config.warmup_data)
    return arithmetic_demonstrations(config.data, DEMONSTRATIONS, seed=config.seed, avoid=held_out)


def encode_fitting(policy: Policy, questions: Sequence[Question], config: TrainConfig) -> list[Question]:
    """The questions with their prompts as token ids, without those that are too long. Raises InputError if none is
    left."""
    room = min(config.max_prompt_length, policy.context - config.max_response_length)
    if room < 1:
        raise InputError(
            f"--max-response-length {config.max_response_length} leaves no room for a prompt in the model's context of "
            f"{policy.context} tokens; lower it"
        )
    encoded = encode_questions(policy, questions, config.system_prompt)
    for q in encoded if config.model == "toy" else ():
        if q.prompt not in policy.tokenizer.decode(q.prompt_ids):  # it drops what it has no token for
            raise InputError(
                f"the toy reads only sums such as 3 + 2 + 5, not {q.prompt[:60]!r}; name a --model for other data"
            )
    fitting = [q for q in encoded if len(q.prompt_ids) <= room]
    if not fitting:
        change = "raise --max-prompt-length" if room == config.max_prompt_length else "lower --max-response-length"
        raise InputError(f"every prompt is longer than {room} tokens; {change}")
    if len(fitting) < len(encoded):
        print(f"skipped {len(encoded) - len(fitting)} of {len(encoded)} questions: prompts longer than {room} tokens")
    return fitting


def warn_of_unreadable(questions: Sequence[Question]) -> None:
    """Say how many golds are never rewarded, because even the gold itself, boxed, is not right."""
    free = [q for q in questions if not q.letters]
    unreadable = [q for q in free if grade(f"\\boxed{{{q.answer}}}", q.answer)[1] != RIGHT]
    if unreadable:
        example = f"{unreadable[0].id}: {unreadable[0].answer[:60]!r}"
        print(
            f"{len(unreadable)} of {len(free)} golds cannot be read by the checker and are never rewarded ({example})"
        )


def check_counts(config: TrainConfig, training: int, held_out: int) -> None:
    """Raises InputError where a process, or one of its updates, would have no question."""
    processes = distributed.world_size()
    needed, available = config.updates_per_step * processes, min(config.questions_per_step, training)
    if available < needed:
        raise InputError(
            f"a step needs at least {needed} questions, one for each update (--updates-per-step "
            f"{config.updates_per_step}) of each process, and has {available}"
        )
    if held_out < processes:
        raise InputError(f"{held_out} held-out questions are too few for {processes} processes; raise --held-out")


def follow_demonstrations(
    policy: Policy, pairs: Sequence[tuple[Question, str]], config: TrainConfig, stop: StopRequest
) -> None:
    """Warm up a real model, as the run is going to train it. Raises InputError, Interrupted."""
    examples = encode_demonstrations(policy, pairs, config.system_prompt)
    most = min(config.max_prompt_length, policy.context - config.max_response_length)
    examples = fitting_demonstrations(examples, most, config.max_response_length)
    optimizer = make_optimizer(policy.model.parameters(), config.optimizer, lr=config.warmup_lr, weight_decay=0.0)
    with warmup_bar(config.warmup_steps, stop) as on_step:
        warm_up(policy, optimizer, examples, steps=config.warmup_steps, seed=config.seed, on_step=on_step)


def warmed_up_toy(config: TrainConfig, held_out: Sequence[Question], device: torch.device, stop: StopRequest) -> Policy:
    """The toy after its warm start; taken from the cache where that was done before."""
    if not config.warmup_steps:
        return toy.build_policy(seed=config.seed, device=device)
    cache = Path(config.run).parent / ".warmup" / warm_start_key(config, device)
    if (cache / "config.json").exists():
        print(f"warmed-up policy from {cache}")
        return load_policy(str(cache), device=device)
    phases = toy.warm_start(
        held_out,
        skill_steps=config.toy_skill_steps,
        steps=config.warmup_steps,
        lr=config.warmup_lr,
        reasoning=config.toy_reasoning,
        seed=config.seed,
    )
    policy = toy.build_policy(seed=config.seed, device=device)
    with warmup_bar(sum(phase.steps for phase in phases), stop) as on_step:
        for pairs, steps, lr in phases:
            # Not by the run's optimiser and micro-batches: the toy stands for a model that was trained elsewhere, and
            # one cache serves all runs.
            optimizer = torch.optim.AdamW(policy.model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
            examples = encode_demonstrations(policy, pairs, config.system_prompt)
            warm_up(
                policy,
                optimizer,
                examples,
                steps=steps,
                batch_size=toy.WARMUP_BATCH,
                seed=config.seed,
                on_step=on_step,
            )
    if distributed.is_main() and not cache.exists():
        save_model(policy, cache)
    return policy


def warm_start_key(config: TrainConfig, device: torch.device) -> str:
    """Names the cache of a warmed-up toy by all that shapes it."""
    import transformers

    names = "warmup_steps warmup_lr seed held_out system_prompt threads toy_questions toy_reasoning toy_skill_steps"
    settings = [getattr(config, name) for name in names.split()]
    parts = [WARM_START_VERSION, settings, device.type, torch.__version__, transformers.__version__]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


@contextmanager
def warmup_bar(steps: int, stop: StopRequest) -> Iterator[Callable[[int, float], None]]:
    """An `on_step` for `warm_up` with a progress bar. Raises Interrupted after the step in which `stop` was
    requested."""
    hidden = not distributed.is_main() or not sys.stderr.isatty()
    if hidden and distributed.is_main():
        print(f"warm-up: {steps} supervised steps", flush=True)
    with tqdm(total=steps, desc="warm-up", disable=hidden) as bar:

        def on_step(step: int, loss: float) -> None:
            bar.update()
            bar.set_postfix(loss=f"{loss:.3f}")
            if stop.requested:
                raise Interrupted("stopped during the warm-up; nothing was saved, so start again with the same command")

        yield on_step
