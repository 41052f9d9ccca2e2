"""Fields of config.json that no code reads are named, and configs of the supported families need no naming."""

import json
import warnings
from typing import NamedTuple

import pytest

import specjax
from specjax.errors import CheckpointWarning
from specjax.models.loading.families import denoisers, llama, registry, unread_fields
from specjax.models.loading.families.config_fields import ConfigFields
from specjax.models.loading.families.gemma import gemma3
from specjax.models.loading.families.unread_fields import MAX_NAMES, describe_unread
from specjax.models.loading.formats.hf import parse_config
from specjax.planning.inputs.model_configs import builtin_configs

WITHOUT_CLASS = "mimo", "llada2_moe"  # their classes are in their files
FAMILIES = tuple(kind for kind in (*llama.HF_TYPES, *gemma3.HF_TYPES) if kind not in WITHOUT_CLASS)

OF_TRANSFORMERS_4 = {
    "add_cross_attention": False, "bad_words_ids": None, "begin_suppress_tokens": None, "chunk_size_feed_forward": 0,
    "cross_attention_hidden_size": None, "decoder_start_token_id": None, "diversity_penalty": 0.0, "do_sample": False,
    "early_stopping": False, "encoder_no_repeat_ngram_size": 0, "exponential_decay_length_penalty": None,
    "finetuning_task": None, "forced_bos_token_id": None, "forced_eos_token_id": None, "is_decoder": False,
    "is_encoder_decoder": False, "length_penalty": 1.0, "max_length": 20, "min_length": 0, "no_repeat_ngram_size": 0,
    "num_beam_groups": 1, "num_beams": 1, "num_return_sequences": 1, "output_attentions": False,
    "output_hidden_states": False, "output_scores": False, "prefix": None, "problem_type": None, "pruned_heads": {},
    "remove_invalid_values": False, "repetition_penalty": 1.0, "return_dict": True, "return_dict_in_generate": False,
    "sep_token_id": None, "suppress_tokens": None, "task_specific_params": None, "temperature": 1.0,
    "tf_legacy_loss": False, "tie_encoder_decoder": False, "tokenizer_class": None, "top_k": 50, "top_p": 1.0,
    "torchscript": False, "torch_dtype": "bfloat16", "typical_p": 1.0, "use_bfloat16": False,
}  # fmt: skip
"""The fields that every config of transformers 4 can have besides those of its family."""

OF_RELEASES = {
    "SmolLM2": ("llama", {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {}}),
    "Qwen2.5": ("qwen2", {"use_mrope": False, "sliding_window": 131072, "use_sliding_window": False}),
    "Phi-4-mini": ("phi3", {
        "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False, "attention_bias": False,
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
    }),
    "Gemma 2": ("gemma2", {"hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid"}),
    "SDAR": ("sdar", {
        "debug": False, "ep_size": 1, "fuse_cross_entropy": True, "micro_forward": False, "skip_checkpoint": False,
        "use_deepep": False, "block_size": 4,
    }),
}  # fmt: skip

LLADA = {
    "activation_type": "silu", "alibi": False, "alibi_bias_max": 8.0, "attention_dropout": 0.0,
    "attention_layer_norm": False, "attention_layer_norm_with_affine": True, "bias_for_layer_norm": False,
    "block_group_size": 1, "block_type": "llama", "d_model": 64, "embedding_dropout": 0.0, "embedding_size": 128,
    "eos_token_id": 126, "flash_attention": False, "include_bias": False, "include_qkv_bias": False,
    "init_cutoff_factor": None, "init_device": "meta", "init_fn": "mitchell", "init_std": 0.02,
    "input_emb_norm": False, "layer_norm_type": "rms", "layer_norm_with_affine": True, "mask_token_id": 127,
    "max_sequence_length": 4096, "mlp_hidden_size": 96, "mlp_ratio": 4, "model_type": "llada",
    "multi_query_attention": None, "n_heads": 4, "n_kv_heads": 4, "n_layers": 2, "pad_token_id": 126,
    "precision": "amp_bf16", "residual_dropout": 0.0, "rms_norm_eps": 1e-05, "rope": True,
    "rope_full_precision": True, "rope_theta": 500000.0, "scale_logits": False, "transformers_version": "4.46.3",
    "use_cache": False, "vocab_size": 128, "weight_tying": False,
}  # fmt: skip


