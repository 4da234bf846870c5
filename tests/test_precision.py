"""Precision, optimisers and LoRA: no step of 1e-6 is lost in any mode that is offered."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import build, ragged, tiny_toy

from nano_exgrpo.errors import InputError
from nano_exgrpo.infra import prepare
from nano_exgrpo.infra.checkpoint import save_model, write_model
from nano_exgrpo.infra.loading import load_policy
from nano_exgrpo.infra.precision import (
    StochasticAdamW,
    adapter_state,
    add_lora,
    has_lora,
    load_adapter,
    make_optimizer,
    plain_state_dict,
    resolve_dtypes,
    round_stochastically,
)

CPU = torch.device("cpu")
MODES = [
    ("float32", "adamw"),
    ("bfloat16", "adamw"),
    ("float32", "adamw16"),
    ("bfloat16", "adamw16"),
]


def coherent_steps(dtype, optimizer_name, steps=10, lr=1e-6):
    """How far `steps` equal gradients move weights of ordinary size, each mean over 64k weights: [steps]."""
    weights_dtype, _ = resolve_dtypes(dtype, optimizer_name, 0, CPU)
    torch.manual_seed(0)
    weight = torch.nn.Parameter((torch.randn(256, 256) * 0.02).to(weights_dtype))
    start = weight.detach().double().clone()
    optimizer = make_optimizer([weight], optimizer_name, lr=lr, weight_decay=0.0)
    moved = []
    for _ in range(steps):
        weight.grad = torch.full_like(weight, 0.5)
        optimizer.step()
        moved.append((start - weight.detach().double()).mean().item())
    return torch.tensor(moved)


@pytest.mark.parametrize(("dtype", "optimizer"), MODES)
def test_ten_coherent_steps_are_not_lost(dtype, optimizer):
    """Adam moves a weight whose gradient never changes by lr a step."""
    expected = torch.arange(1, 11) * 1e-6
    assert torch.allclose(coherent_steps(dtype, optimizer), expected.float(), rtol=0.05, atol=1e-7)


def test_plain_bf16_loses_them_and_is_not_offered():
    weight = torch.nn.Parameter((torch.randn(64, 64) * 0.02).bfloat16())
    start = weight.detach().clone()
    optimizer = torch.optim.AdamW([weight], lr=1e-6, weight_decay=0.0)
    for _ in range(10):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert (weight == start).float().mean() > 0.95  # that is the fault
    with pytest.raises(ValueError, match="adamw16"):
        make_optimizer([weight], "adamw", lr=1e-6, weight_decay=0.0)


def test_stochastic_adamw_on_fp32_weights_is_adamw():
    torch.manual_seed(0)
    ours = torch.nn.Parameter(torch.randn(50, 3))
    theirs = torch.nn.Parameter(ours.detach().clone())
    optimizers = [
        StochasticAdamW([ours], lr=1e-2, weight_decay=0.1),
        torch.optim.AdamW([theirs], lr=1e-2, weight_decay=0.1),
    ]
    for _ in range(5):
        ours.grad = theirs.grad = torch.randn(50, 3)
        for optimizer in optimizers:
            optimizer.step()
    assert torch.allclose(ours, theirs, atol=1e-6)


def test_stochastic_rounding_goes_to_a_neighbour_and_is_right_on_average():
    torch.manual_seed(0)
    exact = torch.tensor([1.0, -1.0, 1.0 + 2**-9, -3.001, 1e-30])  # bf16 has steps of 2^-7 at 1
    rounded = round_stochastically(exact.repeat(40_000, 1)).float()  # [N, 5]
    assert set(rounded[:, 0].tolist()) == {1.0} and set(rounded[:, 2].tolist()) == {1.0, 1.0 + 2**-7}
    assert torch.allclose(rounded.mean(0), exact, rtol=3e-4)


def test_what_auto_means():
    assert resolve_dtypes("auto", "adamw", 0, CPU) == (torch.float32, None)
    assert resolve_dtypes("bfloat16", "adamw", 0, CPU) == (torch.float32, torch.bfloat16)
    assert resolve_dtypes("bfloat16", "adamw16", 0, CPU) == (torch.bfloat16, None)
    assert resolve_dtypes("bfloat16", "adamw", 8, CPU) == (torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_autocast_is_close_to_fp32_and_its_gradients_are_fp32(family):
    policy = build(family)
    rows = ragged(policy, [(3, 5), (6, 2)])
    found = {}
    for autocast in (None, torch.bfloat16):
        for chunk_bytes in (2**20, 1024):  # kept for backward, and projected again
            logprobs, entropies, _ = replace(policy, autocast=autocast, chunk_bytes=chunk_bytes).score(rows)
            (logprobs.sum() + entropies.sum()).backward()
            assert logprobs.dtype == torch.float32
            gradients = [p.grad for p in policy.model.parameters()]
            assert all(g.dtype == torch.float32 for g in gradients)
            found[autocast, chunk_bytes] = logprobs.detach(), torch.cat([g.flatten() for g in gradients])
            policy.model.zero_grad()
    exact, exact_gradient = found[None, 2**20]
    for (autocast, _), (logprobs, gradient) in found.items():
        tolerance = 2e-2 if autocast else 1e-5
        assert torch.allclose(logprobs, exact, atol=tolerance)
        assert (gradient - exact_gradient).norm() < tolerance * exact_gradient.norm()
        assert autocast is None or not torch.equal(logprobs, exact)  # it does compute in bf16


# -------------------------------------------------------------------------------------------- LoRA


def trained_lora(family="llama", dtype=torch.float32, rank=4):
    policy = build(family, dtype)
    add_lora(policy.model, rank)
    rows = ragged(policy, [(3, 5), (6, 2)])
    optimizer = make_optimizer(policy.model.parameters(), "adamw", lr=1e-2, weight_decay=0.0)
    for _ in range(3):
        policy.score(rows).logprobs.sum().neg().backward()
        optimizer.step()
        optimizer.zero_grad()
    return policy, rows


@pytest.mark.parametrize("family", ["qwen2", "llama", "gpt2"])
def test_fresh_adapters_change_nothing_and_only_they_train(family):
    policy = build(family)
    rows = ragged(policy, [(3, 5), (6, 2)])
    before = policy.score(rows).logprobs.detach()
    frozen = {name: t.clone() for name, t in policy.model.state_dict().items()}
    policy, rows = trained_lora(family)
    assert has_lora(policy.model)
    after = policy.score(rows).logprobs.detach()
    assert (after - before).abs().max() > 1e-3
    for name, tensor in plain_state_dict(policy.model, merge=False).items():
        assert torch.equal(tensor, frozen[name])
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    assert torch.allclose(policy.score(rows).logprobs, before, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "dtype"), [("qwen2", torch.float32), ("llama", torch.bfloat16), ("gpt2", torch.float32)]
)
def test_the_saved_model_is_merged_and_plain(family, dtype, tmp_path):
    policy, rows = trained_lora(family, dtype)
    save_model(policy, tmp_path / "model")
    merged = load_policy(str(tmp_path / "model"), device=CPU)
    assert not has_lora(merged.model)
    names = {name for name, _ in build(family).model.named_parameters()}
    assert {name for name, _ in merged.model.named_parameters()} == names
    found, expected = (p.score(rows).logprobs.detach() for p in (merged, policy))
    assert torch.allclose(found, expected, atol=5e-2 if dtype == torch.bfloat16 else 1e-5)
    # bf16 weights are merged in fp32: a change far below their resolution survives.
    state = plain_state_dict(policy.model, merge=True)
    assert all(t.dtype == torch.float32 for t in state.values() if t.is_floating_point())


def test_a_small_change_survives_whoever_loads_the_merged_model(tmp_path):
    """Changes of a hundredth of bf16's resolution, as RL makes them: not one is lost by the file's own dtype, and eval.py
    answers as the policy did in training, up to the noise of its bf16 products."""
    from transformers import AutoConfig, AutoModelForCausalLM

    policy = build("llama", torch.bfloat16)
    frozen = {name: t.float() for name, t in policy.model.state_dict().items()}
    rows = ragged(policy, [(3, 5), (6, 9), (2, 7)])
    in_bf16 = policy.score(rows).logprobs
    exact = build("llama")
    exact.model.load_state_dict(frozen)
    noise = (exact.score(rows).logprobs - in_bf16).abs().max().item()  # without any adapters
    policy = replace(policy, autocast=torch.bfloat16)
    add_lora(policy.model, 4)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=1e-5)
    save_model(policy, tmp_path / "model")
    assert AutoConfig.from_pretrained(tmp_path / "model").dtype == torch.float32
    for options in ({}, {"dtype": "auto"}):
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model", **options)
        assert plain.dtype == torch.float32
        for name, weight in plain.state_dict().items():
            if "proj" in name:
                assert (weight == frozen[name]).float().mean() < 0.01, name
    loaded = load_policy(str(tmp_path / "model"), device=CPU)
    trained, merged = (p.score(rows).logprobs.detach() for p in (policy, loaded))
    assert 0 < (merged - trained).abs().max().item() < 2 * noise < 1e-2
    write_model(policy, tmp_path / "frozen", merge=False)  # of a checkpoint, as they were
    assert AutoConfig.from_pretrained(tmp_path / "frozen").dtype == torch.bfloat16


@pytest.mark.parametrize("family", ["qwen2", "llama", "gpt2"])
def test_merging_never_holds_the_weights_twice(family):
    """Counted by what each operation returns: at no time more than the merged model, in fp32 and on the CPU, and the work
    on one of its tensors."""
    import weakref

    from torch.utils._python_dispatch import TorchDispatchMode

    class Held(TorchDispatchMode):
        live, now, peak = {}, 0, 0

        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            result = function(*arguments, **(options or {}))
            storage = result.untyped_storage() if isinstance(result, torch.Tensor) else None
            if storage is not None and storage.data_ptr() not in self.live and storage.data_ptr() not in before:
                where, size = storage.data_ptr(), storage.nbytes()
                self.live[where], self.now = size, self.now + size
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.free, where)
            return result

        def free(self, where):
            self.now -= self.live.pop(where)

    policy, _ = trained_lora(family, torch.bfloat16)
    before = {p.untyped_storage().data_ptr() for p in policy.model.state_dict().values()}
    with Held() as held:
        state = plain_state_dict(policy.model, merge=True)
    whole = sum({t.data_ptr(): t.numel() * 4 for t in state.values()}.values())
    largest = max(t.numel() * 4 for t in state.values())
    assert all(t.device == CPU for t in state.values())
    assert whole <= held.peak <= whole + 2 * largest, (whole, held.peak, largest)


def test_adapters_come_back_exactly_and_strangers_are_refused(tmp_path):
    policy, rows = trained_lora("llama", torch.bfloat16)
    policy = replace(policy, autocast=torch.bfloat16)
    write_model(policy, tmp_path / "model", merge=False)
    again = load_policy(str(tmp_path / "model"), device=CPU, dtype=torch.bfloat16, autocast=torch.bfloat16)
    add_lora(again.model, 4)
    load_adapter(again.model, adapter_state(policy.model))
    assert torch.equal(again.score(rows).logprobs, policy.score(rows).logprobs)
    assert all(p.dtype == (torch.float32 if p.requires_grad else torch.bfloat16) for p in again.model.parameters())
    other = tiny_toy()
    add_lora(other.model, 2)
    with pytest.raises(InputError, match="lora-rank"):
        load_adapter(other.model, adapter_state(policy.model))


def test_only_plain_linear_layers_are_adapted():
    """Not the projection, nor a subclass, which may do more than a product."""

    class Scaled(torch.nn.Linear):
        def forward(self, x):
            return 3 * super().forward(x)

    policy = build("llama")
    names = {name.removesuffix(".weight") for name in policy.model.state_dict() if "proj" in name}
    up = policy.model.model.layers[0].mlp
    up.up_proj = Scaled(16, 32, bias=False)
    add_lora(policy.model, 2)
    adapted = {name.removesuffix(".lora_A") for name in policy.model.state_dict() if name.endswith("lora_A")}
    assert adapted == names - {"model.layers.0.mlp.up_proj"} and not any("lm_head" in name for name in adapted)
    with pytest.raises(InputError, match="no plain linear layers"):
        add_lora(Bare(), 2)


class Bare(torch.nn.Module):
    """A model without linear layers."""

    def __init__(self):
        super().__init__()
        from types import SimpleNamespace

        self.config = SimpleNamespace(model_type="bare")

    def get_output_embeddings(self):
        return None


# ------------------------------------------------------------------------------------ whole runs


def run(*flags):
    from train import main

    base = ["--steps", "2", "--warmup-steps", "0", "--questions-per-step", "2", "--group-size", "4", "--held-out", "4",
            "--eval-every", "0", "--log-samples", "0", "--device", "cpu", "--lr", "1e-3"]  # fmt: skip
    return main([*base, *map(str, flags)])


def half_right(monkeypatch):
    """A gradient from an untrained toy."""
    monkeypatch.setattr(prepare, "reward_of", lambda t: float(len(t.text) % 2))


@pytest.mark.parametrize(
    "flags",
    [["--dtype", "bfloat16"], ["--dtype", "bfloat16", "--optimizer", "adamw16"], ["--lora-rank", "2"],
     ["--dtype", "bfloat16", "--lora-rank", "2", "--gradient-checkpointing"]],
    ids=" ".join,
)  # fmt: skip
def test_resume_is_bit_for_bit_in_every_mode(flags, tmp_path, monkeypatch):
    """4 steps == 2 + resume + 2, the stochastic rounding and the adapters included."""
    half_right(monkeypatch)
    assert run("--run", tmp_path / "whole", "--steps", 4, *flags) == 0
    assert run("--run", tmp_path / "split", "--save-every", 2, *flags) == 0
    from train import main

    assert main(["--resume", str(tmp_path / "split"), "--steps", "4"]) == 0
    whole, split = (
        load_policy(str(tmp_path / name / "model"), device=CPU).model.state_dict() for name in ("whole", "split")
    )
    assert all(torch.equal(whole[name], split[name]) for name in whole)


@pytest.mark.parametrize("flags", [[], ["--optimizer", "adamw16"], ["--lora-rank", "2"]], ids=" ".join)
@pytest.mark.parametrize(("before", "after"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_resume_in_another_precision(before, after, flags, tmp_path, monkeypatch):
    """A run may go on with the other --dtype; the optimiser and the LoRA rank are its own and stay."""
    half_right(monkeypatch)
    from train import main

    assert run("--run", tmp_path / "r", "--steps", 1, "--save-every", 1, "--dtype", before, *flags) == 0
    assert main(["--resume", str(tmp_path / "r"), "--steps", "2", "--dtype", after]) == 0
    assert main(["--resume", str(tmp_path / "r"), "--steps", "3", "--lora-rank", "5"]) == 2
