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

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nano_exgrpo.questions import InputError

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


# ---------------------------------------------------------------------------- log-probabilities


def response_mask(response_ids: Sequence[Tensor]) -> Tensor:
    """[B, T] bool, true on response tokens. By position, never by token id: pad may equal EOS, and the EOS
    that ends a response is an action like any other, or the policy never learns to stop.

    >>> response_mask([torch.tensor([5, 6, 0]), torch.tensor([0])]).int().tolist()
    [[1, 1, 1], [1, 0, 0]]
    """
    lengths = torch.tensor([len(r) for r in response_ids])  # [B]
    return torch.arange(int(lengths.max()))[None, :] < lengths[:, None]  # [B, T]


def token_logprobs(
    policy: Policy,
    prompt_ids: Sequence[Tensor],
    response_ids: Sequence[Tensor],
    *,
    temperature: float = 1.0,
    with_entropy: bool = True,
    chunk_bytes: int = 256 * 2**20,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """log π_θ of every response token, and the entropy of the distribution that it was drawn from.

    prompt_ids, response_ids: B ragged rows of token ids. temperature: the sampling temperature, because
    π_θ is the distribution that is sampled from. chunk_bytes: most bytes of fp32 logits at a time.
    Returns logprobs [B, T] in nats, entropies [B, T] in nats (None unless asked for), mask [B, T]; all fp32
    (fp64 for an fp64 model), zero outside the mask. Gradients flow through both.
    """
    device = policy.device
    sequences = [torch.cat(pair) for pair in zip(prompt_ids, response_ids, strict=True)]
    ids = pad_sequence(sequences, batch_first=True, padding_value=policy.pad_id)  # [B, S]
    mask = response_mask(response_ids)  # [B, T]

    # Padding stands on the right, where causal attention never looks: positions are simply 0, 1, 2, … and no mask is
    # passed, which lets attention take its fastest path.
    with policy.precision():
        hidden = policy.model.base_model(input_ids=ids.to(device), use_cache=False).last_hidden_state  # [B, S, H]

    # The token at position p is predicted by the hidden state at p − 1.
    rows, steps = mask.nonzero(as_tuple=True)  # [N], [N]: the N real response tokens
    positions = torch.tensor([len(p) for p in prompt_ids])[rows] + steps  # [N]
    targets = ids[rows, positions].to(device)  # [N]
    hidden = hidden[rows.to(device), (positions - 1).to(device)]  # [N, H]

    projection = policy.model.get_output_embeddings()
    chunk = max(1, chunk_bytes // (4 * projection.weight.shape[0]))
    with policy.precision():
        logprob, entropy = ProjectedLogprobs.apply(
            hidden, projection.weight, projection, targets, temperature, chunk, with_entropy
        )  # [N] each

    def unpack(flat: Tensor) -> Tensor:
        return flat.new_zeros(mask.shape).index_put((rows.to(device), steps.to(device)), flat)  # [B, T]

    return unpack(logprob), unpack(entropy) if with_entropy else None, mask.to(device)


class ProjectedLogprobs(torch.autograd.Function):
    """(log p_t [N], entropy H [N]) of targets t [N] under p = softmax(hidden [N, H] @ weight.T / temperature).

    Autograd would keep several [n, V] tensors of a chunk. Here each chunk's log p is the only one, worked into the
    gradient in place, and it is kept for backward only if it is the single chunk (saves a quarter of the
    projection's work); else backward projects again. With g the gradient that comes in,

        d/d logits = [ g_logp · (onehot(t) − p)  −  g_H · p (log p + H) ] / temperature

    The second part is left out where nothing is derived from the entropy. A bias of the projection is not trained.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, projection: torch.nn.Module, targets: Tensor,
        temperature: float, chunk: int, with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        logprobs, entropies = [], []
        for h, t in zip(hidden.split(chunk), targets.split(chunk), strict=True):
            logp = project_logp(projection, h, temperature)  # [n, V]
            logprobs.append(logp.gather(-1, t[:, None]).squeeze(-1))  # [n]
            if with_entropy:
                entropies.append(-(logp.exp().mul_(logp)).sum(-1))  # [n]
        entropy = torch.cat(entropies) if with_entropy else None  # [N]
        ctx.save_for_backward(hidden, weight, targets, entropy, logp if len(logprobs) == 1 else None)
        ctx.projection, ctx.temperature, ctx.chunk = projection, temperature, chunk
        ctx.autocast = (
            torch.get_autocast_dtype(hidden.device.type) if torch.is_autocast_enabled(hidden.device.type) else None
        )
        ctx.set_materialize_grads(False)
        return torch.cat(logprobs), entropy

    @staticmethod
    def backward(ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, entropy, kept = ctx.saved_tensors
        dtype = ctx.autocast or weight.dtype
        matrix = weight.to(dtype)  # [V, H]
        grad_hidden = torch.empty_like(hidden)
        grad_weight = None
        for start in range(0, len(hidden), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            h, n = hidden[part], len(targets[part])
            if kept is None:
                with torch.autocast(hidden.device.type, dtype=ctx.autocast, enabled=ctx.autocast is not None):
                    logp = project_logp(ctx.projection, h, ctx.temperature)  # [n, V]
            else:
                logp = kept
            # By the temperature here, where there are n numbers, and not below, where there are n · V.
            g = (
                hidden.new_zeros(n, dtype=logp.dtype) if grad_logprob is None else grad_logprob[part] / ctx.temperature
            )  # [n]
            if grad_entropy is None:
                grad = (logp.exp() if kept is not None else logp.exp_()).mul_(-g[:, None])  # [n, V]
            else:
                slope = grad_entropy[part][:, None] / ctx.temperature  # [n, 1]
                grad = (logp + entropy[part][:, None]).mul_(slope).add_(g[:, None]).mul_(logp.exp()).neg_()  # [n, V]
            grad[torch.arange(n, device=grad.device), targets[part]] += g
            grad = grad.to(dtype)
            grad_hidden[part] = grad @ matrix
            if ctx.needs_input_grad[1]:
                product = grad.T @ h.to(dtype)  # [V, H]
                grad_weight = product.to(weight.dtype) if grad_weight is None else grad_weight.add_(product)
        return grad_hidden, grad_weight, None, None, None, None, None


def project_logp(projection: torch.nn.Module, hidden: Tensor, temperature: float) -> Tensor:
    """hidden [n, H] → log p [n, V], in fp32 (fp64 for an fp64 model)."""
    logits = projection(hidden)  # [n, V]
    wide = logits.dtype if logits.dtype == torch.float64 else torch.float32
    return (logits if temperature == 1 else logits.to(wide).div_(temperature)).log_softmax(-1, dtype=wide)


def mean_entropies(
    policy: Policy,
    prompt_ids: Sequence[Tensor],
    response_ids: Sequence[Tensor],
    *,
    temperature: float = 1.0,
    token_budget: int = 16_384,
    chunk_bytes: int = 256 * 2**20,
) -> Tensor:
    """[B] mean token entropy of each response under the current policy, in nats, without gradient.

    The mean runs over the response tokens only, EOS included. (The released code's mask is inverted, so it
    averages over the padding.)"""
    means = torch.zeros(len(response_ids))
    with torch.no_grad():
        for batch in token_batches([len(p) + len(r) for p, r in zip(prompt_ids, response_ids)], token_budget):
            _, entropies, mask = token_logprobs(
                policy,
                [prompt_ids[i] for i in batch],
                [response_ids[i] for i in batch],
                temperature=temperature,
                chunk_bytes=chunk_bytes,
            )
            means[batch] = (entropies.sum(-1) / mask.sum(-1)).float().cpu()  # entropies are 0 outside the mask
    return means


def token_batches(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Split rows into batches of like length whose padded size (rows × longest) stays within the budget.

    Returns lists of row indices, longest rows first, so that running out of memory happens at once and not
    after minutes. A row longer than the budget stands alone.

    >>> token_batches([3, 9, 4, 10], token_budget=20)
    [[3, 1], [2, 0]]
    """
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        longest = lengths[batches[-1][0]] if batches else 0
        if batches and (len(batches[-1]) + 1) * longest <= token_budget:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches
