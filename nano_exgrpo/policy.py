r"""The policy π_θ: a causal language model at a temperature, its prompts, and the scores that the method needs.

Policy-gradient methods ask two things of a language model. One is samples (`rollout.py`). The other is, for a given
response o to a prompt q, the log-probability of each of its tokens:

    log π_θ(o_t | q, o_<t)  =  log_softmax(logits_t / temperature)[o_t]

The temperature is a part of π_θ: the distribution that is trained must be the one that was sampled from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nano_exgrpo.errors import InputError
from nano_exgrpo.logprobs import CHUNK_BYTES, ProjectedLogprobs, response_mask, token_batches
from nano_exgrpo.questions import Question
from nano_exgrpo.trajectory import Trajectory

# The paper's five backbones under their short names.
HUB_IDS = {
    "Qwen2.5-Math-1.5B": "Qwen/Qwen2.5-Math-1.5B",
    "Qwen2.5-Math-7B": "Qwen/Qwen2.5-Math-7B",
    "Qwen2.5-7B-Instruct": "Qwen/Qwen2.5-7B-Instruct",
    "Llama-3.1-8B": "meta-llama/Llama-3.1-8B",
    "Llama-3.1-8B-Instruct": "meta-llama/Llama-3.1-8B-Instruct",
}

PLAIN_TEMPLATE = "{system}\n\nQuestion: {prompt}\nAnswer:"  # for tokenizers without a chat template


class Scores(NamedTuple):
    """Of B trajectories, the longest of T tokens: log π_θ [B, T] in nats, entropies [B, T] in nats (None unless asked for),
    mask [B, T], true on response tokens. fp32 (fp64 for an fp64 model), zero outside the mask."""

    logprobs: Tensor
    entropies: Tensor | None
    mask: Tensor


@dataclass(frozen=True)
class Policy:
    """A model with what it takes to talk to it.

    model: a HF causal LM, or any module with its interface. tokenizer: the model's tokenizer.
    stop_ids: token ids that end a response. pad_id: fills ragged batches; never read, only masked.
    context: most tokens, prompt and response together, that the model can attend to.
    temperature: of π_θ; 0 samples greedily and cannot be scored.
    autocast: dtype of matrix products where the weights are kept in fp32; None computes in the weights' own.
    sampler: how it generates, "generate" (HF's) or "loop" (`sampling_loop.py`): the same distribution, another speed.
    token_budget: tokens, padding included, in one forward and backward. chunk_bytes: see `logprobs.py`.
    """

    model: Any
    tokenizer: Any
    stop_ids: tuple[int, ...]
    pad_id: int
    context: int
    temperature: float = 1.0
    autocast: torch.dtype | None = None
    sampler: str = "generate"
    token_budget: int = 16_384
    chunk_bytes: int = CHUNK_BYTES

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def at(self, temperature: float) -> Policy:
        """The same weights at another temperature."""
        return replace(self, temperature=temperature)

    def precision(self) -> AbstractContextManager[Any]:
        """The context of every forward pass, in rollouts and in training alike: π_θ is what it computes."""
        return torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None)

    def batches(self, trajectories: Sequence[Trajectory]) -> list[list[int]]:
        """Indices of trajectories of like length that fit one forward pass; see `token_batches`."""
        return token_batches([t.length for t in trajectories], self.token_budget)

    def score(self, trajectories: Sequence[Trajectory], *, with_entropy: bool = True) -> Scores:
        """log π_θ of every response token, and the entropy of the distribution that it was drawn from.

        Gradients flow through both. All trajectories are one batch: `batches` cuts them."""
        device = self.device
        sequences = [torch.cat([t.prompt_ids, t.response_ids]) for t in trajectories]
        ids = pad_sequence(sequences, batch_first=True, padding_value=self.pad_id)  # [B, S]
        mask = response_mask([t.response_ids for t in trajectories])  # [B, T]

        # Padding stands on the right, where causal attention never looks. So positions are 0, 1, 2, … and no mask is
        # passed, which lets attention take its fastest path.
        with self.precision():
            hidden = self.model.base_model(input_ids=ids.to(device), use_cache=False).last_hidden_state  # [B, S, H]

        # The token at position p is predicted by the hidden state at p − 1.
        rows, steps = mask.nonzero(as_tuple=True)  # [N], [N]: the N real response tokens
        positions = torch.tensor([len(t.prompt_ids) for t in trajectories])[rows] + steps  # [N]
        targets = ids[rows, positions].to(device)  # [N]
        hidden = hidden[rows.to(device), (positions - 1).to(device)]  # [N, H]

        projection = self.model.get_output_embeddings()
        chunk = max(1, self.chunk_bytes // (4 * projection.weight.shape[0]))
        with self.precision():
            logprob, entropy = ProjectedLogprobs.apply(
                hidden, projection.weight, projection, targets, self.temperature, chunk, with_entropy
            )  # [N] each

        def unpack(flat: Tensor) -> Tensor:
            return flat.new_zeros(mask.shape).index_put((rows.to(device), steps.to(device)), flat)  # [B, T]

        return Scores(unpack(logprob), unpack(entropy) if with_entropy else None, mask.to(device))


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


def load_policy(name: str, *, device: torch.device, dtype: torch.dtype = torch.float32, **settings: Any) -> Policy:
    """Load model and tokenizer from a folder or the hub. settings: fields of `Policy`, such as temperature.

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
    return make_policy(model.to(device), tokenizer, **settings)


def make_policy(model: Any, tokenizer: Any, **settings: Any) -> Policy:
    """Wrap a loaded model. settings: fields of `Policy`. Raises InputError if its logits are more than a projection of its hidden states."""
    model.eval()  # dropout would make π_θ a different policy at every call
    stop_ids = find_stop_ids(model, tokenizer)
    if not stop_ids:
        raise InputError(
            "neither tokenizer nor generation_config names an end-of-sequence token; set tokenizer.eos_token"
        )
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else stop_ids[0]
    policy = Policy(model, tokenizer, stop_ids, pad_id, context_of(model.config), **settings)
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


def encode_questions(policy: Policy, questions: Sequence[Question], system_prompt: str) -> list[Question]:
    """The same questions with their prompts as token ids."""
    return [replace(q, prompt_ids=encode_prompt(policy, q.prompt, system_prompt)) for q in questions]
