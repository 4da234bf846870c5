"""Loading: the one place where a model, its tokenizer or its configuration is read, and tried before it is trusted.

A folder or the hub may hold anything. Its code never runs, weights come as safetensors only, and all of them must be
there. What loads is asked a few tokens: the method is exact for it, or one sentence says why it is refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nano_exgrpo.errors import InputError
from nano_exgrpo.policy import Policy, make_policy
from nano_exgrpo.sampling_loop import decode


class Backbone(NamedTuple):
    """One of the paper's models: where it is, and the shape that its configuration gives it."""

    hub_id: str
    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool

    def shape(self) -> dict[str, Any]:
        """Settings of a transformers configuration."""
        return {name: value for name, value in self._asdict().items() if name != "hub_id"}


BACKBONES = {  # short names
    "Qwen2.5-Math-1.5B": Backbone("Qwen/Qwen2.5-Math-1.5B", "qwen2", 1536, 8960, 28, 12, 2, 151936, 4096, True),
    "Qwen2.5-Math-7B": Backbone("Qwen/Qwen2.5-Math-7B", "qwen2", 3584, 18944, 28, 28, 4, 152064, 4096, False),
    "Qwen2.5-7B-Instruct": Backbone("Qwen/Qwen2.5-7B-Instruct", "qwen2", 3584, 18944, 28, 28, 4, 152064, 32768, False),
    "Llama-3.1-8B": Backbone("meta-llama/Llama-3.1-8B", "llama", 4096, 14336, 32, 32, 8, 128256, 131072, False),
    "Llama-3.1-8B-Instruct": Backbone(
        "meta-llama/Llama-3.1-8B-Instruct", "llama", 4096, 14336, 32, 32, 8, 128256, 131072, False
    ),
}


def resolve_device(name: str) -> torch.device:
    """ "auto" is CUDA, then MPS, then CPU. Raises InputError for another kind, or one that this machine lacks."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda", "mps"):
            raise NotImplementedError
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise InputError(f"device {name} is not available here; use --device auto or cpu") from None
    return device


def resolve_model_name(name: str) -> str:
    """A folder stays a folder; a short name of the paper's backbones becomes its hub id; a hub id stays.

    >>> resolve_model_name("Qwen2.5-Math-1.5B")
    'Qwen/Qwen2.5-Math-1.5B'
    """
    if name and os.path.isdir(name):  # unlike Path.is_dir, it takes a name of any length
        return name
    if name in BACKBONES:
        return BACKBONES[name].hub_id
    organisation, slash, model = name.partition("/")
    if slash and organisation and model and "/" not in model and not name.startswith((".", "~")):
        return name
    raise InputError(
        f"model {name[:200]} is neither a folder nor a hub id of the form organisation/name; "
        f"short names: toy, {', '.join(BACKBONES)}"
    )


@contextmanager
def without_bars() -> Iterator[None]:
    """Reading and writing weights without transformers' progress bars, which would stand between our own."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def read(kind: Any, name: str, **options: Any) -> Any:
    """What `kind.from_pretrained` makes of a model folder or hub id. Raises InputError where it cannot."""
    source = resolve_model_name(name)
    local = Path(source).is_dir()
    if local and not (Path(source) / "config.json").is_file():
        raise InputError(f"model folder {source} has no config.json; give a folder written by save_pretrained")
    if local and (Path(source) / "adapter_config.json").is_file():
        raise InputError(f"model folder {source} holds adapters alone; merge them into their model first")
    try:
        with without_bars() if local else nullcontext():  # a download may show how far it is
            return kind.from_pretrained(source, trust_remote_code=False, **options)
    except Exception as error:  # hub, network, configuration and weight errors: dozens of kinds, one remedy
        reason = str(error).strip().split("\n")[0][:200] or type(error).__name__
        if "trust_remote_code" in str(error):
            reason = "it needs program code of its own, and such code is never run here"
        place = "from that folder" if local else "from the hub (check the name, the network, and its licence terms)"
        raise InputError(f"model {source} could not be loaded {place}: {reason}") from None


def read_config(name: str) -> Any:
    """The configuration of a model folder or hub id."""
    from transformers import AutoConfig

    return read(AutoConfig, name)


def load_policy(name: str, *, device: torch.device, dtype: torch.dtype = torch.float32, **settings: Any) -> Policy:
    """Load model and tokenizer from a folder or the hub. settings: fields of `Policy`, such as temperature.

    Raises InputError: unknown name, hub unreachable, no tokenizer, weights missing, a model that is not exact here."""
    from transformers import AutoModelForCausalLM

    config = read_config(name)
    if getattr(config, "quantization_config", None):
        raise InputError(f"model {name} is quantised and cannot be trained; take the one that it was made from")
    tokenizer = read_tokenizer(name)
    model, found = read(AutoModelForCausalLM, name, dtype=dtype, use_safetensors=True, output_loading_info=True)
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):  # tied and ignored ones are not among them
        if keys := sorted(map(str, found[problem])):
            raise InputError(
                f"the weights of model {name} do not fit its config.json: {len(keys)} {problem.replace('_', ' ')}, "
                f"{keys[0]} for one"
            )
    policy = make_policy(model.to(device), tokenizer, **settings)
    require_exact(policy)
    if policy.sampler == "loop":
        decode(policy, [torch.tensor([0, 1])], top_p=1.0, max_new_tokens=1)  # which refuses some models
    return policy


