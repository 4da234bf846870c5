#!/usr/bin/env python
"""One GRPO step, here and in TRL's GRPOTrainer: time, its parts, tokens/s and memory.

    pip install "trl==1.16"
    python bench/step.py --shape a                      the toy: 32 questions, K 8, about 9 tokens a response
    python bench/step.py --shape b                      135M weights, vocabulary 49,152: 25 minutes on two cores
    python bench/step.py --shape b --dtype bfloat16     the same with products in bf16, on both sides
    python bench/step.py --shape b --update             our update alone, and where its time goes: 3 minutes
    python bench/step.py --shape b --memory             peak memory, each side in a process of its own

Both sides start from the same weights, ask the same prompts, take the same K and lengths, and make one update a
batch with fused AdamW (TRL: transformers backend, loss_type dr_grpo, beta 0, gradient checkpointing off on both
sides). They take turns within one process, so that a machine whose speed drifts is fair to both; figures are
medians. The reward is made up: half of the groups are solved or failed outright, as in real training, the rest
are mixed. TRL gets the micro-batch of `--trl-batch` rows, this project the token budget of `--tokens`.

The floors: `model.generate` on the same batch with the same settings, and a large matrix product. The update's
FLOP/s count 6 · weights · tokens that the side passes through the model (2 forward, 4 backward; the projection only
for response tokens; neither attention nor anything computed twice), so a side is not paid for recomputing.

What was measured before it was kept (shape b, two cores, fp32 unless said):
    own loop over tokens against `generate`, 64 new tokens: 24.2 -> 16.6 s (bf16: 15.8 -> 12.0); of which the draw by
    inversion instead of torch.multinomial 56 -> 14 ms a token, and the prompt's forward for 8 rows instead of 64
and what was not kept:
    a KV cache with room to grow instead of torch.cat: 4 to 8 % of generation in bf16, within noise in fp32
    transformers' continuous batching: slower than `generate` on the CPU (bench/generate.py)
What an environment can do: on Linux MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=1099511627776 THP_MEM_ALLOC_ENABLE=1
keeps freed memory for the next tensor; without, the system clears the pages of every large one.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
warnings.filterwarnings("ignore")

import torch

from nano_exgrpo import toy
from nano_exgrpo.config import resolve
from nano_exgrpo.infra.precision import make_optimizer
from nano_exgrpo.loss import group_advantages
from nano_exgrpo.policy import Policy, encode_questions, make_policy
from nano_exgrpo.questions import Question
from nano_exgrpo.rollout import rollout, sampling_config
from nano_exgrpo.sampling_loop import pad_left
from nano_exgrpo.trajectory import Trajectory
from nano_exgrpo.update import update_policy
from nano_exgrpo.warmup import encode_demonstrations, warm_up


@dataclass
class Shape:
    """What is trained on: B questions, K responses each, of at most T tokens."""

    policy: Policy
    questions: list[Question]  # the prompt of each is what the policy reads, chat template included
    group_size: int
    response_length: int


@dataclass
class Laps:
    """Seconds of each part of each step, CPU seconds of all threads, and how many tokens it generated and rows it
    trained on."""

    generate: list[float] = field(default_factory=list)
    score: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)

    def median(self, name: str, warm: int) -> float:
        return statistics.median(getattr(self, name)[warm:])

    def tokens_per_second(self, warm: int) -> float:
        return statistics.median(tokens / seconds for tokens, seconds in list(zip(self.tokens, self.generate))[warm:])

    def update_rate(self, shape: Shape, warm: int) -> float:
        """GFLOP/s of the update, each step's by its own rows: now and then all of a mixed group is right, and left
        out."""
        steps = list(zip(self.rows, self.tokens, self.update))[warm:]
        return statistics.median(update_flops(shape, rows, tokens) / seconds for rows, tokens, seconds in steps) / 1e9


# --------------------------------------------------------------------------------------------- shapes


def toy_shape() -> Shape:
    policy = toy.build_policy(seed=0)
    questions = toy.sum_questions(400, seed=0)
    examples = encode_demonstrations(policy, toy.demonstrations(questions, reasoning=0.9, seed=0), "")
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0)
    warm_up(policy, optimizer, examples, steps=300, batch_size=64, seed=0)
    asked = encode_questions(policy, questions[:32], "")
    asked = [replace(q, prompt=policy.tokenizer.decode(q.prompt_ids)) for q in asked]
    return Shape(policy, asked, group_size=8, response_length=16)


def llama_shape(
    vocabulary: int = 49_152,
    hidden: int = 576,
    layers: int = 30,
    questions: int = 8,
    prompt: int = 64,
    response: int = 128,
) -> Shape:
    """SmolLM2-135M's shape with random weights; every "w17" of a prompt is one token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, vocabulary)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=hidden * 8 // 3, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 192, max_position_embeddings=2048,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    policy = make_policy(LlamaForCausalLM(config), tokenizer)
    ids = [torch.randint(2, vocabulary, (prompt,)) for _ in range(questions)]
    asked = [Question(str(n), " ".join(f"w{i}" for i in row.tolist()), "", prompt_ids=row) for n, row in enumerate(ids)]
    return Shape(policy, asked, group_size=8, response_length=response)


