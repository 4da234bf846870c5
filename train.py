#!/usr/bin/env python
"""Train a language model to reason from experience: ExGRPO, one readable loop.

    python train.py                                   a toy, from nothing to skilled in two minutes on a laptop
    python train.py --algo grpo                       the baseline: the same loop without replay
    python train.py --model Qwen2.5-Math-1.5B         a real model on GSM8K (one GPU; --dry-run: will it fit?)
    torchrun --nproc-per-node 8 -- train.py ...       the same on eight GPUs (nano_exgrpo/infra/distributed.py)

The loop below is the method, step by step (arXiv 2510.02245; comments name its eight steps). What was left
out on purpose: a reference model and its KL term (the method has none), an inference engine beside the
trainer (rollouts come from the very weights that are trained, so π_old is exact), and a scheduler (the
paper's learning rate is constant).
"""

from __future__ import annotations

import math
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from nano_exgrpo.config import TrainConfig, parse_train_config, to_dict
from nano_exgrpo.errors import InputError, Interrupted
from nano_exgrpo.evaluation.evaluate import evaluate, is_out_of_memory
from nano_exgrpo.infra import distributed
from nano_exgrpo.infra.checkpoint import list_checkpoints, load_state, save_checkpoint, save_model, set_random_state
from nano_exgrpo.infra.lora import adapter_state, add_lora, load_adapter, require_peft
from nano_exgrpo.infra.memory import fit_table, load_shape
from nano_exgrpo.infra.metrics import Stopwatch, eval_metrics, sample_rows, step_metrics, summary
from nano_exgrpo.infra.precision import adamw8bit_class, make_optimizer, own_part, resolve_dtypes
from nano_exgrpo.infra.run_folder import append_lines, claim_run, open_run, plot_curves, reopen_run, sole_writer
from nano_exgrpo.infra.session import check_counts, encode_prompts, load_data, start_policy, toy_shape
from nano_exgrpo.infra.stop import StopRequest
from nano_exgrpo.loss import group_advantages, keep_difficulty
from nano_exgrpo.policy import (
    compile_layers,
    enable_gradient_checkpointing,
    load_policy,
    resolve_device,
    resolve_model_name,
)
from nano_exgrpo.questions import QuestionSampler, questions_digest
from nano_exgrpo.replay import ReplayBuffer, choose_trajectories
from nano_exgrpo.reward import grade
from nano_exgrpo.rollout import rollout
from nano_exgrpo.update import update_policy
from nano_exgrpo.warmup import follow_demonstrations, load_demonstrations

MOST_BAD_STEPS = 5  # steps in a row with NaN or infinite gradients before giving up


