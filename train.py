#!/usr/bin/env python
"""Train a language model to reason from experience: ExGRPO, one readable loop.

    python train.py                                   a toy, from nothing to skilled in two minutes on a laptop
    python train.py --algo grpo                       the baseline: the same loop without replay
    python train.py --model Qwen2.5-Math-1.5B         a real model on GSM8K (one GPU; --dry-run: will it fit?)
    torchrun --nproc-per-node 8 -- train.py ...       the same on eight GPUs (nano_exgrpo/distributed.py)

The loop below is the method, step by step (arXiv 2510.02245; comments name its eight steps). What was left
out on purpose: a reference model and its KL term (the method has none), an inference engine beside the
trainer (rollouts come from the very weights that are trained, so π_old is exact), and a scheduler (the
paper's learning rate is constant).
"""

from __future__ import annotations

import hashlib
import json
import math
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from nano_exgrpo import distributed, toy
from nano_exgrpo.checker import reward
from nano_exgrpo.checkpoint import list_checkpoints, load_state, save_checkpoint, save_model, set_random_state
from nano_exgrpo.config import TrainConfig, parse_train_config, to_dict
from nano_exgrpo.evaluate import evaluate, is_out_of_memory
from nano_exgrpo.lora import adapter_state, add_lora, load_adapter
from nano_exgrpo.loss import exgrpo_loss, group_advantages
from nano_exgrpo.memory import ModelShape, fit_table, load_shape, shape_of
from nano_exgrpo.optim import adamw8bit_class, make_optimizer, own_part, resolve_dtypes
from nano_exgrpo.policy import Policy, enable_gradient_checkpointing, encode_prompt, end_of_turn, load_policy, mean_entropies, resolve_device, token_batches, token_logprobs
from nano_exgrpo.questions import InputError, Question, QuestionSampler, load_questions, mislabel, read_jsonl, possible_sums, split_held_out, sum_questions
from nano_exgrpo.replay import ReplayBuffer
from nano_exgrpo.rollout import Trajectory, rollout
from nano_exgrpo.runlog import append_lines, claim_run, open_run, plot_curves, read_lines, rewind, write_config
from nano_exgrpo.stats import accuracy_interval

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
    prompts = encode_prompts(policy, train_questions, config)
    questions = {q.id: q for q in distributed.shard([q for q in train_questions if q.id in prompts])}
    fitting = encode_prompts(policy, held_out, config)
    held_out = [q for q in held_out if q.id in fitting]
    optimizer = make_optimizer(policy.model.parameters(), config.optimizer, lr=config.lr, weight_decay=config.weight_decay)

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
        started, bad_steps, first_step, tokens_seen = state["started"], state["bad_steps"], state["step"], state["tokens_seen"]
        set_random_state(state["random"])
        if distributed.is_main():
            rewind(run, first_step)
            write_config(run, {**to_dict(config), "resume": ""})
    else:
        torch.manual_seed(seed)  # the same rollouts whether the warmed-up policy was made or read from its cache
        if distributed.is_main():
            open_run(run, to_dict(config))

    def save(step: int) -> Path:
        state = {"optimizer": own_part(optimizer).state_dict(), "sampler": sampler.state_dict(), "buffer": buffer.state_dict(), "adapter": adapter_state(policy.model)}
        counters = {"started": started, "bad_steps": bad_steps, "tokens_seen": tokens_seen}
        return save_checkpoint(run, step, policy, {**state, **counters})

    def evaluate_now() -> dict[str, Any]:
        result = evaluate(
            policy,
            distributed.shard(held_out),
            samples=config.eval_samples,
            temperature=config.eval_temperature,
            max_new_tokens=config.max_response_length,
            system_prompt=config.system_prompt,
            batch_size=config.rollout_batch,
            seed=config.seed,
        )
        return eval_metrics(distributed.gather([[t.reward for t in group] for group in result.trajectories]))

    def log(name: str, rows: list[dict[str, Any]]) -> None:
        if distributed.is_main():
            append_lines(run / name, rows)

    if resumed is None:
        log("metrics.jsonl", [{"step": 0, **evaluate_now()}])

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
        chosen = choose_trajectories(policy, buffer, replayed_ids, config)
        scored_tokens = sum(len(t.response_ids) for id in replayed_ids for t in buffer.stored[id])
        clock.lap("choose")

        # 4. Rollouts. K for a fresh question, K − 1 beside a replayed trajectory.
        asked = replayed_ids + [q.id for q in fresh]
        K = config.group_size
        groups = rollout(
            policy,
            [(id, prompts[id]) for id in asked],
            [K - 1] * len(chosen) + [K] * len(fresh),
            temperature=config.temperature,
            max_new_tokens=config.max_response_length,
            batch_size=config.rollout_batch,
        )
        clock.lap("generate")

        # 5. Rewards and advantages. The replayed success counts in its group's mean.
        for group in groups:
            for trajectory in group:
                trajectory.reward = reward(trajectory.text, questions[trajectory.question_id].answer)
        new = [t for group in groups for t in group]
        scored = distributed.total({"right": sum(t.reward for t in new), "rollouts": len(new)})
        success_rate = scored["right"] / scored["rollouts"]
        for group, trajectory in zip(groups, chosen):
            group.insert(0, trajectory)
        rewards = torch.tensor([[t.reward for t in group] for group in groups])  # [B, K]
        advantages = group_advantages(rewards, normalize_std=config.normalize_std)  # [B, K]
        clock.lap("reward")
        samples = describe(policy, groups, config) if distributed.is_main() else []

        # 6. Loss and update.
        clipped_fresh = config.clip_when_mixed or not started
        update = update_policy(policy, optimizer, groups, advantages, config, clip_range=config.clip_range if clipped_fresh else None)
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
        eligible = buffer.eligible()
        sums = distributed.total(
            {
                "rows": len(new),
                "tokens": sum(len(t.response_ids) for t in new),
                "truncated": sum(t.truncated for t in new),
                "groups": len(groups),
                "solved": (rewards.mean(1) == 1).sum().item(),
                "failed": (rewards.mean(1) == 0).sum().item(),
                "replayed": len(chosen),
                "stored": len(buffer.stored),
                "trajectories": len(buffer),
                "retired": len(buffer.retired),
                "scored": scored_tokens if config.trajectory_choice != "random" else 0,
                "stop": stop.requested,
                **{f"bucket {k}": len(eligible.get(k, ())) for k in range(1, K)},
            }
        )
        tokens = int(sums["tokens"])
        tokens_seen += tokens
        row = {
            "step": step,
            "reward": success_rate,
            "questions/solved": sums["solved"] / sums["groups"],
            "questions/failed": sums["failed"] / sums["groups"],
            "completions/mean_length": tokens / sums["rows"],
            "completions/clipped_ratio": sums["truncated"] / sums["rows"],
            **update,
            "replay/started": started,
            "replay/questions": int(sums["replayed"]),
            "buffer/questions": int(sums["stored"]),
            "buffer/trajectories": int(sums["trajectories"]),
            "buffer/retired": int(sums["retired"]),
            "buffer/buckets": {k: int(sums[f"bucket {k}"]) for k in range(1, K) if sums[f"bucket {k}"]},
            "rollouts": int(sums["rows"]),
            "num_tokens": tokens_seen,
            "scored_tokens": int(sums["scored"]),
            "epoch": sampler.epoch,
        }
        last = step == config.steps
        if last or (config.eval_every and step % config.eval_every == 0):
            row.update(evaluate_now())
            clock.lap("eval")
        row.update(clock.metrics(), tokens_per_second=round(tokens / clock.total("choose", "generate", "reward", "update")))
        log("metrics.jsonl", [row])
        log("samples.jsonl", [{"step": step, **sample} for sample in samples])
        progress.set_postfix(
            reward=f"{success_rate:.2f}", entropy="-" if update["entropy"] is None else f"{update['entropy']:.2f}", buffer=row["buffer/questions"],
            retired=row["buffer/retired"], tok_s=row["tokens_per_second"],
        )  # fmt: skip

        if bad_steps >= MOST_BAD_STEPS:
            save(step)
            raise InputError(f"gradients were NaN or infinite in {bad_steps} steps in a row; lower --lr or use fp32")
        stopping = bool(sums["stop"]) and not last
        if stopping or (config.save_every and (last or step % config.save_every == 0)):
            save(step)
        if stopping:
            progress.close()
            start = "python" if distributed.world_size() == 1 else f"torchrun --nproc-per-node {distributed.world_size()} --"
            print(f"\nstopped after step {step}; go on with: {start} train.py --resume {run}")
            return run

    if not distributed.is_main():
        return run
    save_model(policy, run / "model")
    plot_curves({config.algo: run}, run / "curves.png")
    print(summary(run, config))
    return run


