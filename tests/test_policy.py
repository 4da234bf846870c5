"""Prompts, stop tokens, and token log-probabilities against the plain computation."""

from __future__ import annotations

import copy
import math
import shutil

import pytest
import torch
from conftest import QWEN_TOKENIZER, build, ragged, tiny_toy, word_tokenizer
from tabular import exact_probabilities, outcomes, prompt, tabular_policy

from nano_exgrpo import toy
from nano_exgrpo.errors import InputError
from nano_exgrpo.infra.loading import load_policy, resolve_device, resolve_model_name
from nano_exgrpo.logprobs import mean_entropies, response_mask, token_batches, token_logprobs
from nano_exgrpo.policy import enable_gradient_checkpointing, encode_prompt, find_stop_ids, make_policy
from nano_exgrpo.rollout import generate_responses

LENGTHS = [(3, 5), (1, 1), (6, 2), (2, 7)]
FAMILIES = ["qwen2", "llama", "gpt2"]


def plain(policy, prompts, responses, temperature=1.0):
    """Row by row, unpadded, from the model's own full logits: what `token_logprobs` must equal."""
    width = max(map(len, responses))
    logprobs, entropies = [], []
    for p, r in zip(prompts, responses):
        logits = policy.model(input_ids=torch.cat([p, r])[None]).logits[0]  # [S, V]
        logits = (logits if logits.dtype == torch.float64 else logits.float()) / temperature
        logp = logits[len(p) - 1 : -1].log_softmax(-1)  # [T, V]: position p predicts token p + 1
        pad = (0, width - len(r))
        logprobs.append(torch.nn.functional.pad(logp.gather(1, r[:, None])[:, 0], pad))
        entropies.append(torch.nn.functional.pad(-(logp.exp() * logp).sum(-1), pad))
    return torch.stack(logprobs), torch.stack(entropies)


def gradients(policy):
    found = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in policy.model.parameters()]
    policy.model.zero_grad()
    return torch.cat([g.flatten() for g in found])


# --------------------------------------------------------------------------------- log-probabilities


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_equals_the_plain_computation_with_its_gradient(family, dtype, tolerance, temperature):
    policy = build(family, dtype)
    prompts, responses = ragged(policy, LENGTHS)
    weights = torch.randn(4, 7, generator=torch.Generator().manual_seed(1), dtype=dtype)
    expected, expected_entropy = plain(policy, prompts, responses, temperature)
    (weights * (expected + 0.3 * expected_entropy)).sum().backward()
    expected_gradient = gradients(policy)
    size = policy.model.get_output_embeddings().weight.shape[0]
    for tokens in (1, 2, 4, 1000):  # a chunk of one token, chunks that do and do not divide the 15 tokens, one chunk
        found, entropy, mask = token_logprobs(
            policy, prompts, responses, temperature=temperature, chunk_bytes=4 * size * tokens
        )
        assert found.dtype == dtype
        assert torch.allclose(found, expected, rtol=0, atol=tolerance)
        assert torch.allclose(entropy, expected_entropy, rtol=0, atol=tolerance)
        assert mask.sum(1).tolist() == [r for _, r in LENGTHS]
        (weights * (found + 0.3 * entropy)).sum().backward()
        gradient = gradients(policy)
        assert gradient.norm() > 0
        assert torch.allclose(
            gradient, expected_gradient, rtol=0, atol=tolerance * expected_gradient.abs().max().item()
        )


def test_without_entropy_and_without_gradient_the_values_are_the_same(policy):
    prompts, responses = ragged(policy, LENGTHS)
    with_gradient, _, _ = token_logprobs(policy, prompts, responses)
    with torch.no_grad():
        without, entropies, _ = token_logprobs(policy, prompts, responses, with_entropy=False)
    assert entropies is None and not without.requires_grad and with_gradient.requires_grad
    assert torch.equal(with_gradient.detach(), without)


