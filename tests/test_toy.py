r"""The toy: its tokenizer, its demonstrations, and that its warm-up teaches them."""

from __future__ import annotations

import pytest
import torch
from conftest import ragged, tiny_toy

from nano_exgrpo import toy
from nano_exgrpo.checker import reward
from nano_exgrpo.checkpoint import save_model
from nano_exgrpo.policy import encode_prompt, end_of_turn, load_policy, token_logprobs
from nano_exgrpo.questions import sum_questions


def test_one_token_for_each_number_and_the_text_comes_back():
    tokenizer = toy.build_tokenizer()
    text = " 11 16 \\boxed{ 99 } + 0"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == 7 and tokenizer.decode(ids) == text
    assert len(tokenizer) == 4 + 3 + 100
    assert tokenizer("what?")["input_ids"] == []  # no token, no word


def test_a_saved_toy_reads_and_writes_as_before(policy, tmp_path):
    """AutoTokenizer gives any Qwen2 model Qwen2's own splitting and decoding, so the toy's must be of that class."""
    save_model(policy, tmp_path / "m")
    again = load_policy(str(tmp_path / "m"), device=torch.device("cpu")).tokenizer
    text = " 11 16 \\boxed{ 99 } + 0"
    ids = policy.tokenizer(text)["input_ids"]
    assert again(text)["input_ids"] == ids and again.decode(ids) == text and again.chat_template == policy.tokenizer.chat_template


def test_prompt_goes_through_the_chat_template(policy):
    ids = encode_prompt(policy, "3 + 8", "")
    assert policy.tokenizer.convert_ids_to_tokens(ids.tolist()) == ["<|user|>", " 3", " +", " 8", "<|assistant|>"]
    assert end_of_turn(policy.tokenizer) == policy.tokenizer.eos_token_id == policy.stop_ids[0]


def test_demonstrations_in_two_styles():
    questions = sum_questions(3000, seed=0)
    pairs = toy.demonstrations(questions, reasoning=0.25, seed=1)
    assert [p for p, _ in pairs] == [q.prompt for q in questions]
    reasoned = [not response.startswith(" \\boxed") for _, response in pairs]
    assert 0.22 < sum(reasoned) / 3000 < 0.28
    for (prompt, response), question, thinks in zip(pairs, questions, reasoned):
        if thinks:  # always right, and every running sum is written down
            assert reward(response, question.answer) == 1.0
            numbers = [int(n) for n in prompt.split(" + ")]
            assert response.split("\\boxed")[0].split() == [str(sum(numbers[: i + 1])) for i in range(1, len(numbers))]
    lucky = [reward(r, q.answer) for (_, r), q, thinks in zip(pairs, questions, reasoned) if not thinks]
    assert 0.01 < sum(lucky) / len(lucky) < 0.15
    assert pairs == toy.demonstrations(questions, reasoning=0.25, seed=1)
    wide = toy.demonstrations(questions, reasoning=0.0, seed=1, widest_guess=99)
    guesses = [int(response.split()[1]) for _, response in wide]
    assert set(guesses) == set(range(1, 100))
    assert sum(reward(r, q.answer) for (_, r), q in zip(wide, questions)) / 3000 < 0.03  # luck is rare


def test_policies_of_one_seed_are_equal_and_leave_the_random_state_alone():
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first, second, other = tiny_toy(1), tiny_toy(1), tiny_toy(2)
    assert torch.equal(torch.get_rng_state(), state)
    prompts, responses = ragged(first, [(3, 4)])
    values = [token_logprobs(p, prompts, responses)[0] for p in (first, second, other)]
    assert torch.equal(values[0], values[1]) and not torch.equal(values[0], values[2])


def test_default_size():
    policy = toy.build_policy(seed=0)
    assert 300_000 < sum(p.numel() for p in policy.model.parameters()) < 400_000
    assert policy.context == 128


def test_warm_up_learns_its_demonstrations_and_to_stop():
    """Ten pairs, learned by heart: greedy decoding gives each response back, EOS included."""
    from nano_exgrpo.rollout import generate_responses

    policy = toy.build_policy(seed=0, hidden=32, layers=1)
    pairs = toy.demonstrations(sum_questions(10, seed=0), reasoning=0.5, seed=0)
    end = torch.tensor([end_of_turn(policy.tokenizer)])
    examples = [
        (encode_prompt(policy, p, ""), torch.cat([torch.tensor(policy.tokenizer(r)["input_ids"]), end])) for p, r in pairs
    ]
    losses = []
    toy.warm_up(policy, examples, steps=150, batch_size=10, lr=1e-2, seed=0, on_step=lambda step, loss: losses.append((step, loss)))
    assert [step for step, _ in losses] == list(range(150))
    assert losses[0][1] > 4 and losses[-1][1] < 0.1
    answers = generate_responses(policy, [p for p, _ in examples], 1, temperature=0, max_new_tokens=15)
    assert sum(a[0].tolist() == r.tolist() for a, (_, r) in zip(answers, examples)) >= 9


def test_warm_up_loss_is_the_mean_over_response_tokens(policy):
    """The first loss, before any step, recomputed: prompt and padding play no part."""
    prompts, responses = ragged(policy, [(3, 2), (5, 6)])
    with torch.no_grad():
        logprobs, _, mask = token_logprobs(policy, prompts, responses)
    possible = []
    for pick in ([0, 0], [0, 1], [1, 0], [1, 1]):  # a batch of two is drawn with replacement
        possible.append((-sum(logprobs[i].sum() for i in pick) / sum(mask[i].sum() for i in pick)).item())
    seen = []
    toy.warm_up(policy, list(zip(prompts, responses)), steps=1, batch_size=2, lr=1e-3, seed=0, on_step=lambda s, loss: seen.append(loss))
    assert any(seen[0] == pytest.approx(p, abs=1e-5) for p in possible)
