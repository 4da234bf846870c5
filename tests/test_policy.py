"""Prompts, stop tokens, and token log-probabilities against the plain computation."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace

import pytest
import torch
from conftest import QWEN_TOKENIZER, build, ragged, tiny_toy, trajectory, word_tokenizer
from safetensors.torch import load_file, save_file
from tabular import exact_probabilities, outcomes, prompt, tabular_policy

from nano_exgrpo.errors import InputError
from nano_exgrpo.infra.loading import BACKBONES, load_policy, require_exact, resolve_device, resolve_model_name
from nano_exgrpo.infra.memory import load_shape
from nano_exgrpo.logprobs import response_mask, token_batches
from nano_exgrpo.policy import (
    context_of,
    enable_gradient_checkpointing,
    encode_prompt,
    encode_questions,
    end_of_turn,
    find_stop_ids,
    make_policy,
    response_text,
    say_once,
)
from nano_exgrpo.questions import Question, questions_digest

CPU = torch.device("cpu")
LENGTHS = [(3, 5), (1, 1), (6, 2), (2, 7)]
FAMILIES = ["qwen2", "llama", "gpt2"]


def plain(policy, rows):
    """Row by row, unpadded, from the model's own full logits: what `score` must equal."""
    width = max(len(row.response_ids) for row in rows)
    logprobs, entropies = [], []
    for row in rows:
        p, r = row.prompt_ids, row.response_ids
        logits = policy.model(input_ids=torch.cat([p, r])[None]).logits[0]  # [S, V]
        logits = (logits if logits.dtype == torch.float64 else logits.float()) / policy.temperature
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
    policy = build(family, dtype).at(temperature)
    rows = ragged(policy, LENGTHS)
    weights = torch.randn(4, 7, generator=torch.Generator().manual_seed(1), dtype=dtype)
    expected, expected_entropy = plain(policy, rows)
    (weights * (expected + 0.3 * expected_entropy)).sum().backward()
    expected_gradient = gradients(policy)
    size = policy.model.get_output_embeddings().weight.shape[0]
    for tokens in (1, 2, 4, 1000):  # a chunk of one token, chunks that do and do not divide the 15 tokens, one chunk
        found, entropy, mask = replace(policy, chunk_bytes=4 * size * tokens).score(rows)
        assert found.dtype == dtype
        assert torch.allclose(found, expected, rtol=0, atol=tolerance)
        assert torch.allclose(entropy, expected_entropy, rtol=0, atol=tolerance)
        assert mask.sum(1).tolist() == [r for _, r in LENGTHS]
        (weights * (found + 0.3 * entropy)).sum().backward()
        gradient = gradients(policy)
        assert gradient.norm() > 0
        largest = expected_gradient.abs().max().item()
        assert torch.allclose(gradient, expected_gradient, rtol=0, atol=tolerance * largest)


def test_without_entropy_and_without_gradient_the_values_are_the_same(policy):
    rows = ragged(policy, LENGTHS)
    with_gradient = policy.score(rows).logprobs
    with torch.no_grad():
        without, entropies, _ = policy.score(rows, with_entropy=False)
    assert entropies is None and not without.requires_grad and with_gradient.requires_grad
    assert torch.allclose(with_gradient.detach(), without, rtol=0, atol=1e-6)  # attention may take another kernel


def test_full_logits_are_never_held(policy):
    """Neither forward nor backward projects more tokens at once than fit chunk_bytes."""
    largest = []
    projection = policy.model.get_output_embeddings()
    projection.register_forward_hook(lambda module, args, output: largest.append(output.shape[0]))
    policy = replace(policy, chunk_bytes=4 * projection.weight.shape[0] * 2)
    policy.score(ragged(policy, LENGTHS)).logprobs.sum().backward()
    assert max(largest) == 2
    assert len(largest) == 2 * math.ceil(15 / 2)  # each chunk once forward, and once more in backward


def test_an_oracle_next_token_model_has_log_probability_zero():
    """The response 0 1 is certain under a table that says so; a shift by one would show at once."""
    policy = tabular_policy(vocabulary=3, length=2)
    table = torch.full_like(policy.model.table, -1e4)
    table[policy.model.states[0, ()], 0] = 0.0
    table[policy.model.states[0, (0,)], 1] = 0.0
    policy.model.table.data = table
    logprobs, entropies, _ = policy.score([trajectory(prompt(policy), r) for r in ([0, 1], [1, 0])])
    assert logprobs[0].tolist() == [0.0, 0.0] and entropies[0].tolist() == [0.0, 0.0]
    assert logprobs[1, 0] == -1e4