# ------------------------------------------------------------------------------ parts of a step


def choose_trajectories(
    policy: Policy, buffer: ReplayBuffer, question_ids: Sequence[str], config: TrainConfig
) -> list[Trajectory]:
    """One stored success for each question, by entropy under the current policy, in one scoring pass."""
    stored = [t for id in question_ids for t in buffer.stored[id]]
    entropies = [math.nan] * len(stored)
    if stored and config.trajectory_choice != "random":
        entropies = mean_entropies(
            policy,
            [t.prompt_ids for t in stored],
            [t.response_ids for t in stored],
            temperature=config.temperature,
            token_budget=config.train_batch_tokens,
            chunk_bytes=config.logits_megabytes * 2**20,
        ).tolist()
    chosen, start = [], 0
    for id in question_ids:
        end = start + len(buffer.stored[id])
        chosen.append(buffer.choose(id, entropies[start:end], method=config.trajectory_choice))
        start = end
    return chosen


def update_policy(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Sequence[Trajectory]],
    advantages: Tensor,
    config: TrainConfig,
    *,
    clip_range: float | None,
) -> dict[str, Any]:
    """Step 6 on the groups of one batch, with advantages [B, K]; returns its metrics.

    Fresh trajectories leave with their behaviour log-probabilities filled in, as the buffer will store them.
    Rows without advantage (their whole group succeeded or failed) have no policy gradient and are left out of
    forward and backward, but count as rows in the normalisation. The entropy bonus is the mean over the tokens
    of the rows that are left.
    """

    def forward(batch: Sequence[Trajectory], with_entropy: bool) -> tuple[Tensor, Tensor | None, Tensor]:
        return token_logprobs(
            policy,
            [t.prompt_ids for t in batch],
            [t.response_ids for t in batch],
            temperature=config.temperature,
            with_entropy=with_entropy,
            chunk_bytes=config.logits_megabytes * 2**20,
        )

    def batches(rows: Sequence[tuple[Trajectory, float]]) -> list[list[tuple[Trajectory, float]]]:
        lengths = [len(t.prompt_ids) + len(t.response_ids) for t, _ in rows]
        return [[rows[i] for i in batch] for batch in token_batches(lengths, config.train_batch_tokens)]

    # Every update gets its share of the replayed groups, which stand first, and of the fresh ones.
    shares = [range(len(groups))[i :: config.updates_per_step] for i in range(config.updates_per_step)]
    rows_of = [
        [(t, a) for g in share for t, a in zip(groups[g], advantages[g].tolist(), strict=True) if a != 0]
        for share in shares
    ]
    if config.updates_per_step > 1:
        # π_old is the policy before the first update. With one update it is the one being differentiated, and
        # its log-probabilities are the new ones, detached: no second forward.
        with torch.no_grad():
            for batch in batches([row for rows in rows_of for row in rows if row[0].logprobs is None]):
                logprobs, _, _ = forward([t for t, _ in batch], with_entropy=False)  # [B, T]
                keep_behavior_logprobs([t for t, _ in batch], logprobs)

    totals: dict[str, float] = dict.fromkeys(
        ("loss", "entropy", "tokens", "fresh_tokens", "clipped", "approx_kl", "replay_tokens", "replay_weight", "replay_ratio"), 0.0
    )
    grad_norms, skipped = [], 0
    for share, rows in zip(shares, rows_of):
        # Sums over all processes, so that their gradients add up to that of the whole batch.
        whole = distributed.total(
            {"groups": len(share), "trained": len(rows), "tokens": sum(len(t.response_ids) for t, _ in rows)}
        )
        if not whole["trained"]:
            continue
        optimizer.zero_grad(set_to_none=True)
        denominator = config.max_response_length * (whole["groups"] * config.group_size if config.normalize_rows else 1)
        for batch in batches(rows):
            trajectories = [t for t, _ in batch]
            logprobs, entropies, mask = forward(trajectories, with_entropy=True)  # [B, T] each
            keep_behavior_logprobs(trajectories, logprobs)
            behavior = pad_sequence([t.logprobs for t in trajectories], batch_first=True)  # [B, T]
            parts = exgrpo_loss(
                logprobs,
                behavior.to(logprobs.device),
                torch.tensor([a for _, a in batch], device=logprobs.device),
                mask,
                torch.tensor([t.replayed for t in trajectories], device=logprobs.device),
                denominator=denominator,
                clip_range=clip_range,
                beta=config.beta,
                shaping=config.shaping,
                importance_correction=config.importance_correction,
            )
            loss = parts.loss
            if config.entropy_coef:  # left out where it is 0, so that nothing is derived from the entropies
                loss = loss - config.entropy_coef * entropies.sum() / whole["tokens"]
            loss.backward()
            for name in ("loss", "fresh_tokens", "clipped", "approx_kl", "replay_tokens", "replay_weight", "replay_ratio"):
                totals[name] += getattr(parts, name).item()
            totals["entropy"] += entropies.sum().item()
            totals["tokens"] += mask.sum().item()
        distributed.sum_gradients(policy.model.parameters())
        norm = torch.nn.utils.clip_grad_norm_(policy.model.parameters(), config.grad_clip).item()
        if math.isfinite(norm):
            optimizer.step()
            grad_norms.append(norm)
        else:
            skipped += 1
    optimizer.zero_grad(set_to_none=True)  # gradients would sit in memory during the next rollouts

    totals.update(rows=advantages.numel(), trained_rows=sum(map(len, rows_of)))
    totals = distributed.total(totals)

    def per(name: str, count: str) -> float | None:
        return totals[name] / totals[count] if totals[count] else None

    return {
        "loss": totals["loss"] / config.updates_per_step,
        "entropy": per("entropy", "tokens"),
        "grad_norm": sum(grad_norms) / len(grad_norms) if grad_norms else None,
        "skipped_updates": skipped,
        "clip_ratio": per("clipped", "fresh_tokens"),
        "approx_kl": per("approx_kl", "fresh_tokens"),
        "replay/weight_mean": per("replay_weight", "replay_tokens"),
        "replay/ratio_mean": per("replay_ratio", "replay_tokens"),
        "trained_tokens": totals["tokens"],
        "trained_rows": totals["trained_rows"] / totals["rows"],
    }