SHAPES = {"a": toy_shape, "b": llama_shape, "small": lambda: llama_shape(8_192, 192, 6, prompt=32, response=32)}


def reward_of(group: int, completion: list[int]) -> float:
    """Half of the groups solved or failed outright, the rest mixed by a coin that the response itself tosses."""
    if group % 2 == 0:
        return float(group % 4 == 0)
    return float(sum(completion) % 2)


# ------------------------------------------------------------------------------------------- one step


class Ours:
    """The parts of train.py's step, timed: rollouts, rewards and advantages, update."""

    def __init__(self, shape: Shape, *, tokens: int, dtype: str = "float32", sampler: str = "loop") -> None:
        self.shape, self.laps = shape, Laps()
        autocast = torch.bfloat16 if dtype == "bfloat16" else None
        self.policy = replace(shape.policy, sampler=sampler, autocast=autocast, token_budget=tokens)
        self.config = resolve(dict(
            preset="none", questions_per_step=len(shape.questions), group_size=shape.group_size,
            max_response_length=shape.response_length, train_batch_tokens=tokens,
        ))  # fmt: skip
        self.optimizer = make_optimizer(self.policy.model.parameters(), "adamw", lr=1e-6, weight_decay=0.0)

    def step(self) -> None:
        shape, start, cpu = self.shape, time.perf_counter(), time.process_time()
        groups = rollout(
            self.policy, shape.questions, shape.group_size, max_new_tokens=shape.response_length, batch_size=512
        )
        generated = time.perf_counter()
        for i, group in enumerate(groups):
            for t in group:
                t.reward = reward_of(i, t.response_ids.tolist())
        advantages = group_advantages(torch.tensor([[t.reward for t in group] for group in groups]))
        scored = time.perf_counter()
        update_policy(self.policy, self.optimizer, groups, advantages, self.config, clip_range=0.2)
        end = time.perf_counter()
        self.laps.generate.append(generated - start)
        self.laps.score.append(scored - generated)
        self.laps.update.append(end - scored)
        self.laps.step.append(end - start)
        self.laps.cpu.append(time.process_time() - cpu)
        self.laps.tokens.append(sum(len(t.response_ids) for group in groups for t in group))
        self.laps.rows.append(int((advantages != 0).sum()))


