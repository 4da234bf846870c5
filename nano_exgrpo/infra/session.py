"""What the loop starts from: the questions, their prompts, and the policy: a model loaded, or the toy, warmed up."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from nano_exgrpo import policy as policy_module
from nano_exgrpo import questions as questions_module
from nano_exgrpo import toy, warmup
from nano_exgrpo.arithmetic import TRAINING_QUESTIONS, arithmetic_questions, is_arithmetic
from nano_exgrpo.config import TrainConfig, to_dict
from nano_exgrpo.errors import InputError
from nano_exgrpo.infra import distributed
from nano_exgrpo.infra.checkpoint import save_model
from nano_exgrpo.infra.memory import ModelShape, shape_of
from nano_exgrpo.infra.stop import StopRequest
from nano_exgrpo.policy import Policy, encode_prompt, load_policy
from nano_exgrpo.questions import (
    Question,
    load_questions,
    mislabel,
    possible_sums,
    put_out_of_reach,
    split_held_out,
    sum_questions,
)
from nano_exgrpo.warmup import encode_demonstrations, shown, warm_up


def load_data(config: TrainConfig) -> tuple[list[Question], list[Question]]:
    """(training questions, held-out questions)."""
    if not config.data:
        questions = toy_sums(config)
    elif is_arithmetic(config.data):
        questions = arithmetic_questions(config.data, TRAINING_QUESTIONS + config.held_out, seed=config.seed)
    else:
        questions = load_questions(
            config.data, question_field=config.question_field, answer_field=config.answer_field, split=config.split
        )
    train_questions, held_out = split_held_out(questions, config.held_out, seed=config.seed)
    if config.out_of_reach:
        train_questions = put_out_of_reach(
            train_questions,
            config.out_of_reach,
            seed=config.seed,
            terms=2 * config.toy_most_terms,
            largest=config.toy_largest,
        )
    return mislabel(train_questions, config.wrong_answers, seed=config.seed), held_out


def toy_sums(config: TrainConfig) -> list[Question]:
    """Training and held-out sums together. Raises InputError where there are not so many different ones."""
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
    for q in questions if config.model == "toy" else ():
        if q.prompt not in policy.tokenizer.decode(prompts[q.id]):  # it drops what it has no token for
            raise InputError(
                f"the toy reads only sums such as 3 + 8 + 5, not {q.prompt[:60]!r}; name a --model for other data"
            )
    fitting = {id: ids for id, ids in prompts.items() if len(ids) <= room}
    if len(fitting) < len(prompts):
        print(
            f"skipped {len(prompts) - len(fitting)} of {len(prompts)} questions: their prompts are longer than {room} tokens"
        )
    if not fitting:
        change = "raise --max-prompt-length" if room == config.max_prompt_length else "lower --max-response-length"
        raise InputError(f"every prompt is longer than {room} tokens; {change}")
    return fitting


def check_counts(config: TrainConfig, training: int, held_out: int) -> None:
    """Raises InputError where a process, or one of its updates, would have no question."""
    processes = distributed.world_size()
    needed, available = config.updates_per_step * processes, min(config.questions_per_step, training)
    if available < needed:
        raise InputError(
            f"a step needs at least {needed} questions, one for each update (--updates-per-step {config.updates_per_step}) of each "
            f"process, and has {available}"
        )
    if held_out < processes:
        raise InputError(f"{held_out} held-out questions are too few for {processes} processes; raise --held-out")


def start_policy(config: TrainConfig, device: torch.device, stop: StopRequest, dtype: torch.dtype) -> Policy:
    """The policy that the run starts from, its weights in `dtype`: a model as it is, or the toy, which has learned a
    little (in fp32). Raises Interrupted where `stop` is requested meanwhile."""
    if config.model != "toy":
        return load_policy(config.model, device=device, dtype=dtype)
    policy = warmed_up_toy(config, device, stop)
    for parameter in policy.model.parameters():
        parameter.data = parameter.data.to(dtype)  # not model.to, which would also round the tables of RoPE
    return policy


def warmed_up_toy(config: TrainConfig, device: torch.device, stop: StopRequest) -> Policy:
    """Build the toy and warm it up on its demonstrations, or take it from the cache where that was done before."""
    cache = Path(config.run).parent / ".warmup" / warmup_key(config, device)
    if config.warmup_cache and (cache / "config.json").exists():
        print(f"warmed-up policy from {cache} (--no-warmup-cache to make it anew)")
        return load_policy(str(cache), device=device)
    policy = toy.build_policy(seed=config.seed, device=device, hidden=config.toy_hidden, layers=config.toy_layers)
    phases = toy_phases(config)
    if not phases:
        return policy
    with shown(sum(steps for _, steps, _ in phases), stop) as on_step:
        for pairs, steps, lr in phases:
            # Not by the run's optimiser and micro-batches: the toy stands for a model that was trained elsewhere, and one
            # cache serves all runs.
            optimizer = torch.optim.AdamW(policy.model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
            examples = encode_demonstrations(policy, pairs, config.system_prompt)
            warm_up(
                policy,
                optimizer,
                examples,
                steps=steps,
                batch_size=config.warmup_batch,
                seed=config.seed,
                on_step=on_step,
            )
    save_model(policy, cache)
    return policy


def toy_phases(config: TrainConfig) -> list[tuple[list[tuple[str, str]], int, float]]:
    """(demonstrations, steps, peak learning rate) of each phase of the toy's warm-up; none where none is asked for."""
    if not config.warmup_steps:
        return []
    asked, held_out = split_held_out(toy_sums(config), config.held_out, seed=config.seed)
    if config.toy_demonstrations:
        terms = (config.toy_fewest_terms, config.toy_most_terms)
        count = min(config.toy_demonstrations, possible_sums(terms, config.toy_largest))
        kept = {q.prompt for q in held_out}
        asked = [
            q
            for q in sum_questions(count, seed=config.seed, terms=terms, largest=config.toy_largest)
            if q.prompt not in kept
        ]
    pairs = toy.demonstrations(
        asked,
        reasoning=config.toy_reasoning,
        seed=config.seed,
        largest=config.toy_largest,
        widest_guess=config.toy_widest_guess,
    )
    phases = [(pairs, config.warmup_steps, config.warmup_lr)]
    if config.toy_skill_steps:
        skilled = toy.demonstrations(asked, reasoning=1.0, seed=config.seed, largest=config.toy_largest)
        phases.insert(0, (skilled, config.toy_skill_steps, config.toy_skill_lr))
    return phases


def toy_shape(config: TrainConfig) -> ModelShape:
    return shape_of(toy.build_policy(seed=config.seed, hidden=config.toy_hidden, layers=config.toy_layers).model)


def warmup_key(config: TrainConfig, device: torch.device) -> str:
    """Names the cache of a warmed-up toy by all that shapes it: settings, where it is computed, versions, and the code
    that draws its sums, demonstrates, encodes and trains."""
    import transformers

    names = ("warmup_steps", "warmup_batch", "warmup_lr", "seed", "held_out", "system_prompt", "threads")
    settings = {k: v for k, v in to_dict(config).items() if k.startswith("toy_") or k in names}
    parts = [settings, device.type, torch.__version__, transformers.__version__]
    files = (__file__, *(module.__file__ for module in (questions_module, policy_module, toy, warmup)))
    code = b"".join(Path(file).read_bytes() for file in files)
    return hashlib.sha256(json.dumps(parts).encode() + code).hexdigest()[:16]