def test_full_logits_are_never_held(policy, monkeypatch):
    """Neither forward nor backward projects more tokens at once than fit chunk_bytes."""
    largest = []
    projection = policy.model.get_output_embeddings()
    projection.register_forward_hook(lambda module, args, output: largest.append(output.shape[0]))
    prompts, responses = ragged(policy, LENGTHS)
    logprobs, _, _ = token_logprobs(policy, prompts, responses, chunk_bytes=4 * projection.weight.shape[0] * 2)
    logprobs.sum().backward()
    assert max(largest) == 2
    assert len(largest) == 2 * math.ceil(15 / 2)  # each chunk once forward, and once more in backward


def test_an_oracle_next_token_model_has_log_probability_zero():
    """The response 0 1 is certain under a table that says so; a shift by one would show at once."""
    policy = tabular_policy(vocabulary=3, length=2)
    table = torch.full_like(policy.model.table, -1e4)
    table[policy.model.states[0, ()], 0] = 0.0
    table[policy.model.states[0, (0,)], 1] = 0.0
    policy.model.table.data = table
    logprobs, entropies, _ = token_logprobs(policy, [prompt(policy)] * 2, [torch.tensor([0, 1]), torch.tensor([1, 0])])
    assert logprobs[0].tolist() == [0.0, 0.0] and entropies[0].tolist() == [0.0, 0.0]
    assert logprobs[1, 0] == -1e4


def test_probabilities_of_all_outcomes_are_the_tables():
    policy = tabular_policy(vocabulary=3, length=2, questions=2, seed=4)
    for question in (0, 1):
        everything = outcomes(policy)
        logprobs, _, _ = token_logprobs(policy, [prompt(policy, question)] * 9, everything)
        assert torch.allclose(logprobs.sum(1).exp(), exact_probabilities(policy, question), rtol=0, atol=1e-14)
        assert logprobs.sum(1).exp().sum().item() == pytest.approx(1.0, abs=1e-14)


# ------------------------------------------------------------------------------------- mask and padding


def test_the_eos_that_ends_a_response_is_trained_even_where_pad_equals_eos(policy):
    eos = policy.tokenizer.eos_token_id
    policy.pad_id = eos
    rows = [torch.tensor([7, 8, eos]), torch.tensor([eos]), torch.tensor([9, 9, 9, 9])]  # also: EOS first, no EOS
    assert response_mask(rows).int().tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]]
    logprobs, _, mask = token_logprobs(policy, [torch.tensor([2, 5])] * 3, rows)
    assert mask.int().tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]]
    assert (logprobs[mask] < 0).all() and (logprobs[~mask] == 0).all()
    # Stopping can be learned: the gradient of log π(EOS) reaches EOS's own embedding.
    logprobs[1, 0].backward()
    assert policy.model.get_output_embeddings().weight.grad[eos].norm() > 0


def test_pad_token_and_batch_mates_change_nothing(policy):
    prompts, responses = ragged(policy, LENGTHS)
    together, entropies, _ = token_logprobs(policy, prompts, responses)
    policy.pad_id = 17
    other_pad, _, _ = token_logprobs(policy, prompts, responses)
    assert torch.equal(together, other_pad)
    for row, (p, r) in enumerate(zip(prompts, responses)):
        alone, entropy, _ = token_logprobs(policy, [p], [r])
        assert torch.allclose(together[row, : len(r)], alone[0], atol=1e-6)
        assert torch.allclose(entropies[row, : len(r)], entropy[0], atol=1e-6)
        assert (together[row, len(r) :] == 0).all() and (entropies[row, len(r) :] == 0).all()


def test_inputs_are_unchanged(policy):
    prompts, responses = ragged(policy, LENGTHS)
    before = copy.deepcopy((prompts, responses))
    token_logprobs(policy, prompts, responses)[0].sum().backward()
    mean_entropies(policy, prompts, responses)
    for old, new in zip(before, (prompts, responses)):
        assert all(torch.equal(a, b) for a, b in zip(old, new))