def train(config: TrainConfig, stop: StopRequest | None = None) -> Path:
    """Run the whole training that `config` describes; returns the run's folder.

    stop: asks for an early end, with a checkpoint, after the current step.
    Raises InputError, and Interrupted where there is nothing yet to save."""
    run = Path(config.run)
    stop = stop or StopRequest()
    device = resolve_device(config.device)
    weights, autocast = resolve_dtypes(config.dtype, config.optimizer, config.lora_rank, device)
    if config.optimizer == "adamw8bit":
        adamw8bit_class(device)  # before a checkpoint is read that holds its state
    if config.lora_rank:
        require_peft()  # before a warm-up
    if config.model != "toy" and not config.resume:
        resolve_model_name(config.model)  # before questions are fetched
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    resumed = load_state(run) if config.resume else None

    if resumed is None and distributed.is_main():
        claim_run(run, overwrite=config.overwrite)
    elif resumed is not None and resumed[1]["step"] > config.steps:
        raise InputError(f"run {run} is already at step {resumed[1]['step']}; to go on, raise --steps above that")

    # ---- questions and policy. With torchrun, B and everything below are this process's share (distributed.py).
    B = distributed.share_of(config.questions_per_step, "--questions-per-step")
    train_questions, held_out = load_data(config)
    digest = questions_digest(train_questions + held_out)
    if (
        resumed is not None and resumed[1].get("questions", digest) != digest
    ):  # ids may be line numbers, and the buffer goes by ids
        data = config.data or "the toy"
        raise InputError(
            f"the questions of {data} are not those that run {run} was trained on; put them back, or start a new run"
        )
    demonstrations = load_demonstrations(config) if resumed is None else []
    if resumed is None:
        policy = start_policy(config, device, stop, weights)
    else:
        policy = load_policy(str(resumed[0] / "model"), device=device, dtype=weights)
    policy.autocast = autocast
    if config.lora_rank:
        add_lora(policy.model, config.lora_rank)
    distributed.same_everywhere(policy.model.parameters())
    policy.sampler = config.sampler
    if config.gradient_checkpointing:
        enable_gradient_checkpointing(policy.model)
    if config.compile:
        compile_layers(policy)
    prompts = encode_prompts(policy, train_questions, config)
    questions = {q.id: q for q in distributed.shard([q for q in train_questions if q.id in prompts])}
    fitting = encode_prompts(policy, held_out, config)
    held_out = [q for q in held_out if q.id in fitting]
    check_counts(config, len(prompts), len(held_out))
    if demonstrations:
        follow_demonstrations(policy, demonstrations, config, stop)
    optimizer = make_optimizer(
        policy.model.parameters(), config.optimizer, lr=config.lr, weight_decay=config.weight_decay
    )

    # ---- the method's state
    seed = config.seed + distributed.rank()
    sampler = QuestionSampler(list(questions.values()), seed=seed)
    buffer = ReplayBuffer(config.group_size, seed=seed, max_per_question=config.max_per_question)
    started, bad_steps, first_step, tokens_seen = False, 0, 0, 0
    if resumed is not None:
        state = resumed[1]
        own_part(optimizer).load_state_dict(state["optimizer"])
        load_adapter(policy.model, state["adapter"])
        sampler.load_state_dict(state["sampler"])
        buffer.load_state_dict(state["buffer"])
        started, bad_steps, first_step, tokens_seen = (
            state["started"],
            state["bad_steps"],
            state["step"],
            state["tokens_seen"],
        )
        set_random_state(state["random"])
    else:
        torch.manual_seed(seed)  # the same rollouts whether the warmed-up policy was made or read from its cache

    def save(step: int) -> Path:
        state = {
            "optimizer": own_part(optimizer).state_dict(),
            "adapter": adapter_state(policy.model),
            "questions": digest,
            "sampler": sampler.state_dict(),
            "buffer": buffer.state_dict(),
            "started": started,
            "bad_steps": bad_steps,
            "tokens_seen": tokens_seen,
        }
        return save_checkpoint(run, step, policy, state)

    def evaluate_now() -> dict[str, Any]:
        groups = evaluate(
            policy,
            distributed.shard(held_out),
            samples=config.eval_samples,
            temperature=config.eval_temperature,
            max_new_tokens=config.max_response_length,
            system_prompt=config.system_prompt,
            batch_size=config.rollout_batch,
            seed=config.seed,
        )
        return eval_metrics(distributed.gather([[t.reward for t in group] for group in groups]))

    def log(name: str, rows: list[dict[str, Any]]) -> None:
        if distributed.is_main():
            append_lines(run / name, rows)

    def stop_asked() -> bool:
        return bool(distributed.total({"stop": stop.requested})["stop"])

    def stop_if_asked() -> None:
        if stop_asked():
            raise Interrupted(
                "stopped before the first step; the run's folder is as it was, so start again with the same command"
            )

    # ---- the first evaluation. The run's folder changes only after it: what fails or is stopped before leaves it as it was.
    stop_if_asked()
    before = evaluate_now() if resumed is None else {}
    stop_if_asked()
    if distributed.is_main():
        if resumed is None:
            open_run(run, to_dict(config))
        else:
            reopen_run(run, {**to_dict(config), "resume": ""}, first_step)
    if resumed is None:
        log("metrics.jsonl", [{"step": 0, **before}])

    progress = tqdm(
        range(first_step + 1, config.steps + 1), desc=config.algo, initial=first_step, total=config.steps,
        disable=not distributed.is_main(),
    )  # fmt: skip
    for step in progress:
        clock = Stopwatch()

        # 1. Mixing. Up to ρB of the step's questions are replayed, once replay has started.
        wanted = math.floor(config.replay_ratio * B + 1e-9) if started else 0
        # 2. Question selection: medium difficulty first. The rest are fresh, from the data.
        replayed_ids = buffer.draw_questions(wanted, method=config.question_draw, sigma=config.draw_sigma)
        fresh = sampler.draw(B - len(replayed_ids), skip={*buffer.retired, *replayed_ids})
        # 3. Trajectory selection: of each replayed question's successes, the one that the policy is surest of.
        chosen, scored_tokens = choose_trajectories(
            policy,
            buffer,
            replayed_ids,
            method=config.trajectory_choice,
            temperature=config.temperature,
            token_budget=config.train_batch_tokens,
            chunk_bytes=config.logits_megabytes * 2**20,
        )
        clock.lap("choose")

        # 4. Rollouts. K for a fresh question, K − 1 beside a replayed trajectory.
        asked = replayed_ids + [q.id for q in fresh]
        K = config.group_size
        groups = rollout(
            policy,
            [(id, prompts[id]) for id in asked],
            [K - 1] * len(chosen) + [K] * (len(asked) - len(chosen)),
            temperature=config.temperature,
            max_new_tokens=config.max_response_length,
            batch_size=config.rollout_batch,
        )
        clock.lap("generate")

        # 5. Rewards and advantages. The replayed success counts in its group's mean.
        for group in groups:
            for trajectory in group:
                question = questions[trajectory.question_id]
                _, right = grade(trajectory.text, question.answer, question.letters)
                trajectory.reward = float(right)
        new = [t for group in groups for t in group]
        fresh_sums = distributed.total({"right": sum(t.reward for t in new), "rollouts": len(new)})
        success_rate = fresh_sums["right"] / fresh_sums["rollouts"]
        for group, trajectory in zip(groups, chosen):
            group.insert(0, trajectory)
        rewards = torch.tensor([[t.reward for t in group] for group in groups])  # [B, K]
        advantages = group_advantages(rewards, normalize_std=config.normalize_std)  # [B, K]
        advantages = keep_difficulty(advantages, rewards, config.difficulty)
        clock.lap("reward")
        samples = sample_rows(policy, groups, config) if distributed.is_main() else []
        clock.lap("samples")

        # 6. Loss and update.
        clip_range = config.clip_range if config.clip_when_mixed or not started else None
        update = update_policy(policy, optimizer, groups, advantages, config, clip_range=clip_range)
        bad_steps = bad_steps + 1 if update["skipped_updates"] else 0
        clock.lap("update")

        # 8. Delayed start, checked first because storing begins with the very step that passes the threshold.
        started = started or (config.algo == "exgrpo" and success_rate > config.start_threshold)
        # 7. Update the buffer. Retirement leaves enough questions to fill a batch.
        if started:
            for group in groups:
                left = len(questions) - len(buffer.retired)
                buffer.update(group, may_retire=config.retire and left > B)

        # ---- everything below only watches
        row = {
            "step": step,
            **step_metrics(groups, buffer, replayed_questions=len(replayed_ids), scored_tokens=scored_tokens),
            **update,
        }
        tokens = row["num_tokens"]
        tokens_seen += tokens
        row.update({"replay/started": started, "num_tokens": tokens_seen, "epoch": sampler.epoch})
        last = step == config.steps
        if last or (config.eval_every and step % config.eval_every == 0):
            row.update(evaluate_now())
            clock.lap("eval")
        seconds = clock.total("choose", "generate", "reward", "update")
        row.update(clock.metrics(), tokens_per_second=round(tokens / seconds))
        log("metrics.jsonl", [row])
        log("samples.jsonl", [{"step": step, **sample} for sample in samples])
        progress.set_postfix(
            reward=f"{success_rate:.2f}",
            entropy="-" if update["entropy"] is None else f"{update['entropy']:.2f}",
            buffer=row["buffer/questions"],
            retired=row["buffer/retired"],
            tok_s=row["tokens_per_second"],
        )

        if bad_steps >= MOST_BAD_STEPS:
            save(step)
            raise InputError(f"gradients were NaN or infinite in {bad_steps} steps in a row; lower --lr or use fp32")
        stopping = not last and stop_asked()
        # A resumed run has a checkpoint, so it needs one of its end, too: from an older one, --steps would undo what followed.
        due = config.save_every and step % config.save_every == 0
        if stopping or due or (last and (config.save_every or resumed is not None)):
            save(step)
        if stopping:
            progress.close()
            world = distributed.world_size()
            start = "python" if world == 1 else f"torchrun --nproc-per-node {world} --"
            print(f"\nstopped after step {step}; go on with: {start} train.py --resume {run}")
            return run

    if not distributed.is_main():
        return run
    save_model(policy, run / "model")
    plot_curves({config.algo: run}, run / "curves.png")
    print(summary(run, config))
    return run


