"""The hand-written loop over tokens: it draws what HF `generate` draws, sharing prompts and dropping what is done."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from conftest import build, give_hidden_defaults, trajectory

from nano_exgrpo import sampling_loop as decode_module
from nano_exgrpo.errors import InputError
from nano_exgrpo.rollout import generate_responses
from nano_exgrpo.sampling_loop import draw_tokens


@pytest.fixture
def drawn(monkeypatch):
    """Every (logits, temperature, top_p) that a token was drawn from, and the tokens."""
    calls = []

    def spy(logits, temperature, top_p=1.0):
        tokens = draw_tokens(logits, temperature, top_p)
        calls.append((logits.clone(), temperature, top_p, tokens))
        return tokens

    monkeypatch.setattr(decode_module, "draw_tokens", spy)
    return calls


@pytest.mark.parametrize("family", ["qwen2", "llama", "gpt2"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_every_token_keeps_its_probability(family, temperature, drawn):
    """Whatever the checkpoint's generation_config says, what is drawn from is the model's own softmax, computed
    without cache or padding, also after finished rows have left the batch."""
    policy = build(family)
    give_hidden_defaults(policy)
    size = policy.model.get_output_embeddings().weight.shape[0]
    stops = tuple(range(0, size, 8))  # responses of very different lengths
    policy = replace(policy, sampler="loop", temperature=temperature, stop_ids=stops)
    prompts = [torch.tensor([7, 5, 9, 7, 11]), torch.tensor([3, 3])]
    torch.manual_seed(0)
    groups = generate_responses(policy, prompts, [6, 6], max_new_tokens=20)
    sizes = [len(logits) for logits, *_ in drawn]
    assert sizes[0] == 12 and min(sizes) < 6  # finished rows leave
    assert all((t, p) == (temperature, 1.0) for _, t, p, _ in drawn)
    checked = 0
    for prompt_ids, group in zip(prompts, groups):
        for response in group:
            logits = policy.model(input_ids=torch.cat([prompt_ids, response])[None]).logits[0, len(prompt_ids) - 1 : -1]
            for step, token in enumerate(response):
                scores, _, _, tokens = drawn[step]
                close = torch.isclose(scores.float(), logits[step].float(), rtol=0, atol=1e-4).all(-1)  # [b]
                assert (close & (tokens == token)).any()
                checked += 1
    assert checked > 30 and len({len(r) for g in groups for r in g}) > 3


def test_behavior_log_probabilities_are_those_of_the_sampling_distribution(policy, drawn):
    """What `token_logprobs` says of a sampled token is what it was drawn with, temperature and all."""
    policy = replace(policy, sampler="loop", stop_ids=(), temperature=0.6)
    prompt_ids = torch.tensor([2, 30, 7, 40, 3])
    torch.manual_seed(1)
    ((response,),) = generate_responses(policy, [prompt_ids], 1, max_new_tokens=6)
    scored = torch.stack(
        [(s[0] / t).log_softmax(-1)[token] for (s, t, _, _), token in zip(drawn, response, strict=True)]
    )
    logprobs = policy.score([trajectory(prompt_ids, response)]).logprobs
    assert torch.allclose(logprobs[0], scored, atol=1e-5)


@pytest.mark.parametrize("top_p", [1.0, 0.75])
def test_draws_have_the_softmax_frequencies(top_p):
    """Chi-square with 4 (all tokens) or 2 (top-p) degrees of freedom; tokens of probability 0 never come."""
    probs = torch.tensor([0.0, 0.1, 0.4, 0.05, 0.15, 0.3, 0.0])
    torch.manual_seed(0)
    tokens = draw_tokens((probs.log() * 0.6).expand(20_000, -1), temperature=0.6, top_p=top_p)
    counts = torch.bincount(tokens, minlength=7).float()
    kept = probs.clone()
    if top_p < 1:
        kept[[1, 3]] = 0  # 0.4 + 0.3 < 0.75 ≤ 0.4 + 0.3 + 0.15
    expected = 20_000 * kept / kept.sum()
    assert (counts[kept == 0] == 0).all()
    chi2 = ((counts - expected)[kept > 0] ** 2 / expected[kept > 0]).sum()
    assert chi2 < (18.5 if top_p == 1 else 13.8)  # exceeded once in 1,000 seeds


@pytest.mark.parametrize("temperature, top_p", [(0.0, 1.0), (0.7, 1.0), (0.7, 0.5)])
@pytest.mark.parametrize("row", [[0.0, math.nan, 1.0], [0.0, math.inf, 1.0], [-math.inf] * 3])
def test_nothing_is_drawn_from_what_is_no_distribution(row, temperature, top_p):
    fine = [0.0, -math.inf, 1.0]
    with pytest.raises(InputError, match="training has diverged"):
        draw_tokens(torch.tensor([fine, row]), temperature, top_p)
    assert draw_tokens(torch.tensor([fine, fine]), temperature, top_p).tolist() != [1, 1]


def test_logits_that_become_nan_in_the_middle_of_a_response_are_noticed(policy):
    policy, calls = replace(policy, sampler="loop", stop_ids=()), []

    def overflow(module, args, output):
        calls.append(1)
        return output * math.nan if len(calls) == 3 else output

    policy.model.get_output_embeddings().register_forward_hook(overflow)
    with pytest.raises(InputError, match="training has diverged"):
        generate_responses(policy, [torch.tensor([2, 5])], 2, max_new_tokens=6)
    assert len(calls) == 3


def test_rare_tokens_keep_their_probability():
    """A vocabulary of 150,000 where half of the mass lies on tokens of 3e-6 each: fp32 sums would round them off."""
    logits = torch.zeros(150_001)
    logits[0] = torch.tensor(150_000.0).log()
    torch.manual_seed(0)
    tokens = draw_tokens(logits.expand(400, -1), temperature=1.0)
    rare = (tokens > 0).float().mean().item()
    assert abs(rare - 0.5) < 3.3 * (0.25 / 400) ** 0.5
    assert (tokens > 75_000).float().mean().item() == pytest.approx(rare / 2, abs=0.08)


def test_samples_of_one_prompt_share_its_forward_pass(policy):
    policy = replace(policy, sampler="loop")
    rows = []
    policy.model.get_input_embeddings().register_forward_hook(lambda m, args, out: rows.append(tuple(out.shape[:2])))
    generate_responses(policy, [torch.tensor([2, 5, 6]), torch.tensor([2, 5])], [4, 3], max_new_tokens=2)
    assert rows[0] == (2, 3) and all(width == 1 for _, width in rows[1:])
