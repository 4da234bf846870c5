"""Rollouts: the sampled distribution is the policy's own, and every response belongs to its question."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import replace

import pytest
import torch
from conftest import HIDDEN_DEFAULTS, QWEN_TOKENIZER, build, give_hidden_defaults, ragged, tiny_toy
from tabular import asked, exact_probabilities, tabular_policy

from nano_exgrpo.config import TrainConfig
from nano_exgrpo.policy import Policy, enable_gradient_checkpointing, encode_questions, make_policy
from nano_exgrpo.questions import Question
from nano_exgrpo.rollout import cut_at_stop, generate_responses, make_trajectory, rollout
from nano_exgrpo.update import update_policy


@pytest.fixture(params=["generate", "loop"], autouse=True)
def sampler(request, monkeypatch):
    """Every test here holds for both ways of sampling: new policies get this one."""
    parameters = inspect.signature(Policy).parameters.values()
    defaults = [request.param if p.name == "sampler" else p.default for p in parameters if p.default is not p.empty]
    monkeypatch.setattr(Policy.__init__, "__defaults__", tuple(defaults))
    return request.param


@pytest.mark.parametrize("family", ["qwen2", "llama", "gpt2"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_generate_keeps_every_tokens_probability(family, temperature, sampler, monkeypatch):
    """Whatever the checkpoint's generation_config says, the scores that `generate` draws from are log-probabilities of
    the model's own softmax at this temperature: no token is filtered, none is penalised."""
    if sampler == "loop":
        pytest.skip("see test_sampling_loop.py")
    policy = replace(build(family), temperature=temperature, stop_ids=(0,))
    give_hidden_defaults(policy)
    outputs, original = [], policy.model.generate

    def generate(**arguments):
        config = arguments["generation_config"]
        config.output_scores = config.return_dict_in_generate = True
        outputs.append(original(**arguments))
        return outputs[0].sequences

    monkeypatch.setattr(policy.model, "generate", generate)
    prompts = [torch.tensor([7, 5, 9, 7, 11]), torch.tensor([3, 3])]
    groups = generate_responses(policy, prompts, 3, max_new_tokens=4)
    scores = torch.stack(outputs[0].scores, 1)  # [B, T, V]; the shorter prompt's rows come first
    assert scores.isfinite().all()
    rows = [(prompts[i], response) for i in (1, 0) for response in groups[i]]
    for (prompt_ids, response), found in zip(rows, scores, strict=True):
        logits = policy.model(input_ids=torch.cat([prompt_ids, response])[None]).logits[0, len(prompt_ids) - 1 : -1]
        assert torch.allclose(found[: len(response)].softmax(-1), (logits / temperature).softmax(-1), atol=1e-5)


def test_the_checkpoints_generation_config_is_left_alone(policy):
    give_hidden_defaults(policy)
    own = policy.model.generation_config
    generate_responses(policy, [torch.tensor([2, 5])], 2, max_new_tokens=5)
    assert policy.model.generation_config is own and own.top_k == 20


def test_frequencies_are_the_exact_probabilities():
    """Chi-square over all 9 outcomes of a table, 8 degrees of freedom; 26.1 is exceeded once in 1,000 seeds."""
    policy = tabular_policy(vocabulary=3, length=2, seed=3)
    torch.manual_seed(0)
    (group,) = rollout(policy, [asked(policy)], 4000, max_new_tokens=2, batch_size=1000)
    counts = torch.zeros(9)
    for trajectory in group:
        counts[trajectory.response_ids[0] * 3 + trajectory.response_ids[1]] += 1
    expected = 4000 * exact_probabilities(policy).detach()
    assert ((counts - expected) ** 2 / expected).sum() < 26.1


def test_left_padding_changes_no_probability(policy):
    """A short prompt beside a long one: its greedy continuation is the one it has alone."""
    short, long = torch.tensor([2, 11, 3]), torch.tensor([2, 11, 7, 12, 7, 13, 7, 14, 3])
    policy.model.get_output_embeddings().weight.data.mul_(20)  # far from uniform, so that greedy is clear-cut
    greedy = policy.at(0)
    alone = [generate_responses(greedy, [p], 1, max_new_tokens=6)[0][0] for p in (short, long)]
    together = [g[0] for g in generate_responses(greedy, [short, long], 1, max_new_tokens=6)]
    assert [r.tolist() for r in together] == [r.tolist() for r in alone]


@pytest.mark.parametrize("batch_size", [1, 3, 4, 100])
def test_every_response_belongs_to_its_question(batch_size):
    """Two questions whose answers differ surely, samples of different number, groups split over batches."""
    policy = tabular_policy(vocabulary=3, length=2, questions=3)
    table = torch.full_like(policy.model.table, -1e4)
    for (question, _), row in policy.model.states.items():
        table[row, question] = 0.0  # question q always answers "q q"
    policy.model.table.data = table
    questions = [asked(policy, i) for i in (2, 0, 1)]
    groups = rollout(policy, questions, [3, 5, 1], max_new_tokens=2, batch_size=batch_size)
    assert [[t.text for t in g] for g in groups] == [["2 2"] * 3, ["0 0"] * 5, ["1 1"]]
    assert [[t.question.id for t in g] for g in groups] == [["q2"] * 3, ["q0"] * 5, ["q1"]]
    assert all(t.question is question for question, g in zip(questions, groups) for t in g)


def test_prompts_of_different_length_keep_their_order(policy):
    questions = [Question(str(n), "?", "", prompt_ids=torch.tensor([2] + [9] * n + [3])) for n in (5, 1, 9, 3)]
    groups = rollout(policy, questions, 2, max_new_tokens=3, batch_size=3)
    assert [[len(t.prompt_ids) for t in g] for g in groups] == [[7, 7], [3, 3], [11, 11], [5, 5]]