def run_trl(shape: Shape, args: argparse.Namespace, steps: int, after_step: Any, folder: str) -> Laps:
    """TRL's trainer for `steps` steps; `after_step` is called, outside the clock, when each is done."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    laps, rows = Laps(), len(shape.questions) * shape.group_size
    settings = GRPOConfig(
        output_dir=folder, per_device_train_batch_size=args.trl_batch, gradient_accumulation_steps=rows // args.trl_batch,
        num_generations=shape.group_size, max_completion_length=shape.response_length, max_steps=steps, learning_rate=1e-6,
        lr_scheduler_type="constant", loss_type="dr_grpo", beta=0.0, temperature=1.0, scale_rewards="none",
        bf16=args.dtype == "bfloat16", gradient_checkpointing=False, use_cpu=True, report_to="none", save_strategy="no", logging_strategy="no",
        disable_tqdm=True, shuffle_dataset=False, max_grad_norm=1.0, weight_decay=0.0, dataloader_pin_memory=False,
    )  # fmt: skip

    def reward(completion_ids: list[list[int]], group: list[int], **_: Any) -> list[float]:
        return [reward_of(g, ids) for g, ids in zip(group, completion_ids)]

    class Timed(GRPOTrainer):
        def _generate(self, *a: Any, **k: Any) -> Any:
            start = time.perf_counter()
            out = super()._generate(*a, **k)
            laps.generate.append(time.perf_counter() - start)
            return out

        def _generate_and_score_completions(self, *a: Any, **k: Any) -> Any:
            start = time.perf_counter()
            out = super()._generate_and_score_completions(*a, **k)
            laps.score.append(time.perf_counter() - start - laps.generate[-1])
            laps.tokens.append(int(out["completion_mask"].sum()))
            laps.rows.append(len(out["completion_mask"]))
            return out

    class Clock(TrainerCallback):
        def on_step_begin(self, *a: Any, **k: Any) -> None:
            if not laps.step:
                self.started, self.cpu = time.perf_counter(), time.process_time()

        def on_step_end(self, *a: Any, **k: Any) -> None:
            laps.step.append(time.perf_counter() - self.started)
            laps.update.append(laps.step[-1] - laps.generate[-1] - laps.score[-1])
            laps.cpu.append(time.process_time() - self.cpu)
            after_step(laps)
            self.started, self.cpu = time.perf_counter(), time.process_time()

    data = Dataset.from_list([{"prompt": question.prompt, "group": g} for g, question in enumerate(shape.questions)])
    trainer = Timed(
        model=shape.policy.model, reward_funcs=reward, args=settings, train_dataset=data,
        processing_class=shape.policy.tokenizer, callbacks=[Clock()],
    )  # fmt: skip
    trainer.train()
    return laps


# --------------------------------------------------------------------------------------------- floors


def bare_generate(shape: Shape) -> float:
    """Tokens/s of `model.generate` on the whole batch, every filter off."""
    policy = shape.policy
    prompts = [question.prompt_ids for question in shape.questions for _ in range(shape.group_size)]
    ids, attention = pad_left(prompts, policy)  # [B·K, P] each
    start = time.perf_counter()
    with torch.no_grad(), policy.precision():
        settings = sampling_config(policy, 1.0, shape.response_length)
        out = policy.model.generate(input_ids=ids, attention_mask=attention, generation_config=settings)
    return (out[:, ids.shape[1] :] != policy.pad_id).sum().item() / (time.perf_counter() - start)


def matmul_peak(dtype: torch.dtype) -> float:
    """GFLOP/s of a product of two 2048 x 2048 matrices, best of ten."""
    a, best = torch.randn(2048, 2048, dtype=dtype), math.inf
    for _ in range(10):
        start = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - start)
    return 2 * 2048**3 / best / 1e9


def product_rates(shape: Shape, tokens: int) -> tuple[float, float]:
    """GFLOP/s of the widest product of a layer on so many tokens: the first layer's over and over, with operands that
    the cache still holds; and every layer's in turn, each with its own operands, as in training."""
    config = shape.policy.model.config
    weights = [w for w in shape.policy.model.parameters() if w.shape == (config.intermediate_size, config.hidden_size)]
    inputs = [torch.randn(tokens, w.shape[1]) for w in weights]
    outputs = [torch.empty(tokens, w.shape[0]) for w in weights]
    rates: dict[str, list[float]] = {"cached": [], "cold": []}
    with torch.no_grad():
        for _ in range(5):
            for name, own in rates.items():
                start = time.perf_counter()
                for i in range(len(weights)):
                    at = i if name == "cold" else 0
                    torch.mm(inputs[at], weights[at].T, out=outputs[at])
                own.append(2 * tokens * weights[0].numel() * len(weights) / (time.perf_counter() - start) / 1e9)
    return statistics.median(rates["cached"]), statistics.median(rates["cold"])


def update_flops(shape: Shape, rows: int, tokens: int, *, all_tokens: bool = False) -> float:
    """Floating-point operations of an update on so many rows, with `tokens` response tokens in all rows: those that are
    needed, or 6 · weights · all tokens, the usual count, which has the projection of prompt tokens too."""
    model = shape.policy.model
    head = model.get_output_embeddings().weight.numel()
    body = sum(p.numel() for p in model.parameters()) - model.get_input_embeddings().weight.numel()
    body -= 0 if model.config.tie_word_embeddings else head
    share = rows / (len(shape.questions) * shape.group_size)
    prompt_tokens = sum(len(question.prompt_ids) for question in shape.questions) * shape.group_size
    return 6 * share * (body * (prompt_tokens + tokens) + head * (tokens + prompt_tokens * all_tokens))