def test_mean_entropy_is_over_response_tokens_only(policy):
    """Long padding, made by a batch mate, must not dilute it (as in the released code, whose mask is inverted)."""
    prompts, responses = ragged(policy, [(2, 3), (2, 40)])
    _, expected = plain(policy, prompts, responses)
    for budget in (10_000, 50, 1):  # one batch, and a batch for each
        found = mean_entropies(policy, prompts, responses, token_budget=budget)
        assert found[0].item() == pytest.approx(expected[0, :3].mean().item(), abs=1e-5)
        assert found[1].item() == pytest.approx(expected[1].mean().item(), abs=1e-5)
    assert not found.requires_grad


def test_entropy_of_a_uniform_policy_is_log_v():
    policy = tabular_policy(vocabulary=3, length=2)
    policy.model.table.data.zero_()
    found = mean_entropies(policy, [prompt(policy)], [torch.tensor([2, 0])])
    assert found.item() == pytest.approx(math.log(3), abs=1e-6)


def test_entropy_of_masked_out_tokens_is_finite():
    """A logit of −inf means probability 0, and 0 · log 0 counts as 0."""
    policy = tabular_policy(vocabulary=3, length=1)
    policy.model.table.data[0] = torch.tensor([0.0, 0.0, -1e300], dtype=torch.float64)
    logprobs, entropies, _ = token_logprobs(policy, [prompt(policy)], [torch.tensor([1])])
    assert entropies.item() == pytest.approx(math.log(2)) and logprobs.item() == pytest.approx(-math.log(2))


def test_token_batches_cover_all_rows_within_the_budget():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 50, (100,), generator=generator).tolist()
    batches = token_batches(lengths, 120)
    assert sorted(i for batch in batches for i in batch) == list(range(100))
    assert all(len(batch) * max(lengths[i] for i in batch) <= 120 for batch in batches)
    assert max(lengths) == lengths[batches[0][0]]  # the largest first, so that memory runs out at once or never
    assert token_batches([500], 120) == [[0]] and token_batches([], 120) == []


@pytest.mark.slow
@pytest.mark.skipif(
    not shutil.which("g++") and not shutil.which("clang++"), reason="torch.compile needs a C++ compiler"
)
def test_compiled_layers_change_nothing_and_stay_out_of_generation():
    """Values and gradients on batches of two shapes, then tokens: no layer is compiled for a cache's growing length."""
    policy = toy.build_policy(seed=0, hidden=32, layers=2)
    rng = torch.Generator().manual_seed(0)
    batches = [
        [[torch.randint(4, 100, (fewest + i % 3,), generator=rng) for i in range(rows)] for fewest in (5, 3)]
        for rows in (4, 7)
    ]

    def logprobs_and_gradient(prompts, responses):
        policy.model.zero_grad()
        logprobs, entropies, _ = token_logprobs(policy, prompts, responses)
        (logprobs.sum() + entropies.sum()).backward()
        return logprobs.detach(), torch.cat([p.grad.flatten() for p in policy.model.parameters()])

    expected = [logprobs_and_gradient(*batch) for batch in batches]
    compile_layers(policy)
    for batch, (logprobs, gradient) in zip(batches, expected):
        found = logprobs_and_gradient(*batch)
        assert torch.allclose(found[0], logprobs, atol=1e-5) and torch.allclose(found[1], gradient, atol=1e-5)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs  # something was compiled
    for sampler in ("generate", "loop"):
        policy.sampler = sampler
        generate_responses(policy, batches[0][0], 2, temperature=1.0, max_new_tokens=8)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_gradient_checkpointing_recomputes_and_changes_nothing():
    """It must really happen (HF skips it outside training mode), and leave values and gradients alone."""
    policy = build("llama")
    prompts, responses = ragged(policy, LENGTHS)
    expected, _, _ = token_logprobs(policy, prompts, responses)
    expected.sum().backward()
    expected_gradient = gradients(policy)
    calls = []
    for layer in policy.model.model.layers:
        layer.self_attn.register_forward_hook(lambda *_: calls.append(1))
    enable_gradient_checkpointing(policy.model)
    found, _, _ = token_logprobs(policy, prompts, responses)
    found.sum().backward()
    assert len(calls) == 2 * len(policy.model.model.layers)
    assert torch.allclose(found, expected, atol=1e-6)
    assert torch.allclose(gradients(policy), expected_gradient, atol=1e-5)


