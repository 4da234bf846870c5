"""A training session: the state that steps change, and the run around it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from nano_exgrpo.config import TrainConfig
from nano_exgrpo.errors import Interrupted
from nano_exgrpo.evaluation.evaluate import evaluate
from nano_exgrpo.infra import distributed
from nano_exgrpo.infra.checkpoint import save_checkpoint, save_model, set_random_state
from nano_exgrpo.infra.curves import plot_curves
from nano_exgrpo.infra.files import append_lines
from nano_exgrpo.infra.metrics import eval_metrics, summary
from nano_exgrpo.infra.precision import (
    adapter_state,
    load_adapter,
    own_part,
)
from nano_exgrpo.infra.run_folder import claim_run, open_run, reopen_run
from nano_exgrpo.infra.stop import StopRequest
from nano_exgrpo.infra.tracker import Track, open_tracker
from nano_exgrpo.policy import Policy
from nano_exgrpo.questions import Question, QuestionSampler
from nano_exgrpo.replay import ReplayBuffer
from nano_exgrpo.trajectory import Trajectory

EVAL_TEMPERATURE = 0.6  # of the held-out questions, as in the paper


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
        self.track: Track = lambda step, row: None
        self.bar: Any = None
        self.before: dict[str, Any] = {}  # what was measured before a warm-up
        if not self.resumed and distributed.is_main():
            claim_run(self.folder, overwrite=config.overwrite)

    def begin(self, state: State) -> None:
        """Evaluate a new run for the first time and make the folder its own. What fails or is stopped before leaves the
        folder as it was."""
        self.refuse_if_stopped()
        first = {} if self.resumed else held_out_metrics(state, self.config)
        self.refuse_if_stopped()
        if distributed.is_main():
            self.track = open_tracker(self.config)
        if distributed.is_main() and self.resumed:
            reopen_run(self.folder, {**asdict(self.config), "resume": ""}, state.step)
        elif distributed.is_main():
            open_run(self.folder, asdict(self.config))
            self.log(0, {**self.before, **first}, [])

    def log(self, step: int, row: dict[str, Any], samples: list[dict[str, Any]]) -> None:
        if distributed.is_main():
            append_lines(self.folder / "metrics.jsonl", [{"step": step, **row}])
            self.track(step, row)
            append_lines(self.folder / "samples.jsonl", [{"step": step, **sample} for sample in samples])

    def steps(self, state: State) -> Iterable[int]:
        """The numbers of the steps to do, with a progress bar on a terminal."""
        first, last = state.step + 1, self.config.steps
        hidden = not distributed.is_main() or not sys.stderr.isatty()
        self.bar = tqdm(range(first, last + 1), desc=self.config.algo, initial=state.step, total=last, disable=hidden)
        return self.bar

    def show(self, step: int, row: dict[str, Any]) -> None:
        """How it goes: beside the bar, or where there is none a line every ten steps."""
        names = {"reward": "reward", "entropy": "entropy", "buffer": "buffer/questions", "retired": "buffer/retired"}
        shown = {name: row[key] for name, key in {**names, "tok_s": "tokens_per_second"}.items()}
        shown = {name: f"{value:.2f}" if isinstance(value, float) else str(value) for name, value in shown.items()}
        self.bar.set_postfix(shown)
        if self.bar.disable and distributed.is_main() and (step % 10 == 0 or step == self.config.steps):
            print(f"step {step} of {self.config.steps}: " + ", ".join(f"{k} {v}" for k, v in shown.items()), flush=True)

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


def held_out_metrics(state: State, config: TrainConfig) -> dict[str, Any]:
    """The policy's accuracy on held-out questions, with its interval."""
    if state.step == 0 and distributed.is_main():
        print(f"evaluating on {len(state.held_out)} held-out questions", flush=True)
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
