r"""The policy π_θ: a causal language model, its prompts, and the log-probabilities that the loss needs.

Policy-gradient methods ask two things of a language model: samples (see `rollout.py`) and, for a given
response o to a prompt q, the log-probability of each of its tokens,

    log π_θ(o_t | q, o_<t)  =  log_softmax(logits_t / temperature)[o_t].

The second is where small GPUs run out of memory: Qwen2.5 has V = 151,936 tokens, so the logits of every
1,024 tokens fill 0.62 GB in fp32, several times over once softmax and gradients exist. `token_logprobs`
never holds them: it takes the last hidden states, projects a few tokens at a time, and lets the backward
pass project them again. What fits one chunk is kept and not projected twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nano_exgrpo.errors import InputError

# The paper's five backbones under their short names.
HUB_IDS = {
    "Qwen2.5-Math-1.5B": "Qwen/Qwen2.5-Math-1.5B",
    "Qwen2.5-Math-7B": "Qwen/Qwen2.5-Math-7B",
    "Qwen2.5-7B-Instruct": "Qwen/Qwen2.5-7B-Instruct",
    "Llama-3.1-8B": "meta-llama/Llama-3.1-8B",
    "Llama-3.1-8B-Instruct": "meta-llama/Llama-3.1-8B-Instruct",
}

PLAIN_TEMPLATE = "{system}\n\nQuestion: {prompt}\nAnswer:"  # for tokenizers without a chat template


@dataclass
class Policy:
    """A model with what it takes to talk to it.

    model: a HF causal LM, or any module with its interface (see `token_logprobs`).
    tokenizer: the model's tokenizer.
    stop_ids: token ids that end a response. pad_id: fills ragged batches; never read, only masked.
    context: most tokens, prompt and response together, that the model can attend to.
    autocast: dtype of matrix products where the weights are kept in fp32; None computes in the weights' own.
    sampler: how it generates, "generate" (HF's) or "loop" (`decode.py`): the same distribution, another speed.
    compiled: whether the layers are compiled for training (`compile_layers`).
    """

    model: Any
    tokenizer: Any
    stop_ids: tuple[int, ...]
    pad_id: int
    context: int
    autocast: torch.dtype | None = None
    sampler: str = "generate"
    compiled: bool = False

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def precision(self) -> AbstractContextManager[Any]:
        """The context of every forward pass, in rollouts and in training alike: π_θ is what it computes."""
        return torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None)


# ------------------------------------------------------------------------------------- loading


def resolve_device(name: str) -> torch.device:
    """ "auto" is CUDA, then MPS, then CPU. Raises InputError for a device this machine lacks."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise InputError(f"device {name} is not available here; use --device auto or cpu") from None
    return device


def resolve_model_name(name: str) -> str:
    """A folder stays a folder; a short name of the paper's backbones becomes its hub id; a hub id stays.

    >>> resolve_model_name("Qwen2.5-Math-1.5B")
    'Qwen/Qwen2.5-Math-1.5B'
    """
    if name and Path(name).is_dir():
        return name
    if name in HUB_IDS:
        return HUB_IDS[name]
    organisation, slash, model = name.partition("/")
    if slash and organisation and model and "/" not in model and not name.startswith((".", "~")):
        return name
    raise InputError(
        f"model {name} is neither a folder nor a hub id of the form organisation/name; "
        f"short names: toy, {', '.join(HUB_IDS)}"
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


def load_policy(name: str, *, device: torch.device, dtype: torch.dtype = torch.float32) -> Policy:
    """Load model and tokenizer from a folder or the hub.

    Raises InputError: unknown name, hub unreachable, folder without model or tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = resolve_model_name(name)
    local = Path(source).is_dir()
    if local and not (Path(source) / "config.json").is_file():
        raise InputError(f"model folder {source} has no config.json; give a folder written by save_pretrained")
    if local and not any(
        (Path(source) / f).is_file() for f in ("tokenizer.json", "tokenizer_config.json", "vocab.json")
    ):
        raise InputError(f"model folder {source} has no tokenizer; save it there with tokenizer.save_pretrained")
    try:
        with without_bars() if local else nullcontext():  # a download may show how far it is
            tokenizer = AutoTokenizer.from_pretrained(source)
            model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, use_safetensors=True)
    except Exception as error:  # hub, network, configuration and weight errors: dozens of kinds, one remedy
        reason = str(error).strip().split("\n")[0][:200] or type(error).__name__
        place = "from that folder" if local else "from the hub (check the name, the network, and its licence terms)"
        raise InputError(f"model {source} could not be loaded {place}: {reason}") from None
    return make_policy(model.to(device), tokenizer)


def make_policy(model: Any, tokenizer: Any) -> Policy:
    """Wrap a loaded model. Raises InputError if its logits are more than a projection of its hidden states."""
    model.eval()  # dropout would make π_θ a different policy at every call
    stop_ids = find_stop_ids(model, tokenizer)
    if not stop_ids:
        raise InputError(
            "neither tokenizer nor generation_config names an end-of-sequence token; set tokenizer.eos_token"
        )
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else stop_ids[0]
    policy = Policy(model, tokenizer, stop_ids, pad_id, context_of(model.config))
    _check_projection(policy)
    return policy


def context_of(config: Any) -> int:
    """Most tokens that a model with this configuration can attend to; 2**20 where it does not say."""
    return getattr(config, "max_position_embeddings", None) or 2**20


def enable_gradient_checkpointing(model: Any) -> None:
    """Keep no activations inside the layers: backward recomputes them. Raises InputError where a model cannot.

    transformers does so only for layers in training mode, which the policy is never in because of dropout. So
    just the layers themselves are put in that mode, not the modules in them that drop out."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable  # old name
    enable({"use_reentrant": False})
    for layer in transformer_layers(model, "--gradient-checkpointing"):
        layer.training = True


def compile_layers(policy: Policy) -> None:
    """torch.compile each layer: between matrix products, a layer's elementwise work becomes one kernel in place of ten.
    The first updates take a minute more; tokens are generated uncompiled. Raises InputError where a model cannot."""
    for layer in transformer_layers(policy.model, "--compile"):
        layer.compile(dynamic=True)
    policy.compiled = True


def transformer_layers(model: Any, option: str) -> list[Any]:
    """The model's layers. Raises InputError, naming the option that wants them, where transformers does not tell."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise InputError(f"model type {model.config.model_type} cannot do {option}; leave it out")
    return layers


def find_stop_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Token ids that end a response: the union of what generation_config, tokenizer and chat template name.

    They differ in practice: base Qwen2.5-Math stops at <|endoftext|> by its tokenizer, while its chat
    template ends a turn with <|im_end|>. Missing one, a policy that wants to stop talks on to the limit.
    """
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = set(named if isinstance(named, (list, tuple)) else [named]) | {tokenizer.eos_token_id}
    ids.add(end_of_turn(tokenizer))
    return tuple(sorted(id for id in ids if id is not None))


def end_of_turn(tokenizer: Any) -> int | None:
    """The token that closes an assistant's turn: what the chat template writes after its words, else EOS."""
    if getattr(tokenizer, "chat_template", None):
        words = "nano exgrpo"
        turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": words}]
        text = tokenizer.apply_chat_template(turn, tokenize=False)
        after = tokenizer(text[text.rfind(words) + len(words) :].lstrip(), add_special_tokens=False)["input_ids"]
        if after and after[0] in tokenizer.added_tokens_decoder:
            return after[0]
    return tokenizer.eos_token_id


def _check_projection(policy: Policy) -> None:
    """`token_logprobs` assumes logits = output_embeddings(hidden). Some architectures scale or cap them
    afterwards (Gemma 2, Cohere, Granite); training those with wrong log-probabilities would fail silently."""
    model = policy.model
    size = model.get_output_embeddings().weight.shape[0]
    ids = torch.arange(0, size, max(1, size // 8), device=policy.device)[None, :8]  # [1, 8]; some rows may be all zero
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits.float()
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        found = model.get_output_embeddings()(hidden).float()
    if not torch.allclose(expected, found, rtol=1e-2, atol=1e-2 * expected.abs().max().item() + 1e-6):
        kind = getattr(model.config, "model_type", type(model).__name__)
        raise InputError(f"model type {kind} changes its logits after the projection, which is not supported here")


# ------------------------------------------------------------------------------------- prompts


def encode_prompt(policy: Policy, prompt: str, system_prompt: str) -> Tensor:
    """Prompt ids [P] on the CPU, through the tokenizer's chat template where it has one.

    An empty system prompt leaves the system message out. The template writes its own special tokens, so
    nothing is added a second time (at most one BOS)."""
    tokenizer = policy.tokenizer
    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
        messages.append({"role": "user", "content": prompt})
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # jinja2.TemplateError: some templates (Gemma's) refuse system messages
            if not system_prompt:
                raise InputError(f"the tokenizer's chat template failed: {error}") from None
            merged = [{"role": "user", "content": f"{system_prompt}\n\n{prompt}"}]
            text = tokenizer.apply_chat_template(merged, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        text = PLAIN_TEMPLATE.format(system=system_prompt, prompt=prompt).strip()
        ids = tokenizer(text)["input_ids"]
        if ids and ids[-1] in policy.stop_ids:
            ids = ids[:-1]  # some tokenizers close every text with EOS, which would end the response unsaid
    return torch.tensor(ids, dtype=torch.long)
