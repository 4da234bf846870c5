"""A training session: the state that steps change, the run's folder around it, and what a run starts from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
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
from nano_exgrpo.evaluation.evaluate import evaluate
from nano_exgrpo.infra import distributed
from nano_exgrpo.infra.checkpoint import load_state, save_checkpoint, save_model, set_random_state
from nano_exgrpo.infra.curves import plot_curves
from nano_exgrpo.infra.files import append_lines
from nano_exgrpo.infra.loading import load_policy, resolve_device, resolve_model_name
from nano_exgrpo.infra.memory import warms_up
from nano_exgrpo.infra.metrics import eval_metrics, summary
from nano_exgrpo.infra.precision import (
    adapter_state,
    add_lora,
    load_adapter,
    make_optimizer,
    own_part,
    resolve_dtypes,
)
from nano_exgrpo.infra.run_folder import claim_run, open_run, reopen_run
from nano_exgrpo.infra.stop import StopRequest
from nano_exgrpo.policy import Policy, enable_gradient_checkpointing, encode_questions
from nano_exgrpo.questions import Question, QuestionSampler, load_questions, mislabel, questions_digest, split_held_out
from nano_exgrpo.replay import ReplayBuffer
from nano_exgrpo.reward import grade, reward_of
from nano_exgrpo.trajectory import RIGHT, Trajectory
from nano_exgrpo.warmup import encode_demonstrations, fitting_demonstrations, read_demonstrations, warm_up

EVAL_TEMPERATURE = 0.6  # of the held-out questions, as in the paper
WARM_START_VERSION = 1  # raise it when the toy's warm start changes: runs share it through a cache


@dataclass
class State:
    """All that a step changes, and what it needs. A checkpoint holds it beside weights and random numbers.

    questions: those that this process trains on. started: whether replay has begun. bad_steps: steps in a row whose
    update was skipped. digest: of the questions. reward: gives r for a trajectory."""

    policy: Policy
    optimizer: torch.optim.Optimizer
    sampler: QuestionSampler
    buffer: ReplayBuffer
    questions: list[Question]
    held_out: list[Question]
    digest: str
    reward: Callable[[Trajectory], float]
    step: int = 0
    started: bool = False
    bad_steps: int = 0
    tokens_seen: int = 0

    def state_dict(self) -> dict[str, Any]:
        """Plain containers and tensors."""
        return {
            "step": self.step,
            "started": self.started,
            "bad_steps": self.bad_steps,
            "tokens_seen": self.tokens_seen,
            "questions": self.digest,
            "sampler": self.sampler.state_dict(),
            "buffer": self.buffer.state_dict(),
            "optimizer": own_part(self.optimizer).state_dict(),
            "adapter": adapter_state(self.policy.model),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises whatever comes of a state that is not this run's."""
        own_part(self.optimizer).load_state_dict(state["optimizer"])
        for parameter, moments in own_part(self.optimizer).state.items():
            for moment in moments.values():
                if torch.is_tensor(moment) and moment.dim() and moment.shape != parameter.shape:
                    raise ValueError("the optimiser's state is of other weights")  # torch takes it without a word
        load_adapter(self.policy.model, state["adapter"])
        self.sampler.load_state_dict(state["sampler"])
        self.buffer.load_state_dict(state["buffer"], {question.id: question for question in self.questions})
        self.step, self.started = int(state["step"]), bool(state["started"])
        self.bad_steps, self.tokens_seen = int(state["bad_steps"]), int(state["tokens_seen"])
        set_random_state(state["random"])