class SpecialTokens(NamedTuple):
    """The fields of a tokenizer that concern its mask token."""

    names: dict
    vocab: list
    eos: tuple


def unread(config: dict) -> list[str]:
    """Return the names that loading a config.json reports."""
    fields = ConfigFields(json.loads(json.dumps(config, default=str)), "config.json")
    parse_config(fields, dtype="float32", name="tiny")
    denoisers.read_denoiser_settings(fields, SpecialTokens({}, ["<|MASK|>"], ()))
    sentences = describe_unread(fields)
    assert len(sentences) <= 1
    return sentences[0].split(": ")[1].split(", ") if sentences else []


def config_of(kind: str) -> dict:
    transformers = pytest.importorskip("transformers")
    base = {"sdar": "qwen3"}.get(kind, kind)
    return transformers.AutoConfig.for_model(base).to_dict() | {"model_type": kind}


@pytest.mark.parametrize("kind", FAMILIES)
def test_configs_that_transformers_writes_are_read_without_a_word(kind, tmp_path):
    config = config_of(kind)
    assert unread(config) == []
    written = ConfigFields(
        json.loads(pytest.importorskip("transformers").AutoConfig.for_model(kind).to_json_string()), ""
    )
    parse_config(written, dtype="float32", name="tiny")
    assert not describe_unread(written)
    nested = {"text_config": config["text_config"] | OF_TRANSFORMERS_4} if "text_config" in config else {}
    assert unread(config | OF_TRANSFORMERS_4 | nested) == []


@pytest.mark.parametrize("name", OF_RELEASES)
def test_configs_of_releases_are_read_without_a_word(name):
    kind, fields = OF_RELEASES[name]
    assert unread(config_of(kind) | fields) == []


def test_the_config_of_llada_is_read_without_a_word():
    assert unread(LLADA) == []


@pytest.mark.parametrize("name", builtin_configs())
def test_configs_that_specjax_writes_are_read_without_a_word(name):
    config = builtin_configs()[name]()
    assert unread(registry.by_config(config).config_to_hf(config)) == []


CHANGES = {
    "attention_multiplier": 0.5, "attn_logit_softcapping": 30.0, "embedding_multiplier": 12.0,
    "final_logit_softcapping": 30.0, "is_causal": False, "logit_scale": 0.0625, "logits_scaling": 8.0,
    "no_rope_layers": [1, 0], "num_experts": 8,
    "rope_fraction": 0.5, "qk_layernorm": True, "query_pre_attn_scalar": 144, "residual_multiplier": 0.22,
    "rope_interleaved": True, "rope_percentage": 0.25, "scale_emb": 12, "sliding_window": 16, "use_mup": True,
    "use_qk_norm": True, "use_sliding_window": True, "rope_dim": 32, "layer_norm_eps": 1e-3,
}  # fmt: skip
"""Fields of other families that change the results of one that does not read them."""


@pytest.mark.parametrize("name", CHANGES)
def test_a_field_that_changes_the_results_is_named(name):
    config = config_of("llama")
    assert unread(config | {name: CHANGES[name]}) == [name]
    assert name not in unread_fields.HARMLESS


def test_fields_of_nested_objects_are_named():
    assert unread(config_of("llama") | {"rope_parameters": {"rope_type": "default", "mscale": 0.7}}) == [
        "rope_parameters.mscale"
    ]
    assert unread(config_of("llama") | {"ffn_config": {"act": "gelu"}}) == ["ffn_config"]
    gemma = config_of("gemma3")
    gemma["text_config"] |= {"altup": 3}
    gemma["text_config"]["rope_parameters"]["full_attention"]["low_freq"] = 1.0
    assert unread(gemma) == ["text_config.rope_parameters.full_attention.low_freq", "text_config.altup"]


def test_the_list_is_short_and_without_control_characters():
    names = unread(config_of("llama") | {f"odd\x1b{i}": 1 for i in range(MAX_NAMES + 3)})
    assert len(names) == MAX_NAMES and names[0] == "odd\\x1b0" and names[-1].endswith(" and 3 more")


def test_loading_warns_once(tiny, tmp_path):
    folder = tiny.save(tiny.model("llama"), tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        specjax.load(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"logit_scale": 2.0}))
    with pytest.warns(CheckpointWarning, match="a field that is not read, .*: logit_scale$") as caught:
        specjax.load(folder)
    assert len(caught) == 1 and caught[0].filename == __file__
