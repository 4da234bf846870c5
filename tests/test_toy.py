r"""The toy: its tokenizer and its demonstrations."""

from __future__ import annotations

import torch
from conftest import ragged, tiny_toy

from nano_exgrpo import toy
from nano_exgrpo.checker import reward
from nano_exgrpo.infra.checkpoint import save_model
from nano_exgrpo.infra.loading import load_policy
from nano_exgrpo.policy import encode_prompt, end_of_turn


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
    assert (
        again(text)["input_ids"] == ids
        and again.decode(ids) == text
        and again.chat_template == policy.tokenizer.chat_template
    )


def test_prompt_goes_through_the_chat_template(policy):
    ids = encode_prompt(policy, "3 + 8", "")
    assert policy.tokenizer.convert_ids_to_tokens(ids.tolist()) == ["<|user|>", " 3", " +", " 8", "<|assistant|>"]
    assert end_of_turn(policy.tokenizer) == policy.tokenizer.eos_token_id == policy.stop_ids[0]


def test_demonstrations_in_two_styles():
    questions = toy.sum_questions(3000, seed=0)
    pairs = toy.demonstrations(questions, reasoning=0.25, seed=1)
    assert [question for question, _ in pairs] == questions
    reasoned = [not response.startswith(" \\boxed") for _, response in pairs]
    assert 0.22 < sum(reasoned) / 3000 < 0.28
    for (question, response), thinks in zip(pairs, reasoned):
        if thinks:  # always right, and every running sum is written down
            assert reward(response, question.answer) == 1.0
            numbers = [int(n) for n in question.prompt.split(" + ")]
            assert response.split("\\boxed")[0].split() == [str(sum(numbers[: i + 1])) for i in range(1, len(numbers))]
    lucky = [reward(response, q.answer) for (q, response), thinks in zip(pairs, reasoned) if not thinks]
    assert 0.01 < sum(lucky) / len(lucky) < 0.15
    assert pairs == toy.demonstrations(questions, reasoning=0.25, seed=1)


def test_a_guess_tells_no_more_than_how_many_terms_there_are():
    """It is any sum of so many terms from 1 to 5, and in the long run each of them."""
    guesses: dict[int, set[int]] = {}
    for question, response in toy.demonstrations(toy.sum_questions(3000, seed=0), reasoning=0.0, seed=1):
        guesses.setdefault(question.prompt.count("+") + 1, set()).add(int(response.split()[1]))
    assert guesses == {terms: set(range(terms, 5 * terms + 1)) for terms in (3, 4, 5)}


def test_policies_of_one_seed_are_equal_and_leave_the_random_state_alone():
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first, second, other = tiny_toy(1), tiny_toy(1), tiny_toy(2)
    assert torch.equal(torch.get_rng_state(), state)
    rows = ragged(first, [(3, 4)])
    values = [p.score(rows).logprobs for p in (first, second, other)]
    assert torch.equal(values[0], values[1]) and not torch.equal(values[0], values[2])


def test_default_size():
    policy = toy.build_policy(seed=0)
    assert 90_000 < sum(p.numel() for p in policy.model.parameters()) < 110_000
    assert policy.context == 128