# --------------------------------------------------------------------------------------------- memory


def peak_bytes(name: str = "VmHWM") -> int:
    """Peak resident memory of this process (not ru_maxrss, which a child inherits from its parent)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024


def measure_memory(args: argparse.Namespace) -> dict[str, Any]:
    """Each side in a fresh process: `--steps` steps; peak, and what it is above the process with the weights loaded."""
    found = {}
    for side in ("ours", "trl"):
        command = [sys.executable, __file__, "--side", side]
        for name in ("shape", "dtype", "tokens", "trl_batch", "sampler", "threads", "steps"):
            command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found[side] = json.loads(output.splitlines()[-1])
    return found


def one_side(args: argparse.Namespace) -> None:
    shape = SHAPES[args.shape]()
    if args.side == "trl":
        import datasets  # noqa: E401, F401 - before the baseline is taken
    before = peak_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far (importing, warming up the toy) does not count
    if args.side == "trl":
        with tempfile.TemporaryDirectory() as folder:
            run_trl(shape, args, args.steps, lambda laps: None, folder)
    else:
        ours = Ours(shape, tokens=args.tokens, dtype=args.dtype, sampler=args.sampler)
        for _ in range(args.steps):
            ours.step()
    print(json.dumps({"before": before, "peak": peak_bytes()}))


# --------------------------------------------------------------------------------------------- update


def measure_update(shape: Shape, args: argparse.Namespace) -> None:
    """Our update of two mixed groups with made-up responses of full length, in turns with a matrix product, so that
    it is compared with what the machine could do at that moment. Last, where the time of an update goes."""
    ours = Ours(shape, tokens=args.tokens, dtype=args.dtype, sampler=args.sampler)
    rng, vocabulary = torch.Generator().manual_seed(0), shape.policy.model.config.vocab_size
    advantages = torch.tensor([[0.5, -0.5] * (shape.group_size // 2)] * 2)  # [2, K]
    tokens = 2 * shape.group_size * shape.response_length
    flops = update_flops(shape, 2 * shape.group_size, tokens * len(shape.questions) // 2)

    def update() -> float:
        def group(question: Question) -> list[Trajectory]:
            responses = torch.randint(2, vocabulary, (shape.group_size, shape.response_length), generator=rng)  # [K, T]
            return [Trajectory(question, response, "", truncated=True) for response in responses]

        groups = [group(question) for question in shape.questions[:2]]
        start = time.perf_counter()
        update_policy(ours.policy, ours.optimizer, groups, advantages, ours.config, clip_range=0.2)
        return time.perf_counter() - start

    shares: list[float] = []
    for turn in range(args.warm + args.steps):
        peak = matmul_peak(torch.bfloat16 if args.dtype == "bfloat16" else torch.float32)
        system = resource.getrusage(resource.RUSAGE_SELF).ru_stime
        seconds = update()
        system = resource.getrusage(resource.RUSAGE_SELF).ru_stime - system
        shares.append(flops / seconds / 1e9 / peak)
        print(
            f"turn {turn} {seconds:6.2f} s (CPU in the system {system:.1f} s), {shares[-1]:.2f} of a matmul's "
            f"{peak:.0f} GFLOP/s",
            flush=True,
        )
    print(f"update against matmul: {statistics.median(shares[args.warm :]):.2f}")
    with torch.profiler.profile() as profile:
        update()
    cached, cold = product_rates(shape, ours.config.train_batch_tokens)
    print(
        f"a layer's widest product alone: {cached:.0f} GFLOP/s with its operands in the cache, {cold:.0f} with those of all layers in turn"
    )
    found = sorted(profile.key_averages(), key=lambda event: -event.self_cpu_time_total)
    whole = sum(event.self_cpu_time_total for event in found)
    print(
        "of one more, profiled: "
        + ", ".join(f"{e.key.removeprefix('aten::')[:40]} {e.self_cpu_time_total / whole:.0%}" for e in found[:12])
    )


# ------------------------------------------------------------------------------------------------ main


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="small")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--steps", type=int, default=5, help="steps of each side that count")
    parser.add_argument("--warm", type=int, default=1, help="steps before that, which do not")
    parser.add_argument("--tokens", type=int, default=0, help="our train_batch_tokens; 0: 8192 for the toy, else 1024")
    parser.add_argument(
        "--trl-batch", type=int, default=0, help="TRL's rows in a micro-batch; 0: 256 for the toy, else 8"
    )
    parser.add_argument(
        "--sampler", choices=("loop", "generate"), default="loop", help="our rollouts: --sampler of train.py"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--update", action="store_true", help="measure our update alone")
    parser.add_argument("--memory", action="store_true", help="measure memory instead of time")
    parser.add_argument("--side", choices=("ours", "trl"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.tokens = args.tokens or (8192 if args.shape == "a" else 1024)
    args.trl_batch = args.trl_batch or (256 if args.shape == "a" else 8)
    torch.set_num_threads(args.threads)
    if args.side:
        one_side(args)
        return 0
    if args.memory:
        found = measure_memory(args)
        above = {side: (m["peak"] - m["before"]) / 1e6 for side, m in found.items()}
        for side, m in found.items():
            print(f"{side:5} peak {m['peak'] / 1e6:6.0f} MB, of which above the loaded weights {above[side]:6.0f} MB")
        print(f"ratio {above['ours'] / above['trl']:.2f}")
        return 0

    shape = SHAPES[args.shape]()
    if args.update:
        measure_update(shape, args)
        return 0
    policy = make_policy(copy.deepcopy(shape.policy.model), shape.policy.tokenizer)
    theirs = replace(shape, policy=policy)
    ours = Ours(shape, tokens=args.tokens, dtype=args.dtype, sampler=args.sampler)
    floors, peaks = [], []

    def take_turns(trl_laps: Laps) -> None:
        ours.step()
        floors.append(bare_generate(shape))
        peaks.append(matmul_peak(torch.bfloat16 if args.dtype == "bfloat16" else torch.float32))
        turn = (
            f"TRL {trl_laps.step[-1]:.3f} s, ours {ours.laps.step[-1]:.3f} s, bare generate {floors[-1]:.0f} tokens/s"
        )
        print(turn, file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        trl_laps = run_trl(theirs, args, args.warm + args.steps, take_turns, folder)
    floor = statistics.median(floors[args.warm :])
    peak = statistics.median(peaks[args.warm :])
    print(
        f"shape {args.shape}, {args.dtype}, torch {torch.__version__}, {args.threads} threads; medians of {args.steps} steps\n"
    )
    print("            step     generate   score    update   CPU        generated   update")
    for name, laps in (("ours", ours.laps), ("TRL", trl_laps)):
        parts = {part: laps.median(part, args.warm) for part in ("step", "generate", "score", "update", "cpu")}
        print(
            f"{name:8}{parts['step']:8.3f} s {parts['generate']:8.3f} s {parts['score']:7.3f} s {parts['update']:7.3f} s {parts['cpu']:8.3f} s "
            f"{laps.tokens_per_second(args.warm):7.0f} tok/s {laps.update_rate(shape, args.warm):5.0f} GFLOP/s on "
            f"{laps.median('rows', args.warm):.0f} rows"
        )
        print("        every step:", " ".join(f"{s:.3f}" for s in laps.step))
    ratio = ours.laps.median("step", args.warm) / trl_laps.median("step", args.warm)
    ours_rate = ours.laps.update_rate(shape, args.warm)
    generated = ours.laps.tokens_per_second(args.warm)
    cpu = ours.laps.median("cpu", args.warm) / trl_laps.median("cpu", args.warm)
    print(
        f"\nstep time against TRL   {ratio:.2f}   (CPU time, which other work on the machine disturbs less: {cpu:.2f})"
    )
    print(f"generate against bare   {generated / floor:.2f}   (bare model.generate {floor:.0f} tokens/s)")
    tokens = ours.laps.tokens[-1]
    usual = update_flops(shape, 1, tokens, all_tokens=True) / update_flops(shape, 1, tokens)
    print(
        f"update against matmul   {ours_rate / peak:.2f}   (matmul {peak:.0f} GFLOP/s; counted as 6 · weights · tokens: {usual * ours_rate / peak:.2f})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
