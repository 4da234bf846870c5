"""What the loop starts from: the questions, their prompts, and the policy, loaded or built and warmed up."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from nano_exgrpo import toy
from nano_exgrpo.checkpoint import Interrupted, StopRequest, save_model
from nano_exgrpo.config import TrainConfig, to_dict
from nano_exgrpo.memory import ModelShape, shape_of
from nano_exgrpo.policy import Policy, encode_prompt, end_of_turn, load_policy
from nano_exgrpo.questions import (
    InputError,
    Question,
    load_questions,
    mislabel,
    possible_sums,
    put_out_of_reach,
    read_jsonl,
    split_held_out,
    sum_questions,
)


def load_data(config: TrainConfig) -> tuple[list[Question], list[Question]]:
    """(training questions, held-out questions)."""
    if not config.data:
        questions = toy_sums(config)
    else:
        questions = load_questions(
            config.data, question_field=config.question_field, answer_field=config.answer_field, split=config.split
        )
    train_questions, held_out = split_held_out(questions, config.held_out, seed=config.seed)
    if config.out_of_reach:
        train_questions = put_out_of_reach(
            train_questions, config.out_of_reach, seed=config.seed, terms=2 * config.toy_most_terms, largest=config.toy_largest
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
            raise InputError(f"the toy reads only sums such as 3 + 8 + 5, not {q.prompt[:60]!r}; name a --model for other data")
    fitting = {id: ids for id, ids in prompts.items() if len(ids) <= room}
    if len(fitting) < len(prompts):
        print(f"skipped {len(prompts) - len(fitting)} of {len(prompts)} questions: their prompts are longer than {room} tokens")
    if not fitting:
        change = "raise --max-prompt-length" if room == config.max_prompt_length else "lower --max-response-length"
        raise InputError(f"every prompt is longer than {room} tokens; {change}")
    return fitting


def start_policy(config: TrainConfig, device: torch.device, stop: StopRequest, dtype: torch.dtype) -> Policy:
    """The policy that RL starts from, its weights in `dtype`: loaded or built, and warmed up (in fp32) if asked to."""
    policy = warmed_up_policy(config, device, stop, torch.float32 if config.warmup_steps else dtype)
    for parameter in policy.model.parameters():
        parameter.data = parameter.data.to(dtype)  # not model.to, which would also round the tables of RoPE
    return policy


def warmed_up_policy(config: TrainConfig, device: torch.device, stop: StopRequest, dtype: torch.dtype) -> Policy:
    """Load or build the policy and fine-tune it on demonstrations; a toy that was made before comes from its cache.

    Raises InputError without demonstrations for a real model, Interrupted where `stop` is requested meanwhile."""
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
        pairs = toy.demonstrations(
            asked,
            reasoning=config.toy_reasoning,
            seed=config.seed,
            largest=config.toy_largest,
            widest_guess=config.toy_widest_guess,
        )
        skilled = toy.demonstrations(asked, reasoning=1.0, seed=config.seed, largest=config.toy_largest)
    elif config.warmup_data:
        pairs = []
        for where, row in read_jsonl(config.warmup_data):
            if not isinstance(row.get("question"), str) or not isinstance(row.get("response"), str):
                raise InputError(f"{where} needs the text fields 'question' and 'response'")
            pairs.append((row["question"], row["response"]))
        if not pairs:
            raise InputError(f"--warmup-data {config.warmup_data} holds no demonstrations")
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