def keep_behavior_logprobs(trajectories: Sequence[Trajectory], logprobs: Tensor) -> None:
    """Note log π_old [B, T] on those that have none yet; a replayed trajectory keeps its log π_past."""
    for trajectory, row in zip(trajectories, logprobs.detach().cpu(), strict=True):
        if trajectory.logprobs is None:
            trajectory.logprobs = row[: len(trajectory.response_ids)].clone()


def describe(policy: Policy, groups: Sequence[Sequence[Trajectory]], config: TrainConfig) -> list[dict[str, Any]]:
    """Rows of samples.jsonl: the first trajectories of this step, under the policy that produced them."""
    everything = [t for group in groups for t in group]
    logged = everything if config.log_samples < 0 else everything[: config.log_samples]
    rows: list[dict[str, Any]] = [{} for _ in logged]
    lengths = [len(t.prompt_ids) + len(t.response_ids) for t in logged]
    for batch in token_batches(lengths, config.train_batch_tokens):
        with torch.no_grad():
            logprobs, entropies, _ = token_logprobs(
                policy, [logged[i].prompt_ids for i in batch], [logged[i].response_ids for i in batch],
                temperature=config.temperature, chunk_bytes=config.logits_megabytes * 2**20,
            )  # fmt: skip
        for place, i in enumerate(batch):
            t = logged[i]
            values = entropies[place, : len(t.response_ids)].cpu()  # [T]
            t.entropy = values.mean().item()
            rows[i] = {
                "question": t.question_id,
                "prompt": policy.tokenizer.decode(t.prompt_ids),
                "response": t.text,
                "reward": t.reward,
                "entropy": round(t.entropy, 5),
                "replayed": t.replayed,
                "truncated": t.truncated,
                "tokens": [policy.tokenizer.decode([id]) for id in t.response_ids.tolist()],
                "token_entropies": [round(value, 4) for value in values.tolist()],
            }
    return rows