# --------------------------------------------------------------------------------------- stop tokens


def qwen_tokenizer():
    if not QWEN_TOKENIZER.is_dir():
        pytest.skip("the real Qwen2.5-Math tokenizer is not here")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(QWEN_TOKENIZER)
    tokenizer.chat_template = (QWEN_TOKENIZER / "chat_template.jinja.txt").read_text()
    return tokenizer


@pytest.fixture(scope="module")
def qwen():
    """A random model of 3 M weights with the vocabulary and tokenizer of the real Qwen2.5-Math-1.5B (base)."""
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    tokenizer = qwen_tokenizer()
    config = Qwen2Config(
        vocab_size=151936, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True,
        bos_token_id=151643, eos_token_id=151643,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    # As the hub's Qwen2.5-Math-1.5B has it: the base model's generation_config names only <|endoftext|>.
    model.generation_config = GenerationConfig(bos_token_id=151643, eos_token_id=151643)
    return make_policy(model, tokenizer)


def test_qwen_stops_at_end_of_text_and_at_the_end_of_a_turn(qwen):
    names = qwen.tokenizer.convert_ids_to_tokens(qwen.stop_ids)
    assert sorted(names) == ["<|endoftext|>", "<|im_end|>"]


@pytest.mark.parametrize("eos", ["<|endoftext|>", "<|im_end|>"])
@pytest.mark.parametrize("named", [None, 151643, 151645, [151645, 151643]])
def test_stop_ids_are_the_union_whoever_names_them(eos, named):
    from types import SimpleNamespace

    tokenizer = qwen_tokenizer()
    tokenizer.eos_token = eos
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=named))
    expected = {151645, tokenizer.eos_token_id} | set(named if isinstance(named, list) else [named] if named else [])
    assert set(find_stop_ids(model, tokenizer)) == expected
    tokenizer.chat_template = None
    assert set(find_stop_ids(model, tokenizer)) == expected - (
        {151645} if eos == "<|endoftext|>" and named in (None, 151643) else set()
    )


def test_qwen_prompt_is_the_chat_template_and_nothing_more(qwen):
    messages = [{"role": "system", "content": "Think."}, {"role": "user", "content": "What is 1+1?"}]
    expected = qwen.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    expected = expected if isinstance(expected, list) else expected["input_ids"]
    found = encode_prompt(qwen, "What is 1+1?", "Think.").tolist()
    assert found == list(expected)
    text = qwen.tokenizer.decode(found)
    assert (
        text.endswith("<|im_start|>assistant\n")
        and text.count("What is 1+1?") == 1
        and text.count("<|im_start|>system") == 1
    )