def test_eos_is_kept_and_nothing_after_it(policy):
    eos = policy.tokenizer.eos_token_id
    weight = policy.model.get_output_embeddings().weight
    weight.data.mul_(0)  # every token alike: 1 in 108 is EOS
    torch.manual_seed(0)
    question = Question("q", "?", "", prompt_ids=torch.tensor([2, 5]))
    responses = generate_responses(policy, [question.prompt_ids], 256, max_new_tokens=40, batch_size=256)[0]
    ended = [r for r in responses if eos in r.tolist()]
    assert 20 < len(ended) < 200
    for response in responses:
        ids = response.tolist()
        assert ids.count(eos) <= 1 and (eos not in ids or ids[-1] == eos)
        assert len(ids) == 40 or ids[-1] == eos
        trajectory = make_trajectory(policy, question, response)
        assert trajectory.truncated == (ids[-1] != eos)
        assert "<|end|>" not in trajectory.text


def test_cut_at_stop_knows_all_stop_tokens():
    row = torch.tensor([4, 4, 9, 8, 4])
    assert cut_at_stop(row, (8, 9)).tolist() == [4, 4, 9]
    assert cut_at_stop(row, (8,)).tolist() == [4, 4, 9, 8]
    assert cut_at_stop(row, (7,)).tolist() == row.tolist()
    assert cut_at_stop(row, (4,)).tolist() == [4]


def test_a_stored_trajectory_keeps_nothing_but_itself_in_memory(policy):
    """No tensor of it is a view of its rollout batch, which would live on in the buffer and in each checkpoint."""
    questions = encode_questions(policy, [Question("q", "3 + 4", "7")], "")
    (group,) = rollout(policy, questions, 8, max_new_tokens=20)
    config = TrainConfig(max_response_length=20, group_size=8)
    advantages = torch.tensor([[1.0, -1.0] * 4])
    update_policy(
        policy, torch.optim.SGD(policy.model.parameters(), lr=0.1), [group], advantages, config, clip_range=0.2
    )
    for trajectory in group:
        for tensor in (trajectory.prompt_ids, trajectory.response_ids, trajectory.logprobs):
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_greedy_ignores_the_random_state(policy):
    outputs = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        outputs.append(generate_responses(policy.at(0), [torch.tensor([2, 5])], 3, max_new_tokens=5)[0])
    assert len({tuple(r.tolist()) for group in outputs for r in group}) == 1


def test_too_long_for_the_context_is_refused(policy):
    with pytest.raises(ValueError, match="context of 128"):
        generate_responses(policy, [torch.tensor([2] * 100)], 1, max_new_tokens=29)
    assert len(generate_responses(policy, [torch.tensor([2] * 100)], 1, max_new_tokens=28)[0]) == 1


def test_checkpointing_leaves_generation_fast_and_silent(capfd):
    """It must not switch the KV cache off, with a warning a step. And training recomputes afterwards as before."""
    policy = build("llama")
    enable_gradient_checkpointing(policy.model)
    widths, calls = [], []
    policy.model.get_input_embeddings().register_forward_hook(lambda m, args, out: widths.append(out.shape[1]))
    layers = policy.model.model.layers
    for layer in layers:
        layer.self_attn.register_forward_hook(lambda *_: calls.append(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate_responses(policy, [torch.tensor([2, 5, 6])], 2, max_new_tokens=5)
    assert widths[0] == 3 and set(widths[1:]) <= {1}  # one token at a time: the cache is used
    assert capfd.readouterr() == ("", "")
    calls.clear()
    policy.score(ragged(policy, [(3, 4)])).logprobs.sum().backward()
    assert len(calls) == 2 * len(layers)


def test_silence(capfd, recwarn):
    policy = tiny_toy()
    give_hidden_defaults(policy)
    generate_responses(policy.at(0.6), [torch.tensor([2, 5]), torch.tensor([2, 5, 6])], 2, max_new_tokens=3)
    generate_responses(policy.at(0), [torch.tensor([2, 5])], 1, max_new_tokens=3)
    out, err = capfd.readouterr()
    assert out == "" and err == "" and not recwarn.list


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_families_without_a_chat_template(family):
    policy = build(family)
    questions = encode_questions(policy, [Question("a", "w1 w2 w3", ""), Question("b", "w1", "")], "w4")
    groups = rollout(policy, questions, 3, max_new_tokens=4)
    assert [len(g) for g in groups] == [3, 3]
    assert all(t.text == policy.tokenizer.decode(t.response_ids, skip_special_tokens=True) for g in groups for t in g)


def test_stops_at_the_end_of_a_turn_with_the_real_tokenizer():
    """A model of the real vocabulary that wants to end its turn is not made to talk on."""
    if not QWEN_TOKENIZER.is_dir():
        pytest.skip("the real Qwen2.5-Math tokenizer is not here")
    from test_policy import qwen_tokenizer
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=151936, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=False, bos_token_id=None, eos_token_id=151643,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=151643, **HIDDEN_DEFAULTS)
    policy = make_policy(model, qwen_tokenizer())
    question = Question("q", "?", "", prompt_ids=torch.tensor([5, 6]))
    for stop in (151643, 151645):
        bias = torch.zeros(151936)
        bias[stop] = 1e4
        handle = model.lm_head.register_forward_hook(lambda m, args, out, bias=bias: out + bias)
        (group,) = rollout(policy, [question], 2, max_new_tokens=5)
        assert [t.response_ids.tolist() for t in group] == [[stop]] * 2
        assert not group[0].truncated and group[0].text == ""
        handle.remove()