# ---------------------------------------------------------------------- before and after the loop


def load_data(config: TrainConfig) -> tuple[list[Question], list[Question]]:
    """(training questions, held-out questions)."""
    if not config.data:
        questions = toy_sums(config)
    else:
        questions = load_questions(
            config.data, question_field=config.question_field, answer_field=config.answer_field, split=config.split
        )
    train_questions, held_out = split_held_out(questions, config.held_out, seed=config.seed)
    return mislabel(train_questions, config.wrong_answers, seed=config.seed), held_out


def toy_sums(config: TrainConfig) -> list[Question]:
    return sum_questions(
        config.toy_questions + config.held_out,
        seed=config.seed,
        terms=(config.toy_fewest_terms, config.toy_most_terms),
        largest=config.toy_largest,
    )


def encode_prompts(policy: Policy, questions: Sequence[Question], config: TrainConfig) -> dict[str, Tensor]:
    """Prompt ids [P] by question id, without the prompts that are too long. Raises InputError if none is left."""
    room = min(config.max_prompt_length, policy.context - config.max_response_length)
    if room < 1:
        raise InputError(
            f"--max-response-length {config.max_response_length} leaves no room for a prompt in the model's context of "
            f"{policy.context} tokens; lower it"
        )
    prompts = {q.id: encode_prompt(policy, q.prompt, config.system_prompt) for q in questions}
    fitting = {id: ids for id, ids in prompts.items() if len(ids) <= room}
    if len(fitting) < len(prompts):
        print(f"skipped {len(prompts) - len(fitting)} of {len(prompts)} questions: their prompts are longer than {room} tokens")
    if not fitting:
        raise InputError(f"every prompt is longer than {room} tokens; raise --max-prompt-length")
    return fitting


