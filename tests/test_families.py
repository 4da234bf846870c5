"""Every causal language model that transformers can build small: exact here, or refused when it is loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import word_tokenizer
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from nano_exgrpo.errors import InputError
from nano_exgrpo.infra import loading
from nano_exgrpo.infra.checkpoint import save_model
from nano_exgrpo.infra.loading import load_policy
from nano_exgrpo.infra.precision import add_lora
from nano_exgrpo.policy import Policy, enable_gradient_checkpointing
from nano_exgrpo.questions import Question
from nano_exgrpo.rollout import generate_responses
from nano_exgrpo.trajectory import Trajectory

CONTEXT = 64
# What a configuration calls its sizes, and how small they can be.
SIZES = {
    40: "vocab_size vocab_size_per_layer_input",
    16: "hidden_size d_model n_embd dim embed_dim embedding_size emb_dim word_embed_proj_dim lru_width rotary_dim_total "
    "input_embedding_size output_embedding_size",
    24: "intermediate_size ffn_dim n_inner d_ff decoder_ffn_dim encoder_ffn_dim ffn_hidden_size dim_ff "
    "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size shared_intermediate_size "
    "intermediate_size_mlp dense_intermediate_size",
    2: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers num_encoder_layers "
    "num_key_value_heads num_kv_heads num_experts_per_tok top_k_experts moe_k moe_topk moe_top_k num_experts_per_token "
    "linear_num_key_heads linear_num_value_heads index_n_heads mamba_d_conv mamba_expand patch_size depth",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads head_dim "
    "num_encoder_attention_heads num_decoder_attention_heads attention_head_dim global_head_dim num_experts "
    "num_local_experts n_routed_experts moe_num_experts qk_nope_head_dim qk_rope_head_dim v_head_dim mamba_d_state "
    "state_size mamba_num_heads mamba_n_heads mamba_dt_rank time_step_rank linear_key_head_dim linear_value_head_dim "
    "index_head_dim hidden_size_per_layer_input rotary_dim image_size",
    8: "q_lora_rank kv_lora_rank qk_head_dim mamba_head_dim mamba_d_head mamba_chunk_size chunk_size sliding_window",
    1: "n_shared_experts n_group topk_group mamba_n_groups type_vocab_size num_memory_blocks first_k_dense_replace",
    0: "bos_token_id eos_token_id pad_token_id decoder_start_token_id",
    CONTEXT: "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions seq_length index_topk",
}
SMALL = {name: size for size, names in SIZES.items() for name in names.split()}
# What else a family needs in order to be built.
MORE: dict[str, dict[str, Any]] = {
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 4, "head_dim": 8, "n_groups": 1},
    "phi3": {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.0],
            "long_factor": [2.0, 3.0],
        },
        "original_max_position_embeddings": CONTEXT,
        "max_position_embeddings": 128,
    },
    **{
        name: {"num_key_value_heads": 4, "head_dim": "absent"}
        for name in "axk1 axk2 bailing_hybrid deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa kimi_linear longcat_flash "
        "minicpm3 sarvam_mla youtu".split()
    },
    "dory": {"sliding_window": CONTEXT, "n_input_layers": 0, "n_output_layers": 0},
    "nemotron_h": {
        "layer_types": ["linear_attention", "full_attention"],
        "ssm_state_size": 4,
        "n_groups": 1,
        "chunk_size": 8,
        "mamba_head_dim": 8,
    },
    "zaya": {"num_experts_per_tok": 1},
    "xlm": {"causal": True},
    "diffllama": {"attention_dropout": 0.0},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layers_block_type": ["mamba", "attention"]},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "falcon_h1": {"mamba_d_ssm": 32},
    "bloom": {"seq_length": CONTEXT},
}
# Families that are not tried, and why.
SKIPPED = {
    family: reason
    for reason, families in {
        "its smallest model has 48 million weights": "blt",
        "its configuration allows no two layers of width 16": "cohere_compass_text dbrx dots3_note dots3_note_text gemma4_assistant "
        "longcat_flash qwen4_exp qwen4_exp_text reformer zamba",
        "transformers builds a part of it that it then does not load": "emu3 mllama",
        "it needs a package for images": "gemma3n",
        "it is no language model without its music or speech part": "musicgen musicgen_melody",
        "saving takes its vocabulary to be larger": "inkling2_loop_text inkling2_text",
    }.items()
    for family in families.split()
}
# Families that are refused when they are loaded, and why.
REFUSED = {
    family: reason
    for reason, families in {
        "layers between": "bert big_bird camembert data2vec-text electra ernie inkling_text megatron-bert minicpm3 "
        "modernbert-decoder rembert roberta roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl",
        "scales or caps": "beam cohere cohere2 cohere2_moe gemma2 gemma3n_text nanochat prophetnet recurrent_gemma vaultgemma xlstm",
        "later tokens": "cpmant xlnet",
        "generates other tokens": "bart bigbird_pegasus blenderbot blenderbot-small deepseek_v4 git marian mbart moshi mvp "
        "pegasus plbart rwkv trocr whisper xlm",
        "cannot be asked": "gemma4_unified_assistant llama4 llama4_text xmod",
    }.items()
    for family in families.split()
}
UNBOUNDED = set("falcon_mamba mamba mamba2".split())  # of any context
NO_LOOP = set(
    "axk2 bailing_hybrid bamba deepseek_v32 falcon_h1 falcon_mamba glm_moe_dsa granitemoehybrid hy_v4 jamba kimi_linear lara_mini lfm2 lfm2_moe lfm3 mamba "
    "mamba2 nemotron_h olmo_hybrid openai-gpt qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next "
    "zamba2 zaya".split()
)
NO_CHECKPOINTING = set("ctrl gpt_neox_japanese openai-gpt".split())
NO_LORA = {"falcon"}  # whose linear layers are of a kind of their own


def small(kind: type[PretrainedConfig], more: dict[str, Any]) -> PretrainedConfig:
    """A configuration of this kind with the sizes above, and all dropout that it knows."""
    usual = kind()
    names = set(usual.to_dict()) | set(usual.attribute_map)
    settings: dict[str, Any] = {name: size for name, size in SMALL.items() if name in names}
    settings.update({n: 0.1 for n in names if "drop" in n and isinstance(getattr(usual, n, None), float)})
    if "is_decoder" in names:
        settings["is_decoder"] = True
    for name in ("layer_types", "layers_block_type", "mlp_layer_types"):  # one layer of each of the first two types
        types = getattr(usual, name, None)
        meant = getattr(kind, usual.attribute_map.get(name, name), None)
        if types and isinstance(types, (list, tuple)) and not isinstance(meant, property):
            settings[name] = (list(dict.fromkeys(types)) * 2)[:2]
    for name in usual.sub_configs:
        if isinstance(part := getattr(usual, name, None), PretrainedConfig):
            settings[name] = small(type(part), more.get(name, {})).to_dict()
    settings.update({name: value for name, value in more.items() if not name.endswith("_config")})
    return kind(**{name: value for name, value in settings.items() if value != "absent"})


def build_folder(family: str, folder: Any) -> None:
    """A folder of a random model of a family, and a tokenizer."""
    torch.manual_seed(0)
    config = small(CONFIG_MAPPING[family], MORE.get(family, {}))
    with torch.device("meta"):
        weights = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    assert weights < 2e7, f"{weights} weights are not small"
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # larger than at the start of training, so that every part of it matters
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.generation_config = GenerationConfig(eos_token_id=0, top_k=3, temperature=0.3, do_sample=True)
    model.save_pretrained(folder)


def own_logprobs(policy: Policy, prompt: torch.Tensor, response: torch.Tensor) -> torch.Tensor:
    """log softmax [T, V] of the model's own logits at the response's tokens."""
    with torch.no_grad():
        logits = policy.model(input_ids=torch.cat([prompt, response])[None], use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1].float().log_softmax(-1)


def drawn_logprobs(policy: Policy, prompts: list[torch.Tensor]) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """For each prompt, of two samples: response [T], and log softmax [T, V] of what its tokens were drawn from."""
    steps: list[torch.Tensor] = []

    def watch(module: Any, arguments: Any, output: torch.Tensor) -> None:
        steps.append(output.reshape(len(output), -1, output.shape[-1])[:, -1].float().log_softmax(-1))

    hook = policy.model.get_output_embeddings().register_forward_hook(watch)
    responses = generate_responses(policy, prompts, 2, max_new_tokens=9)
    hook.remove()
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    if len(steps[0]) == len(prompts):  # the loop reads a prompt once for its samples
        steps[0] = steps[0].repeat_interleave(2, 0)
    at = {prompt: 2 * place for place, prompt in enumerate(order)}
    return [
        [
            (response, torch.stack([step[at[i] + sample] for step in steps]))
            for sample, response in enumerate(responses[i])
        ]
        for i in range(len(prompts))
    ]


def near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(found, expected, rtol=0, atol=3e-5)


def check(family: str, folder: Any) -> None:
    build_folder(family, folder / "m")
    if family in REFUSED:
        with pytest.raises(InputError, match=f"model type .* is not supported: it .*{REFUSED[family]}"):
            load_policy(str(folder / "m"), device=torch.device("cpu"))
        return
    policy = load_policy(str(folder / "m"), device=torch.device("cpu"))
    assert policy.context == (2**20 if family in UNBOUNDED else CONTEXT)

    rng = torch.Generator().manual_seed(3)
    lengths = [(3, 5), (1, 1), (6, 2), (CONTEXT - 20, 20)]
    rows = [
        Trajectory(
            Question(str(i), "", "", prompt_ids=torch.randint(1, 40, (p,), generator=rng)),
            torch.randint(1, 40, (r,), generator=rng),
            "",
        )
        for i, (p, r) in enumerate(lengths)
    ]
    scored = policy.score(rows).logprobs  # [4, 20]
    for row, found in zip(rows, scored):
        expected = own_logprobs(policy, row.prompt_ids, row.response_ids)
        expected = expected.gather(1, row.response_ids[:, None])[:, 0]
        assert near(found[: len(expected)], expected), "score is not what the model says"
        assert near(policy.score([row]).logprobs[0], expected), "a row alone is not the row beside others"

    for sampler in ("generate", "loop"):
        asked = replace(policy, sampler=sampler, stop_ids=())
        prompts = [torch.tensor([7, 5, 9, 7, 11, 20]), torch.tensor([3, 13])]
        if sampler == "loop" and family in NO_LOOP:
            with pytest.raises(InputError, match="use --sampler generate"):
                generate_responses(asked, prompts, 2, max_new_tokens=9)
            continue
        for prompt, samples in zip(prompts, drawn_logprobs(asked, prompts)):
            for response, drawn in samples:
                assert near(drawn, own_logprobs(policy, prompt, response)), f"{sampler} draws from something else"

    policy.model.zero_grad()
    policy.score(rows).logprobs.sum().backward()
    gradient = gradients(policy)
    if family in NO_CHECKPOINTING:
        with pytest.raises(InputError, match="--gradient-checkpointing"):
            enable_gradient_checkpointing(policy.model)
    else:
        enable_gradient_checkpointing(policy.model)
        first, second = policy.score(rows).logprobs, policy.score(rows).logprobs
        assert torch.equal(first, second) and near(first, scored), "checkpointing changes log-probabilities"
        policy.model.zero_grad()
        first.sum().backward()
        assert (gradients(policy) - gradient).norm() < 1e-4 * gradient.norm(), "checkpointing changes gradients"

    if family in NO_LORA:
        with pytest.raises(InputError, match="--lora-rank"):
            add_lora(policy.model, 2)
        return
    add_lora(policy.model, 2)
    assert near(policy.score(rows).logprobs, scored)
    trained = [p for p in policy.model.parameters() if p.requires_grad]
    policy.score(rows).logprobs.sum().backward()
    with torch.no_grad():
        for p in trained:
            if p.grad is not None:
                p.add_(p.grad.sign(), alpha=0.02)
    adapted = policy.score(rows).logprobs
    assert (adapted - scored).abs().max() > 1e-3, "adapters change nothing"
    save_model(policy, folder / "merged")
    again = load_policy(str(folder / "merged"), device=torch.device("cpu"))
    assert near(again.score(rows).logprobs, adapted), "the merged model is another one"
    assert not any("lora_" in name for name in again.model.state_dict())


def gradients(policy: Policy) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None])


FAMILIES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
USUAL = "llama qwen2 qwen3 gpt2 gemma2 gemma3_text opt olmoe phi3 mamba lfm2 bert mbart bloom".split()


@pytest.mark.parametrize(
    "family", [name if name in USUAL else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_a_family_is_exact_or_refused(family: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if family in SKIPPED:
        pytest.skip(SKIPPED[family])
    monkeypatch.setattr(loading, "read_tokenizer", lambda name: word_tokenizer())  # whatever class the family has
    check(family, tmp_path)


def test_the_tables_name_families_that_there_are() -> None:
    """A table of another version of transformers may name families that this one has not; none stands in two."""
    assert set(USUAL) <= set(FAMILIES)
    assert not set(SKIPPED) & set(REFUSED)