class Run:
    """A run's folder from its first check to its last line. Of several processes one writes."""

    def __init__(self, config: TrainConfig, stop: StopRequest) -> None:
        self.config, self.stop, self.folder = config, stop, Path(config.run)
        self.resumed = bool(config.resume)
        self.before: dict[str, Any] = {}  # what was measured before a warm-up
        if not self.resumed and distributed.is_main():
            claim_run(self.folder, overwrite=config.overwrite)

    def begin(self, state: State, first: dict[str, Any]) -> None:
        """Make the folder this run's. What fails or is stopped before leaves it as it was."""
        self.refuse_if_stopped()
        if distributed.is_main() and self.resumed:
            reopen_run(self.folder, {**asdict(self.config), "resume": ""}, state.step)
        elif distributed.is_main():
            open_run(self.folder, asdict(self.config))
            self.log(0, {**self.before, **first}, [])

    def log(self, step: int, row: dict[str, Any], samples: list[dict[str, Any]]) -> None:
        if distributed.is_main():
            append_lines(self.folder / "metrics.jsonl", [{"step": step, **row}])
            append_lines(self.folder / "samples.jsonl", [{"step": step, **sample} for sample in samples])

    def steps(self, state: State) -> tqdm[int]:
        """The numbers of the steps to do, with a progress bar."""
        first, last = state.step + 1, self.config.steps
        quiet = not distributed.is_main()
        return tqdm(range(first, last + 1), desc=self.config.algo, initial=state.step, total=last, disable=quiet)

    def save_if_due(self, state: State) -> bool:
        """Write a checkpoint where it is time. Returns whether the run was asked to stop, and so is over."""
        config, last = self.config, state.step == self.config.steps
        stopping = not last and self.stop_asked()
        due = config.save_every and state.step % config.save_every == 0
        # A resumed run has an older checkpoint. Without one of its end, more --steps would undo what followed that.
        if stopping or due or (last and (config.save_every or self.resumed)):
            self.save(state)
        if stopping and distributed.is_main():
            start = (
                "python"
                if distributed.world_size() == 1
                else f"torchrun --nproc-per-node {distributed.world_size()} --"
            )
            print(f"\nstopped after step {state.step}; go on with: {start} train.py --resume {self.folder}")
        return stopping

    def save(self, state: State) -> None:
        save_checkpoint(self.folder, state.step, state.policy, state.state_dict())

    def stop_asked(self) -> bool:
        """Whether any of the processes was asked to."""
        return bool(distributed.total({"stop": self.stop.requested})["stop"])

    def refuse_if_stopped(self) -> None:
        if self.stop_asked():
            raise Interrupted(
                "stopped before the first step; the run's folder is as it was, so start again with the same command"
            )

    def finish(self, state: State) -> None:
        """Write the model and the curves, and say what came out."""
        if distributed.is_main():
            save_model(state.policy, self.folder / "model")
            plot_curves({self.config.algo: self.folder}, self.folder / "curves.png")
            print(summary(self.folder, self.config))


# ---------------------------------------------------------------------------------------- preparing