def test_probabilities_of_all_outcomes_are_the_tables():
    policy = tabular_policy(vocabulary=3, length=2, questions=2, seed=4)
    for question in (0, 1):
        logprobs = policy.score([trajectory(prompt(policy, question), r) for r in outcomes(policy)]).logprobs
        assert torch.allclose(logprobs.sum(1).exp(), exact_probabilities(policy, question), rtol=0, atol=1e-14)
        assert logprobs.sum(1).exp().sum().item() == pytest.approx(1.0, abs=1e-14)


# ------------------------------------------------------------------------------------- mask and padding


def test_the_eos_that_ends_a_response_is_trained_even_where_pad_equals_eos(policy):
    eos = policy.tokenizer.eos_token_id
    policy = replace(policy, pad_id=eos)
    rows = [torch.tensor([7, 8, eos]), torch.tensor([eos]), torch.tensor([9, 9, 9, 9])]  # also: EOS first, no EOS
    assert response_mask(rows).int().tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]]
    logprobs, _, mask = policy.score([trajectory([2, 5], row) for row in rows])
    assert mask.int().tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]]
    assert (logprobs[mask] < 0).all() and (logprobs[~mask] == 0).all()
    # Stopping can be learned: the gradient of log π(EOS) reaches EOS's own embedding.
    logprobs[1, 0].backward()
    assert policy.model.get_output_embeddings().weight.grad[eos].norm() > 0


def test_pad_token_and_batch_mates_change_nothing(policy):
    rows = ragged(policy, LENGTHS)
    together, entropies, _ = policy.score(rows)
    other_pad = replace(policy, pad_id=17).score(rows).logprobs
    assert torch.equal(together, other_pad)
    for i, row in enumerate(rows):
        alone, entropy, _ = policy.score([row])
        n = len(row.response_ids)
        assert torch.allclose(together[i, :n], alone[0], atol=1e-6)
        assert torch.allclose(entropies[i, :n], entropy[0], atol=1e-6)
        assert (together[i, n:] == 0).all() and (entropies[i, n:] == 0).all()


def test_inputs_are_unchanged(policy):
    rows = ragged(policy, LENGTHS)
    before = copy.deepcopy(rows)
    policy.score(rows).logprobs.sum().backward()
    for old, new in zip(before, rows):
        assert torch.equal(old.prompt_ids, new.prompt_ids) and torch.equal(old.response_ids, new.response_ids)


def test_entropy_of_a_uniform_policy_is_log_v():
    policy = tabular_policy(vocabulary=3, length=2)
    policy.model.table.data.zero_()
    found = policy.score([trajectory(prompt(policy), [2, 0])]).entropies
    assert found[0].tolist() == pytest.approx([math.log(3)] * 2, abs=1e-6)


def test_entropy_of_masked_out_tokens_is_finite():
    """A logit of −inf means probability 0, and 0 · log 0 counts as 0."""
    policy = tabular_policy(vocabulary=3, length=1)
    policy.model.table.data[0] = torch.tensor([0.0, 0.0, -1e300], dtype=torch.float64)
    logprobs, entropies, _ = policy.score([trajectory(prompt(policy), [1])])
    assert entropies.item() == pytest.approx(math.log(2)) and logprobs.item() == pytest.approx(-math.log(2))


def test_token_batches_cover_all_rows_within_the_budget():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 50, (100,), generator=generator).tolist()
    batches = token_batches(lengths, 120)
    assert sorted(i for batch in batches for i in batch) == list(range(100))
    assert all(len(batch) * max(lengths[i] for i in batch) <= 120 for batch in batches)
    assert max(lengths) == lengths[batches[0][0]]  # the largest first, so that memory runs out at once or never
    assert token_batches([500], 120) == [[0]] and token_batches([], 120) == []


def test_gradient_checkpointing_recomputes_and_changes_nothing():
    """It must really happen (transformers skips it outside training mode), and leave values and gradients alone."""
    policy = build("llama")
    rows = ragged(policy, LENGTHS)
    expected = policy.score(rows).logprobs
    expected.sum().backward()
    expected_gradient = gradients(policy)
    calls = []
    for layer in policy.model.model.layers:
        layer.self_attn.register_forward_hook(lambda *_: calls.append(1))
    enable_gradient_checkpointing(policy.model)
    found = policy.score(rows).logprobs
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

    tokenizer = word_tokenizer(39)  # one word less than the model has rows
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", bos)])
    policy = replace(build("llama"), tokenizer=tokenizer)
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