def start_policy(config: TrainConfig, device: torch.device, stop: StopRequest, dtype: torch.dtype) -> Policy:
    """The policy that RL starts from, its weights in `dtype`: loaded or built, and warmed up (in fp32) if asked to."""
    policy = warmed_up_policy(config, device, stop, torch.float32 if config.warmup_steps else dtype)
    for parameter in policy.model.parameters():
        parameter.data = parameter.data.to(dtype)  # not model.to, which would also round the tables of RoPE
    return policy


def warmed_up_policy(config: TrainConfig, device: torch.device, stop: StopRequest, dtype: torch.dtype) -> Policy:
    is_toy = config.model == "toy"
    cache = Path(config.run).parent / ".warmup" / warmup_key(config)
    if is_toy and config.warmup_cache and (cache / "config.json").exists():
        print(f"warmed-up policy from {cache} (--no-warmup-cache to make it anew)")
        return load_policy(str(cache), device=device)
    if is_toy:
        policy = toy.build_policy(seed=config.seed, device=device, hidden=config.toy_hidden, layers=config.toy_layers)
    else:
        policy = load_policy(config.model, device=device, dtype=dtype)
    if not config.warmup_steps:
        return policy
    if is_toy:
        asked, held_out = split_held_out(toy_sums(config), config.held_out, seed=config.seed)
        if config.toy_demonstrations:
            terms = (config.toy_fewest_terms, config.toy_most_terms)
            count = min(config.toy_demonstrations, possible_sums(terms, config.toy_largest))
            kept = {q.prompt for q in held_out}
            asked = [q for q in sum_questions(count, seed=config.seed, terms=terms, largest=config.toy_largest) if q.prompt not in kept]
        pairs = toy.demonstrations(asked, reasoning=config.toy_reasoning, seed=config.seed, largest=config.toy_largest)
        skilled = toy.demonstrations(asked, reasoning=1.0, seed=config.seed, largest=config.toy_largest)
    elif config.warmup_data:
        pairs = []
        for where, row in read_jsonl(config.warmup_data):
            if not isinstance(row.get("question"), str) or not isinstance(row.get("response"), str):
                raise InputError(f"{where} needs the text fields 'question' and 'response'")
            pairs.append((row["question"], row["response"]))
    else:
        raise InputError("--warmup-steps on a real model needs demonstrations: name them with --warmup-data")
    end = torch.tensor([end_of_turn(policy.tokenizer)])

    def encode(demonstrations: Sequence[tuple[str, str]]) -> list[tuple[Tensor, Tensor]]:
        return [(encode_prompt(policy, prompt, config.system_prompt), torch.cat([text_ids(policy, response), end])) for prompt, response in demonstrations]

    phases = [(encode(pairs), config.warmup_steps, config.warmup_lr)]
    if is_toy and config.toy_skill_steps:
        phases.insert(0, (encode(skilled), config.toy_skill_steps, config.toy_skill_lr))
    with tqdm(total=sum(steps for _, steps, _ in phases), desc="warm-up") as progress:

        def on_step(step: int, loss: float) -> None:
            progress.update()
            progress.set_postfix(loss=f"{loss:.3f}")
            if stop.requested:
                raise Interrupted("stopped during the warm-up; nothing was saved, so start again with the same command")

        for examples, steps, lr in phases:
            toy.warm_up(policy, examples, steps=steps, batch_size=config.warmup_batch, lr=lr, seed=config.seed, on_step=on_step)
    if is_toy:
        save_model(policy, cache)
    return policy


