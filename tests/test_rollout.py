"""Rollouts: the sampled distribution is the policy's own, and every response belongs to its question."""

from __future__ import annotations

import warnings

import pytest
import torch
from conftest import QWEN_TOKENIZER, build, tiny_toy
from tabular import exact_probabilities, prompt, tabular_policy

from nano_exgrpo.policy import enable_gradient_checkpointing, encode_prompt, token_logprobs
from nano_exgrpo.rollout import bare_generation, cut_at_stop, generate_responses, make_trajectory, rollout, sampling_config

HIDDEN_DEFAULTS = dict(do_sample=True, top_k=20, top_p=0.8, temperature=0.7, repetition_penalty=1.1, max_new_tokens=3)


def give_hidden_defaults(policy):
    """A generation_config such as Qwen2.5's checkpoints carry, and worse."""
    for name, value in HIDDEN_DEFAULTS.items():
        setattr(policy.model.generation_config, name, value)


def generate_with_scores(policy, ids, temperature, max_new_tokens):
    config = sampling_config(policy, temperature, max_new_tokens)
    config.output_scores = config.return_dict_in_generate = True
    with torch.no_grad(), bare_generation(policy.model) as generate:
        return generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)


@pytest.mark.parametrize("family", ["qwen2", "llama", "gpt2"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_every_token_keeps_its_probability(family, temperature):
    """Whatever the checkpoint's generation_config says, the scores that are sampled from are logits / T."""
    policy = build(family)
    give_hidden_defaults(policy)
    policy.stop_ids = (1,)
    ids = torch.tensor([[7, 5, 9, 7], [3, 3, 3, 3]])
    torch.manual_seed(0)
    output = generate_with_scores(policy, ids, temperature, 8)
    assert len(output.scores) == 8  # not the 3 of the checkpoint
    size = policy.model.get_output_embeddings().weight.shape[0]
    for step, scores in enumerate(output.scores):
        assert torch.isfinite(scores).all() and scores.shape == (2, size)
        text = output.sequences[:, : 4 + step]
        logits = policy.model(input_ids=text).logits[:, -1].float() / temperature
        assert torch.allclose(scores.softmax(-1), logits.softmax(-1), atol=1e-5)


def test_the_checkpoints_generation_config_comes_back(policy):
    give_hidden_defaults(policy)
    own = policy.model.generation_config
    generate_responses(policy, [torch.tensor([2, 5])], 2, max_new_tokens=2)
    assert policy.model.generation_config is own and own.top_k == 20
    with pytest.raises(ZeroDivisionError), bare_generation(policy.model):
        1 / 0
    assert policy.model.generation_config is own


def test_behavior_log_probabilities_are_those_of_the_sampling_distribution(policy):
    """What `token_logprobs` says of a sampled token is what `generate` sampled it with: scores, temperature and all."""
    torch.manual_seed(1)
    ids = torch.tensor([[2, 30, 7, 40, 3]])
    output = generate_with_scores(policy, ids, 0.6, 6)
    response = output.sequences[0, 5:]
    scored = torch.stack([scores[0].log_softmax(-1)[token] for scores, token in zip(output.scores, response)])
    logprobs, _, _ = token_logprobs(policy, [ids[0]], [response], temperature=0.6)
    assert torch.allclose(logprobs[0], scored, atol=1e-5)


def test_frequencies_are_the_exact_probabilities():
    """Chi-square over all 9 outcomes of a table, 8 degrees of freedom; 26.1 is exceeded once in 1,000 seeds."""
    policy = tabular_policy(vocabulary=3, length=2, seed=3)
    torch.manual_seed(0)
    (group,) = rollout(policy, [("q", prompt(policy))], 4000, temperature=1.0, max_new_tokens=2, batch_size=1000)
    counts = torch.zeros(9)
    for trajectory in group:
        counts[trajectory.response_ids[0] * 3 + trajectory.response_ids[1]] += 1
    expected = 4000 * exact_probabilities(policy).detach()
    assert ((counts - expected) ** 2 / expected).sum() < 26.1


def test_left_padding_changes_no_probability(policy):
    """A short prompt beside a long one: its greedy continuation and its scores are those it has alone."""
    short, long = torch.tensor([2, 11, 3]), torch.tensor([2, 11, 7, 12, 7, 13, 7, 14, 3])
    policy.model.get_output_embeddings().weight.data.mul_(20)  # far from uniform, so that greedy is clear-cut
    alone = [generate_responses(policy, [p], 1, temperature=0, max_new_tokens=6)[0][0] for p in (short, long)]
    together = [g[0] for g in generate_responses(policy, [short, long], 1, temperature=0, max_new_tokens=6)]
    assert [r.tolist() for r in together] == [r.tolist() for r in alone]
    padded = torch.cat([torch.full((6,), policy.pad_id), short])[None]
    mask = torch.tensor([[0] * 6 + [1] * 3])
    config = sampling_config(policy, 1.0, 1)
    config.output_scores = config.return_dict_in_generate = True
    with torch.no_grad(), bare_generation(policy.model) as generate:
        scores = generate(input_ids=padded, attention_mask=mask, generation_config=config).scores[0]
        plain = policy.model(input_ids=short[None]).logits[:, -1]
    assert torch.allclose(scores.softmax(-1), plain.softmax(-1), atol=1e-5)


@pytest.mark.parametrize("batch_size", [1, 3, 4, 100])
def test_every_response_belongs_to_its_question(batch_size):
    """Two questions whose answers differ surely, samples of different number, groups split over batches."""
    policy = tabular_policy(vocabulary=3, length=2, questions=3)
    table = torch.full_like(policy.model.table, -1e4)
    for (question, prefix), row in policy.model.states.items():
        table[row, question] = 0.0  # question q always answers "q q"
    policy.model.table.data = table
    asked = [(f"q{i}", prompt(policy, i)) for i in (2, 0, 1)]
    groups = rollout(policy, asked, [3, 5, 1], temperature=1.0, max_new_tokens=2, batch_size=batch_size)
    assert [[t.text for t in g] for g in groups] == [["2 2"] * 3, ["0 0"] * 5, ["1 1"]]
    assert [[t.question_id for t in g] for g in groups] == [["q2"] * 3, ["q0"] * 5, ["q1"]]
    assert all(torch.equal(t.prompt_ids, ids) for (_, ids), g in zip(asked, groups) for t in g)


def test_prompts_of_different_length_keep_their_order(policy):
    prompts = [torch.tensor([2] + [9] * n + [3]) for n in (5, 1, 9, 3)]
    groups = rollout(policy, [(str(len(p)), p) for p in prompts], 2, temperature=1.0, max_new_tokens=3, batch_size=3)
    assert [[len(t.prompt_ids) for t in g] for g in groups] == [[7, 7], [3, 3], [11, 11], [5, 5]]


def test_eos_is_kept_and_nothing_after_it(policy):
    eos = policy.tokenizer.eos_token_id
    weight = policy.model.get_output_embeddings().weight
    weight.data.mul_(0)  # every token alike: 1 in 108 is EOS
    torch.manual_seed(0)
    responses = generate_responses(policy, [torch.tensor([2, 5])], 256, max_new_tokens=40, batch_size=256)[0]
    ended = [r for r in responses if eos in r.tolist()]
    assert 20 < len(ended) < 200
    for response in responses:
        ids = response.tolist()
        assert ids.count(eos) <= 1 and (eos not in ids or ids[-1] == eos)
        assert len(ids) == 40 or ids[-1] == eos
        trajectory = make_trajectory(policy, "q", torch.tensor([2, 5]), response)
        assert trajectory.truncated == (ids[-1] != eos)
        assert "<|end|>" not in trajectory.text


def test_cut_at_stop_knows_all_stop_tokens():
    row = torch.tensor([4, 4, 9, 8, 4])
    assert cut_at_stop(row, (8, 9)).tolist() == [4, 4, 9]
    assert cut_at_stop(row, (8,)).tolist() == [4, 4, 9, 8]
    assert cut_at_stop(row, (7,)).tolist() == row.tolist()
    assert cut_at_stop(row, (4,)).tolist() == [4]


def test_greedy_ignores_the_random_state(policy):
    outputs = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        outputs.append(generate_responses(policy, [torch.tensor([2, 5])], 3, temperature=0, max_new_tokens=5)[0])
    assert len({tuple(r.tolist()) for group in outputs for r in group}) == 1


def test_too_long_for_the_context_is_refused(policy):
    with pytest.raises(ValueError, match="context of 128"):
        generate_responses(policy, [torch.tensor([2] * 100)], 1, max_new_tokens=29)
    assert len(generate_responses(policy, [torch.tensor([2] * 100)], 1, max_new_tokens=28)[0]) == 1


def test_checkpointing_leaves_generation_fast_and_silent(capfd):
    """Left on, it would switch the KV cache off, with a warning a step. And it is on again afterwards."""
    policy = build("llama")
    enable_gradient_checkpointing(policy.model)
    widths = []
    policy.model.get_input_embeddings().register_forward_hook(lambda m, args, out: widths.append(out.shape[1]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate_responses(policy, [torch.tensor([2, 5, 6])], 2, max_new_tokens=5)
    assert widths[0] == 3 and set(widths[1:]) <= {1}  # one token at a time: the cache is used
    assert capfd.readouterr() == ("", "")
    assert all(layer.training and layer.gradient_checkpointing for layer in policy.model.model.layers)


def test_silence_of_generate(capfd, recwarn):
    policy = tiny_toy()
    give_hidden_defaults(policy)
    generate_responses(policy, [torch.tensor([2, 5]), torch.tensor([2, 5, 6])], 2, temperature=0.6, max_new_tokens=3)
    generate_responses(policy, [torch.tensor([2, 5])], 1, temperature=0, max_new_tokens=3)
    out, err = capfd.readouterr()
    assert out == "" and err == "" and not recwarn.list


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_families_without_a_chat_template(family):
    policy = build(family)
    ids = encode_prompt(policy, "w1 w2 w3", "w4")
    groups = rollout(policy, [("a", ids), ("b", ids[:3])], 3, temperature=1.0, max_new_tokens=4)
    assert [len(g) for g in groups] == [3, 3]
    assert all(t.text == policy.tokenizer.decode(t.response_ids, skip_special_tokens=True) for g in groups for t in g)


def test_stops_at_the_end_of_a_turn_with_the_real_tokenizer():
    """A model of the real vocabulary that wants to end its turn is not made to talk on."""
    if not QWEN_TOKENIZER.is_dir():
        pytest.skip("the real Qwen2.5-Math tokenizer is not here")
    from test_policy import qwen_tokenizer
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    from nano_exgrpo.policy import make_policy

    config = Qwen2Config(
        vocab_size=151936, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=False, bos_token_id=None, eos_token_id=151643,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=151643, **HIDDEN_DEFAULTS)
    policy = make_policy(model, qwen_tokenizer())
    for stop in (151643, 151645):
        bias = torch.zeros(151936)
        bias[stop] = 1e4
        handle = model.lm_head.register_forward_hook(lambda m, args, out, bias=bias: out + bias)
        (group,) = rollout(policy, [("q", torch.tensor([5, 6]))], 2, temperature=1.0, max_new_tokens=5)
        assert [t.response_ids.tolist() for t in group] == [[stop]] * 2
        assert not group[0].truncated and group[0].text == ""
        handle.remove()