PARTS = (
    "{% for m in messages %}{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %} w9 {% endfor %}"
)
NO_SYSTEM = "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }} w9{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (PARTS, ["w3", "w9", "w1", "w2", "w9"]),
        (NO_SYSTEM, ["w3", "w1", "w2", "w9"]),
        (NO_SYSTEM.replace("m['content']", "m['content'] | trim"), ["w3", "w1", "w2", "w9"]),
    ],
)
def test_a_template_never_swallows_the_question_or_the_system_prompt(template, words, capsys):
    policy = build("llama")
    policy.tokenizer.chat_template = template
    say_once.cache_clear()
    for _ in range(2):
        ids = encode_prompt(policy, "w1  w2", "w3").tolist()
        assert policy.tokenizer.convert_ids_to_tokens(ids) == words
    assert capsys.readouterr().out.count("no system role") == (template != PARTS)
    assert policy.tokenizer.convert_ids_to_tokens(encode_prompt(policy, "w1", "").tolist()) == ["w1", "w9"]


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content }}\ud800{% endfor %}",  # half a surrogate pair
        "{% for m in messages %}",
        "{% for m in messages %}w1 {% endfor %}",
        {"tool_use": "w1", "rag": "w2"},
        "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}{{ messages[0].content }}",
        "{{ messages[7].content.nothing }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_that_cannot_write_the_prompt_is_one_sentence(template):
    policy = build("llama")
    policy.tokenizer.chat_template = template
    assert end_of_turn(policy.tokenizer) == policy.tokenizer.eos_token_id
    with pytest.raises(InputError, match="chat template cannot write a prompt: [^\n]+$"):
        encode_prompt(policy, "w5", "w3")


def test_the_toy_and_a_template_that_fails_at_an_assistants_turn_find_their_end():
    tokenizer = word_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ raise_exception('no') }}{% endif %}{{ m.content }}"
        "{% endfor %}"
    )
    assert end_of_turn(tokenizer) == tokenizer.eos_token_id
    tokenizer.chat_template = PARTS.replace("w9", "<eos>")
    assert end_of_turn(tokenizer) == tokenizer.eos_token_id


def test_tokens_that_the_model_has_no_row_for(policy):
    """A padding token beyond the embedding is not used; one in a prompt is refused."""
    llama, tokenizer = build("llama").model, word_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.add_tokens(["w99"])
    policy = make_policy(llama, tokenizer)
    assert tokenizer.pad_token_id == 40 and policy.pad_id == 0
    policy.score([trajectory([1, 2], [3]), trajectory([1], [2])])
    with pytest.raises(InputError, match="has a token 41 that the model lacks"):
        encode_prompt(policy, "w99", "")
    tokenizer.eos_token = "<pad>"
    llama.generation_config.eos_token_id = None
    with pytest.raises(InputError, match="end-of-sequence"):
        make_policy(llama, tokenizer)


def test_a_base_models_next_question_is_not_its_answer():
    policy = tiny_toy()
    ids = policy.tokenizer(" 3 \\boxed{ 4 }\nQuestion: 1 + 1\nAnswer: \\boxed{ 2 }")["input_ids"]
    whole = policy.tokenizer.decode(ids)

    class Words:
        chat_template = None

        def decode(self, ids, skip_special_tokens):
            return "7 \\boxed{4}\n\nQuestion: 1 + 1\nAnswer: \\boxed{2}"

    assert response_text(replace(policy, tokenizer=Words()), []).strip() == "7 \\boxed{4}"
    assert response_text(policy, ids) == whole  # a chat model may say "Question:"


def test_the_digest_of_prompts_follows_template_and_day():
    policy = build("llama")
    digests = set()
    for template in (None, "{{ messages[-1].content }} w1", "{{ messages[-1].content }} w2"):
        policy.tokenizer.chat_template = template
        asked = encode_questions(policy, [Question("a", "w3", "1"), Question("b", "w4", "1")], "")
        assert questions_digest(asked) == questions_digest(asked) != questions_digest(asked[::-1])
        digests.add(questions_digest(asked))
    assert len(digests) == 3


def test_the_context_is_that_of_the_text_and_of_its_frequencies():
    from transformers import AutoConfig

    def context(**settings):
        return context_of(AutoConfig.for_model(**settings))

    assert context(model_type="gemma3", text_config={"max_position_embeddings": 77}) == 77
    assert context(model_type="bloom") == 2048 and context(model_type="bloom", seq_length=99) == 99
    assert context(model_type="mpt", max_seq_len=55) == 55 and context(model_type="mamba") == 2**20
    assert context(model_type="gpt2", n_positions=33) == 33
    long = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    assert context(model_type="phi3", rope_scaling=long, original_max_position_embeddings=44) == 44


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
    rows = ragged(policy, LENGTHS)
    assert torch.equal(policy.score(rows).logprobs, again.score(rows).logprobs)
    assert again.model.training is False