def toy_shape(config: TrainConfig) -> ModelShape:
    return shape_of(toy.build_policy(seed=config.seed, hidden=config.toy_hidden, layers=config.toy_layers).model)


def text_ids(policy: Policy, text: str) -> Tensor:
    return torch.tensor(policy.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.long)


def warmup_key(config: TrainConfig) -> str:
    """Names the cache of a warmed-up toy by all that shapes it: settings, code and torch version."""
    settings = {k: v for k, v in to_dict(config).items() if k.startswith(("toy_", "warmup_")) or k in ("seed", "held_out")}
    code = Path(toy.__file__).read_bytes()
    return hashlib.sha256(json.dumps([settings, torch.__version__]).encode() + code).hexdigest()[:16]


def eval_metrics(rewards: list[list[float]]) -> dict[str, Any]:
    """rewards: of each question's samples."""
    accuracy = accuracy_interval(rewards)
    return {"eval/accuracy": accuracy.value, "eval/low": accuracy.low, "eval/high": accuracy.high, "eval/questions": len(rewards)}


def summary(run: Path, config: TrainConfig) -> str:
    rows = [row for row in read_lines(run / "metrics.jsonl") if "eval/accuracy" in row]
    first, last = rows[0], rows[-1]
    return (
        f"\nheld-out accuracy {first['eval/accuracy']:.3f} -> {last['eval/accuracy']:.3f} "
        f"[{last['eval/low']:.3f}, {last['eval/high']:.3f}] on {last['eval/questions']} questions after {last['step']} steps\n"
        f"curves: {run / 'curves.png'}   samples: {run / 'samples.jsonl'}   model: {run / 'model'}"
    )


class Stopwatch:
    """Seconds spent between laps."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last = time.perf_counter()

    def lap(self, name: str) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[name] = now - self.last
        self.last = now

    def total(self, *names: str) -> float:
        return sum(self.seconds[name] for name in names)

    def metrics(self) -> dict[str, float]:
        return {f"time/{name}": round(value, 4) for name, value in self.seconds.items()}


class Interrupted(Exception):
    """The user ended the run before there was anything to save."""


class StopRequest:
    """As a context manager: Ctrl-C or SIGTERM sets `requested`; a second one stops at once."""

    def __init__(self) -> None:
        self.requested = False
        self.handlers: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        self.handlers = {kind: signal.signal(kind, self.request) for kind in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exception: object) -> None:
        for kind, handler in self.handlers.items():
            signal.signal(kind, handler)

    def request(self, number: int, frame: Any) -> None:
        if self.requested:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.requested = True
        print("\nstopping after this step (once more to stop at once)", file=sys.stderr)


def explain(error: Exception, run: str) -> str | None:
    """One sentence for a failure that the user can do something about; None for a fault of this program."""
    if is_out_of_memory(error):
        resumable = f"; go on with --resume {run}" if list_checkpoints(Path(run)) else ""
        return (
            "out of memory; lower --rollout-batch, --train-batch-tokens or --max-response-length, or switch on "
            f"--gradient-checkpointing{resumable}"
        )
    return None


def main(argv: list[str] | None = None) -> int:
    run = ""
    try:
        config, _ = parse_train_config(argv)
        if config.dry_run:
            print(fit_table(toy_shape(config) if config.model == "toy" else load_shape(config.model), config, resolve_device(config.device)))
            return 0
        run = config.run
        distributed.start(config.device)
        with StopRequest() as stop:
            train(config, stop)
        distributed.finish()
    except InputError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    except Interrupted as error:
        print(f"\ntrain.py: {error}", file=sys.stderr)
        return 130  # what a shell reports for Ctrl-C
    except (RuntimeError, MemoryError) as error:
        sentence = explain(error, run)
        if sentence is None and distributed.world_size() > 1:
            sentence = f"another process has ended, so this one (rank {distributed.rank()}) stops too: {str(error).splitlines()[0]}"
        if sentence is None:
            raise
        print(f"\ntrain.py: {sentence}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