def explain(error: Exception, run: str) -> str | None:
    """One sentence for a failure that the user can do something about; None for a fault of this program."""
    resumable = f"; go on with --resume {run}" if list_checkpoints(Path(run)) else ""
    if isinstance(error, OSError):  # a full disk, a folder that is gone; what is read is checked where it is read
        return f"run folder {run} could not be written ({error.strerror or error}); make room for it{resumable}"
    if is_out_of_memory(error):
        return (
            "out of memory; lower --rollout-batch, --train-batch-tokens or --max-response-length, or switch on "
            f"--gradient-checkpointing{resumable}"
        )
    return None


def main(argv: list[str] | None = None) -> int:
    run = ""
    try:
        config = parse_train_config(argv)
        if config.dry_run:
            if int(os.environ.get("RANK", 0)) == 0:  # as torchrun tells each process, and they need not meet for this
                shape = toy_shape(config) if config.model == "toy" else load_shape(config.model)
                print(fit_table(shape, config, resolve_device(config.device), int(os.environ.get("WORLD_SIZE", 1))))
            return 0
        run = config.run
        distributed.start(config.device)
        with StopRequest() as stop, sole_writer(Path(run)) if distributed.is_main() else nullcontext():
            train(config, stop)
        distributed.finish()
    except InputError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    except Interrupted as error:
        if distributed.is_main():
            print(f"\ntrain.py: {error}", file=sys.stderr)
        return 130  # what a shell reports for Ctrl-C; a run that is saved ends with 0
    except (RuntimeError, MemoryError, OSError) as error:
        sentence = explain(error, run)
        if sentence is None and distributed.lost_another(error):
            reason = str(error).splitlines()[0]
            sentence = f"another process has ended, so this one (rank {distributed.rank()}) stops too: {reason}"
        if sentence is None:
            raise
        print(f"\ntrain.py: {sentence}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