def test_short_names_resolve_and_others_are_refused(tmp_path):
    assert resolve_model_name("Qwen2.5-Math-1.5B") == "Qwen/Qwen2.5-Math-1.5B"
    assert len(BACKBONES) == 5 and all(resolve_model_name(name) == b.hub_id for name, b in BACKBONES.items())
    assert resolve_model_name("some/where") == "some/where"
    assert resolve_model_name(str(tmp_path)) == str(tmp_path)
    for bad in ("Qwen9-Math", "a/b/c", "./nothing/here", "~/model", "/no/such/folder", ""):
        with pytest.raises(InputError, match="neither a folder nor a hub id"):
            resolve_model_name(bad)


def test_folders_that_are_no_models_are_refused(tmp_path):
    with pytest.raises(InputError, match="no config.json"):
        load_policy(str(tmp_path), device=CPU)
    policy = tiny_toy()
    policy.model.save_pretrained(tmp_path / "weights")
    with pytest.raises(InputError, match="no tokenizer"):
        load_policy(str(tmp_path / "weights"), device=CPU)
    policy.tokenizer.save_pretrained(tmp_path / "weights")
    (tmp_path / "weights" / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(InputError, match="could not be loaded from that folder"):
        load_policy(str(tmp_path / "weights"), device=CPU)
    for device in ("cuda:77", "abacus", "meta", "hpu", "privateuseone", ""):
        with pytest.raises(InputError, match=f"device {device}"):
            resolve_device(device)


@pytest.fixture
def saved(tmp_path):
    """A loadable model folder to spoil."""
    policy = build("llama")
    policy.model.save_pretrained(tmp_path / "m")
    policy.tokenizer.save_pretrained(tmp_path / "m")
    return tmp_path / "m"


def change_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda f: change_weights(f, lambda w: w.pop("model.layers.1.mlp.up_proj.weight")), "1 missing keys, model.layers.1"),
        (lambda f: change_weights(f, lambda w: w.update(stray=torch.ones(2))), "1 unexpected keys, stray"),
        (lambda f: change_weights(f, lambda w: w.update({"model.norm.weight": torch.ones(3)})), "could not be loaded"),
        (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer.json"),
        (lambda f: (f / "adapter_config.json").write_text("{}"), "adapters alone"),
        (lambda f: change_json(f / "config.json", quantization_config={"quant_method": "bitsandbytes"}), "quantised"),
        (lambda f: change_json(f / "config.json", num_attention_heads=0), "could not be loaded"),
        (lambda f: (f / "config.json").write_text("[]"), "could not be loaded"),
        (lambda f: change_json(f / "config.json", model_type="nonesuch"), "could not be loaded"),
    ],
)  # fmt: skip
def test_a_spoiled_folder_is_one_sentence(saved, spoil, sentence):
    spoil(saved)
    with pytest.raises(InputError, match=sentence) as caught:
        load_policy(str(saved), device=CPU)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model_type", ["llama", "nonesuch"])
def test_code_of_a_model_folder_never_runs_whatever_stands_on_stdin(saved, model_type, monkeypatch):
    """Neither that of the model, of its configuration or tokenizer, nor a custom way to generate."""
    proof = saved / "it-ran"
    code = f"open({str(proof)!r}, 'w').close()\n"
    (saved / "own.py").write_text(code)
    (saved / "custom_generate").mkdir()
    (saved / "custom_generate" / "generate.py").write_text(code + "def generate(model, **more): pass\n")
    names = {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M", "AutoTokenizer": ["own.T", "own.T"]}
    change_json(saved / "config.json", model_type=model_type, auto_map=names)
    change_json(saved / "tokenizer_config.json", tokenizer_class="Own", auto_map=names)
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    for read in (lambda: load_policy(str(saved), device=CPU), lambda: load_shape(str(saved))):
        try:
            read()
        except InputError as error:
            assert "trust_remote_code" not in str(error)
    assert not proof.exists()


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
    with pytest.raises(InputError, match="cohere is not supported: it scales or caps its logits"):
        require_exact(make_policy(CohereForCausalLM(config), tokenizer))


def test_weights_that_are_not_finite_are_named():
    policy = build("llama")
    policy.model.get_input_embeddings().weight.data[15] = torch.nan  # of a token that is asked for
    with pytest.raises(InputError, match="not finite: its weights are damaged"):
        require_exact(policy)


def test_dropout_is_off():
    """π_θ must be one distribution: the same call twice gives the same log-probabilities."""
    policy = build("gpt2")  # GPT-2 configures a dropout of 0.1
    rows = ragged(policy, LENGTHS)
    assert torch.equal(policy.score(rows).logprobs, policy.score(rows).logprobs)