def read_tokenizer(name: str) -> Any:
    """Raises InputError also for one that would load empty, because its vocabulary is not there."""
    from transformers import AutoTokenizer

    folder = Path(resolve_model_name(name))
    vocabularies = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken")
    if folder.is_dir() and not any(file for pattern in vocabularies for file in folder.glob(pattern)):
        raise InputError(f"model folder {name} has no tokenizer.json; save it there with tokenizer.save_pretrained")
    tokenizer = read(AutoTokenizer, name)
    if not tokenizer("a 1 + 2", add_special_tokens=False)["input_ids"]:
        raise InputError(f"the tokenizer of model {name} is empty: it makes no token of a text")
    return tokenizer


# --------------------------------------------------------------------------------------- exact or refused


# What a few tokens cannot show.
KNOWN_PROBLEMS = {"moshi": "generates other tokens past its sliding window where a prompt is padded"}


def require_exact(policy: Policy) -> None:
    """Raises InputError, naming the model's type, where `score` or the samplers would be wrong about it.

    The rules hold whatever the type. Nothing follows the projection. A token's state depends on no later token and on
    no other row of a batch. A prompt padded on the left goes on as if alone."""
    kind = policy.model.config.model_type
    try:
        with torch.no_grad(), policy.precision():
            problem = KNOWN_PROBLEMS.get(kind) or what_is_inexact(policy)
    except Exception as error:  # each model fails in its own way at what it was not made for
        problem = f"cannot be asked for a few tokens ({(str(error) or type(error).__name__).splitlines()[0][:120]})"
    if problem:
        raise InputError(f"model type {kind} is not supported: it {problem}")


def what_is_inexact(policy: Policy) -> str:
    from transformers import GenerationConfig

    model, project = policy.model, policy.model.get_output_embeddings()
    size = project.weight.shape[0]
    ids = (torch.arange(12, device=policy.device) + size // 3) % size  # [12]: ordinary tokens
    narrow = policy.autocast or project.weight.dtype
    tolerance = 5e-2 if narrow in (torch.bfloat16, torch.float16) else 5e-3

    def near(found: Tensor, expected: Tensor) -> bool:
        return bool((found - expected).abs().max() <= tolerance * expected.abs().max())

    def states(rows: Tensor) -> Tensor:  # [B, S] → [B, S, H]
        return model.base_model(input_ids=rows, use_cache=False).last_hidden_state

    # 1. The model's own logits, with logits of ±1000 put in the projection's place: caps and factors show at once.
    seen = []

    def replaced(module: Any, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
        seen.append(arguments[0])
        return torch.linspace(-1000, 1000, output.numel(), device=output.device).view_as(output).to(output.dtype)

    hook = project.register_forward_hook(replaced)
    try:
        logits = model(input_ids=ids[None], use_cache=False).logits  # [1, 12, V]
    finally:
        hook.remove()
    if not near(logits, torch.linspace(-1000, 1000, logits.numel(), device=logits.device).view_as(logits)):
        return "scales or caps its logits after the projection"
    hidden = states(ids[None])  # [1, 12, H]
    if not hidden.isfinite().all():
        return "computes numbers that are not finite: its weights are damaged"
    if len(seen) != 1 or seen[0].shape != hidden.shape or not near(seen[0], hidden):
        return "has layers between its last hidden state and the projection"

    # 2. The first five tokens alone, and with others after and beside them.
    beside = torch.stack([torch.cat([ids[:5], ids[:7].flip(0)]), ids.flip(0)])  # [2, 12]
    if not near(states(ids[None, :5])[0], states(beside)[0, :5]):
        return "lets a token's probability depend on later tokens, or on other rows of a batch"

    # 3. Two tokens generated after a prompt of three that is padded to six.
    padded = torch.stack([ids[:6], ids[6:]])  # [2, 6]
    attention = torch.ones_like(padded)
    padded[0, :3], attention[0, :3] = policy.pad_id, 0
    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        out = model.generate(
            input_ids=padded,
            attention_mask=attention,
            generation_config=GenerationConfig(
                max_new_tokens=2, do_sample=False, output_logits=True, return_dict_in_generate=True, pad_token_id=0
            ),
        )
    finally:
        model.generation_config = own
    expected = project(states(out.sequences[:1, 3:-1]))[0, 2:]  # [2, V]
    if not near(torch.stack(out.logits)[:, 0].to(expected), expected):
        return "generates other tokens where a prompt is padded beside a longer one"
    return ""