def test_bos_stands_once_with_and_without_a_template():
    """Llama's tokenizer adds BOS to every text, and Llama's chat template writes one as well."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = word_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", bos)])
    policy = build("llama")
    policy.tokenizer = tokenizer
    ids = encode_prompt(policy, "w1 w2", "w3").tolist()
    assert ids.count(bos) == 1 and ids[0] == bos
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %} {{ m.content }}{% endfor %} w9"
    ids = encode_prompt(policy, "w1 w2", "w3").tolist()
    assert tokenizer.convert_ids_to_tokens(ids) == ["<bos>", "w3", "w1", "w2", "w9"]


def test_a_template_without_system_role_gets_the_system_prompt_in_the_users_words():
    policy = build("llama")
    policy.tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    ids = encode_prompt(policy, "w1", "w3").tolist()
    assert policy.tokenizer.convert_ids_to_tokens(ids) == ["w3", "w1"]


def test_plain_template_holds_system_prompt_and_question_and_no_final_eos():
    from tokenizers.processors import TemplateProcessing

    policy = build("gpt2")
    policy.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", 0)]
    )
    ids = encode_prompt(policy, "w1 {braces}", "w3").tolist()
    words = policy.tokenizer.convert_ids_to_tokens(ids)
    assert words[0] == "w3" and "w1" in words and 0 not in ids


# -------------------------------------------------------------------------------- loading and refusing


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_save_and_load_a_folder(family, tmp_path):
    policy = build(family)
    policy.model.save_pretrained(tmp_path / "m")
    policy.tokenizer.save_pretrained(tmp_path / "m")
    again = load_policy(str(tmp_path / "m"), device=torch.device("cpu"))
    assert again.stop_ids == policy.stop_ids and again.context == 64
    prompts, responses = ragged(policy, LENGTHS)
    assert torch.equal(token_logprobs(policy, prompts, responses)[0], token_logprobs(again, prompts, responses)[0])
    assert again.model.training is False


def test_short_names_resolve_and_others_are_refused(tmp_path):
    assert resolve_model_name("Qwen2.5-Math-1.5B") == "Qwen/Qwen2.5-Math-1.5B"
    assert len(HUB_IDS) == 5 and all(resolve_model_name(name) == full for name, full in HUB_IDS.items())
    assert resolve_model_name("some/where") == "some/where"
    assert resolve_model_name(str(tmp_path)) == str(tmp_path)
    for bad in ("Qwen9-Math", "a/b/c", "./nothing/here", "~/model", "/no/such/folder", ""):
        with pytest.raises(InputError, match="neither a folder nor a hub id"):
            resolve_model_name(bad)


def test_folders_that_are_no_models_are_refused(tmp_path):
    cpu = torch.device("cpu")
    with pytest.raises(InputError, match="no config.json"):
        load_policy(str(tmp_path), device=cpu)
    policy = tiny_toy()
    policy.model.save_pretrained(tmp_path / "weights")
    with pytest.raises(InputError, match="no tokenizer"):
        load_policy(str(tmp_path / "weights"), device=cpu)
    policy.tokenizer.save_pretrained(tmp_path / "weights")
    (tmp_path / "weights" / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(InputError, match="could not be loaded from that folder"):
        load_policy(str(tmp_path / "weights"), device=cpu)
    with pytest.raises(InputError, match="device cuda:77"):
        resolve_device("cuda:77")
    with pytest.raises(InputError, match="device abacus"):
        resolve_device("abacus")


def test_a_tokenizer_without_any_end_token_is_refused():
    policy = build("llama")
    policy.tokenizer.eos_token = None
    policy.model.generation_config.eos_token_id = None
    with pytest.raises(InputError, match="end-of-sequence"):
        make_policy(policy.model, policy.tokenizer)


def test_models_that_bend_their_logits_are_refused():
    from transformers import CohereConfig, CohereForCausalLM

    tokenizer = word_tokenizer()
    config = CohereConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, logit_scale=0.0625, eos_token_id=0, pad_token_id=0, bos_token_id=0,
    )  # fmt: skip
    with pytest.raises(InputError, match="cohere"):
        make_policy(CohereForCausalLM(config), tokenizer)


def test_dropout_is_off():
    """π_θ must be one distribution: the same call twice gives the same log-probabilities."""
    policy = build("gpt2")  # GPT-2 configures a dropout of 0.1
    prompts, responses = ragged(policy, LENGTHS)
    assert torch.equal(token_logprobs(policy, prompts, responses)[0], token_logprobs(policy, prompts, responses)[0])
    enable_gradient_checkpointing(policy.model)
    first, second = (token_logprobs(policy, prompts, responses)[0] for _ in range(2))
    assert torch.equal(first, second)