def prepare(config: TrainConfig, run: Run) -> State:
    """Questions, policy, optimiser and memory, as they are before the first step or at the run's checkpoint.

    Raises InputError: see what it calls."""
    check_early(config)
    device = resolve_device(config.device)
    weights, autocast = resolve_dtypes(config.dtype, config.optimizer, config.lora_rank, device)
    torch.manual_seed(config.seed)
    checkpoint, saved = load_state(run.folder, config.steps) if run.resumed else (None, {})
    train_questions, held_out = load_data(config)
    demonstrations = load_demonstrations(config, held_out) if warms_up(config) and not run.resumed else []
    settings: dict[str, Any] = dict(
        temperature=config.temperature,
        autocast=autocast,
        sampler=config.sampler,
        token_budget=config.train_batch_tokens,
    )
    if checkpoint is not None:
        policy = load_policy(str(checkpoint / "model"), device=device, dtype=weights, **settings)
    elif config.model != "toy":
        policy = load_policy(config.model, device=device, dtype=weights, **settings)
    else:
        policy = replace(warmed_up_toy(config, held_out, device, run.stop), **settings)
        for parameter in policy.model.parameters():
            parameter.data = parameter.data.to(weights)  # not model.to, which would also round the tables of RoPE
    if config.lora_rank:
        add_lora(policy.model, config.lora_rank)
    distributed.same_everywhere(policy.model.parameters())
    if config.gradient_checkpointing:
        enable_gradient_checkpointing(policy.model)
    train_questions = encode_fitting(policy, train_questions, config)
    held_out = encode_fitting(policy, held_out, config)
    check_counts(config, len(train_questions), len(held_out))
    warn_of_unreadable(train_questions)
    digest = questions_digest(train_questions + held_out)
    if saved and saved["questions"] != digest:  # ids may be line numbers, and the buffer goes by ids
        raise InputError(
            f"the questions of {config.data or 'the toy'}, or the prompts that the chat template makes of them, are not "
            f"those that run {run.folder} was trained on; put them back, or start a new run"
        )

    questions = distributed.shard(train_questions)
    seed = config.seed + distributed.rank()
    state = State(
        policy,
        make_optimizer(policy.model.parameters(), config.optimizer, lr=config.lr, weight_decay=config.weight_decay),
        QuestionSampler(questions, seed=seed),
        ReplayBuffer(config.group_size, seed=seed, max_per_question=config.max_per_question),
        questions,
        held_out,
        digest,
        reward_of,
    )
    if saved:
        try:
            state.load_state_dict(saved)
        except Exception as error:  # each kind of damage raises its own kind
            raise InputError(
                f"checkpoint {checkpoint} does not fit this run ({type(error).__name__}: {str(error)[:120]}); delete that "
                f"folder to resume from the one before"
            ) from None
    else:
        if demonstrations:
            run.before = {"eval/before_warmup": held_out_metrics(state, config)["eval/accuracy"]}
            follow_demonstrations(policy, demonstrations, config, run.stop)
        torch.manual_seed(seed)  # the same rollouts whether the warmed-up policy was made or read from its cache
    return state


def check_early(config: TrainConfig) -> None:
    """What would fail late, before anything costly is done. Raises InputError."""
    resolve_device(config.device)
    distributed.share_of(config.questions_per_step, "--questions-per-step")
    if config.model != "toy" and not config.resume:
        resolve_model_name(config.model)
    if warms_up(config) and not config.warmup_data and not is_arithmetic(config.data):
        raise InputError("--warmup-steps on a real model needs demonstrations: name them with --warmup-data")
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
    """The questions with their prompts as token ids, without those that are too long. Raises InputError if none is left."""
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
    phases = toy.warm_start(
        held_out,
        skill_steps=config.toy_skill_steps if config.warmup_steps else 0,
        steps=config.warmup_steps,
        lr=config.warmup_lr,
        reasoning=config.toy_reasoning,
        seed=config.seed,
    )
    if not phases:
        return toy.build_policy(seed=config.seed, device=device)
    cache = Path(config.run).parent / ".warmup" / warm_start_key(config, device)
    if (cache / "config.json").exists():
        print(f"warmed-up policy from {cache}")
        return load_policy(str(cache), device=device)
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
    """An `on_step` for `warm_up` with a progress bar. Raises Interrupted after the step in which `stop` was requested."""
    with tqdm(total=steps, desc="warm-up", disable=not distributed.is_main()) as bar:

        def on_step(step: int, loss: float) -> None:
            bar.update()
            bar.set_postfix(loss=f"{loss:.3f}")
            if stop.requested:
                raise Interrupted("stopped during the warm-up; nothing was saved, so start again with the same command")

        yield on_step


def held_out_metrics(state: State, config: TrainConfig) -> dict[str, Any]:
    """The policy's accuracy on held-out questions, with its interval."""
    groups = evaluate(
        state.policy.at(EVAL_TEMPERATURE),
        distributed.shard(state.held_out),
        samples=1,
        max_new_tokens=config.max_response_length,
        batch_size=config.rollout_batch,
        seed=config.seed,
        reward=state.reward,
    )
    return eval_metrics(distributed.gather([[float(t.right) for t in group] for group in groups]))
