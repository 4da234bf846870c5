#!/usr/bin/env python
"""Train a language model to reason from experience: ExGRPO, one readable loop.

    python train.py                                   a toy, from nothing to skilled in two minutes on a laptop
    python train.py --algo grpo                       the baseline: the same loop without replay
    python train.py --model Qwen2.5-Math-1.5B         a real model on GSM8K (one GPU; --dry-run: will it fit?)
    torchrun --nproc-per-node 8 -- train.py ...       the same on eight GPUs

Read `train_step`: it is the method (arXiv 2510.02245) in eight steps. Three things are left out on purpose. There is no
reference model with its KL term, because the method has none. There is no inference engine beside the trainer: rollouts
come from the very weights that are trained, so π_old is exact. There is no learning-rate schedule: the paper's rate is
constant.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while importing ends without a traceback

import math
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from nano_exgrpo.config import TrainConfig, parse_train_config
from nano_exgrpo.errors import InputError, Interrupted
from nano_exgrpo.infra import distributed
from nano_exgrpo.infra.memory import dry_run
from nano_exgrpo.infra.metrics import Stopwatch, sample_rows, step_metrics
from nano_exgrpo.infra.prepare import prepare
from nano_exgrpo.infra.run_folder import explain_failure, sole_writer
from nano_exgrpo.infra.session import Run, State, held_out_metrics
from nano_exgrpo.infra.stop import StopRequest
from nano_exgrpo.loss import group_advantages, keep_difficulty
from nano_exgrpo.replay import choose_trajectories
from nano_exgrpo.rollout import rollout
from nano_exgrpo.update import update_policy

MOST_BAD_STEPS = 5  # steps in a row whose update was skipped before giving up


def train_step(state: State, config: TrainConfig) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One step of the method on `state`; returns its metrics, and samples to look at."""
    policy, buffer, clock = state.policy, state.buffer, Stopwatch()
    B, K = distributed.share_of(config.questions_per_step, "--questions-per-step"), config.group_size

    # 1. Mixing. Once replay has started, up to ρB of the questions are asked again.
    wanted = math.floor(config.replay_ratio * B + 1e-9) if state.started else 0

    # 2. Questions. Those asked again are of medium difficulty. The rest are fresh, from the data.
    again = buffer.draw_questions(wanted, method=config.question_draw, sigma=config.draw_sigma)
    fresh = state.sampler.draw(B - len(again), skip={*buffer.retired, *(q.id for q in again)})

    # 3. Trajectories. Of each such question's stored successes, the one that the policy is surest of.
    chosen, scored_tokens = choose_trajectories(policy, buffer, again, method=config.trajectory_choice)
    clock.lap("choose")

    # 4. Rollouts. K responses to a fresh question, K − 1 beside a stored success.
    samples = [K - 1] * len(chosen) + [K] * (len(again) + len(fresh) - len(chosen))
    groups = rollout(
        policy, again + fresh, samples, max_new_tokens=config.max_response_length, batch_size=config.rollout_batch
    )
    clock.lap("generate")

    # 5. Rewards and advantages. The stored success counts in its group's mean.
    rollouts = [trajectory for group in groups for trajectory in group]
    for trajectory in rollouts:
        trajectory.reward = state.reward(trajectory)
    for group, trajectory in zip(groups, chosen):
        group.insert(0, trajectory)
    rewards = torch.tensor([[t.reward for t in group] for group in groups])  # [B, K]
    advantages = group_advantages(rewards, normalize_std=config.normalize_std)  # [B, K]
    advantages = keep_difficulty(advantages, rewards, config.difficulty)
    clock.lap("reward")
    looked_at = sample_rows(policy, groups, config.log_samples) if distributed.is_main() else []
    clock.lap("samples")

    # 6. Loss and update. Fresh trajectories leave with their log-probabilities, as memory needs them.
    clip_range = config.clip_range if config.clip_when_mixed or not state.started else None
    update = update_policy(policy, state.optimizer, groups, advantages, config, clip_range=clip_range)
    clock.lap("update")

    # 7. Delayed start. Nothing is stored or asked again before the policy is right often enough.
    success_rate = distributed.mean([t.right for t in rollouts])
    state.started = state.started or (config.algo == "exgrpo" and success_rate > config.start_threshold)

    # 8. Memory. Successes are stored. What all K solve is retired, as long as a batch can still be filled.
    for group in groups if state.started else ():
        buffer.update(group, may_retire=config.retire and len(state.questions) - len(buffer.retired) > B)

    # Only bookkeeping from here on.
    state.step += 1
    state.bad_steps = state.bad_steps + 1 if update["skipped_updates"] else 0
    row = step_metrics(groups, buffer, replayed_questions=len(again), scored_tokens=scored_tokens)
    speed = round(row["num_tokens"] / clock.total("choose", "generate", "reward", "update"))
    state.tokens_seen += row["num_tokens"]
    row = {**row, **update, "replay/started": state.started, "num_tokens": state.tokens_seen}
    return {**row, "epoch": state.sampler.epoch, **clock.metrics(), "tokens_per_second": speed}, looked_at


def train(config: TrainConfig, stop: StopRequest | None = None) -> Path:
    """Run the whole training that `config` describes; returns the run's folder.

    stop: asks for an early end, with a checkpoint, after the current step.
    Raises InputError, and Interrupted where there is nothing yet to save."""
    run = Run(config, stop or StopRequest())
    state = prepare(config, run)
    run.begin(state)
    for step in run.steps(state):
        row, samples = train_step(state, config)
        if step == config.steps or (config.eval_every and step % config.eval_every == 0):
            row.update(held_out_metrics(state, config))
        run.log(step, row, samples)
        run.show(step, row)
        if state.bad_steps >= MOST_BAD_STEPS:
            run.save(state)
            raise InputError(
                f"the update was not finite in {state.bad_steps} steps in a row; lower --lr or use float32"
            )
        if run.save_if_due(state):
            return run.folder
    run.finish(state)
    return run.folder


def main(argv: list[str] | None = None) -> int:
    """The command line; returns its exit code."""
    run = Path()
    try:
        config, card = parse_train_config(argv)
        if card is not None:
            if distributed.speaks():
                print(dry_run(config, card))
            return 0
        run = Path(config.run)
        distributed.start(config.device)
        with StopRequest() as stop, sole_writer(run) if distributed.is_main() else nullcontext():
            train(config, stop)
        distributed.finish()
        return 0
    except Interrupted as error:
        if distributed.speaks():
            print(f"\ntrain.py: {error}", file=sys.stderr)
        return 130  # what a shell reports for Ctrl-C; a run that is saved ends with 0
    except (InputError, RuntimeError, MemoryError, OSError) as error:
        sentence = explain_failure(error, run)
        if distributed.speaks() or not isinstance(error, InputError):  # what all processes find, one says
            print(f"\ntrain.py: {sentence}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
