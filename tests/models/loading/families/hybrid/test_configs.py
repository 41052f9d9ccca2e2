"""Configs of hybrid families in the form of their releases, with fields left out, and with fields that are refused.

The classes of transformers are the reference for fields that are left out.
"""

import json
import math

import pytest
from hybrid_families import without

from specjax.errors import UsageError
from specjax.models.loading.families.config_fields import ConfigFields
from specjax.models.loading.families.unread_fields import describe_unread
from specjax.models.loading.formats import hf

transformers = pytest.importorskip("transformers")

COMMON = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 64, "initializer_range": 0.02, "intermediate_size": 96, "max_position_embeddings": 4096,
    "num_attention_heads": 4, "num_hidden_layers": 4, "num_key_value_heads": 2, "pad_token_id": 0,
    "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 20_000, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.57.0", "use_cache": True, "vocab_size": 128,
}  # fmt: skip
DELTA = {
    "full_attention_interval": 2, "head_dim": 16, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_value_head_dim": 8, "mlp_only_layers": [],
}  # fmt: skip
MIXER = {
    "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 16, "mamba_d_state": 8,
    "mamba_expand": 2, "mamba_n_groups": 2, "mamba_n_heads": 8, "mamba_proj_bias": False, "mlp_bias": False,
}  # fmt: skip
TIME_STEPS = {"time_step_floor": 1e-4, "time_step_max": 0.1, "time_step_min": 0.001}
ROPE = {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25}
QWEN3_5 = without(COMMON, "rope_theta", "rope_scaling") | DELTA | {
    "attn_output_gate": True, "layer_types": ["linear_attention", "full_attention"] * 2, "model_type": "qwen3_5_text",
    "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
    "rope_parameters": ROPE | {"mrope_interleaved": True, "mrope_section": [1, 1, 0]},
}  # fmt: skip
PUBLISHED = {
    "Qwen3.5": QWEN3_5,
    "Qwen3-Next": COMMON | DELTA | {
        "decoder_sparse_step": 1, "model_type": "qwen3_next", "moe_intermediate_size": 32, "norm_topk_prob": True,
        "num_experts": 0, "num_experts_per_tok": 2, "output_router_logits": False, "partial_rotary_factor": 0.5,
        "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 32, "use_sliding_window": False,
    },
    "LFM2": without(COMMON, "rms_norm_eps", "intermediate_size", "hidden_act") | {
        "block_auto_adjust_ff_dim": True, "block_dim": 64, "block_ff_dim": 96, "block_ffn_dim_multiplier": 1.0,
        "block_mlp_init_scale": 1.0, "block_multiple_of": 16, "block_norm_eps": 1e-5, "block_out_init_scale": 1.0,
        "block_use_swiglu": True, "block_use_xavier_init": True, "conv_L_cache": 3, "conv_bias": False, "conv_dim": 64,
        "conv_dim_out": 64, "conv_use_xavier_init": True, "full_attn_idxs": [1, 3], "model_type": "lfm2",
        "norm_eps": 1e-5, "num_heads": 4, "tie_embedding": True, "use_pos_enc": True,
    },
    "Mamba-2": TIME_STEPS | {
        "bos_token_id": 0, "chunk_size": 256, "conv_kernel": 4, "eos_token_id": 0, "expand": 2, "head_dim": 16,
        "hidden_act": "silu", "hidden_size": 64, "initializer_range": 0.1, "intermediate_size": 128,
        "layer_norm_epsilon": 1e-5, "model_type": "mamba2", "n_groups": 2, "norm_before_gate": True, "num_heads": 8,
        "num_hidden_layers": 2, "pad_token_id": 0, "rescale_prenorm_residual": False, "residual_in_fp32": True,
        "rms_norm": True, "state_size": 8, "tie_word_embeddings": True, "time_step_init_scheme": "random",
        "time_step_limit": [0.0, math.inf], "time_step_rank": 48, "time_step_scale": 1.0, "torch_dtype": "float32",
        "use_bias": False, "use_cache": True, "use_conv_bias": True, "use_mambapy": False, "vocab_size": 128,
    },
    "Bamba": COMMON | MIXER | {
        "attn_layer_indices": [1, 3], "attn_rotary_emb": 8, "model_type": "bamba", "num_logits_to_keep": 1,
        "use_mamba_kernels": True,
    },
    "Nemotron-H": without(COMMON, "hidden_act") | TIME_STEPS | {
        "attention_head_dim": 16, "chunk_size": 128, "conv_kernel": 4, "expand": 2, "hidden_dropout": 0.0,
        "hybrid_override_pattern": "M-*M", "layer_norm_epsilon": 1e-5, "mamba_head_dim": 16,
        "mamba_hidden_act": "silu", "mamba_num_heads": 8, "mamba_proj_bias": False, "mlp_bias": False,
        "mlp_hidden_act": "relu2", "model_type": "nemotron_h", "n_groups": 2, "num_logits_to_keep": 1,
        "num_query_groups": 2, "rescale_prenorm_residual": True, "residual_in_fp32": False, "sliding_window": None,
        "ssm_state_size": 8, "time_step_limit": [0.0, math.inf], "time_step_rank": 256, "use_bias": False,
        "use_conv_bias": True, "use_mamba_kernels": True,
    },
    "Granite 4": COMMON | MIXER | {
        "attention_multiplier": 0.0625, "embedding_multiplier": 12, "init_method": "mup",
        "layer_types": ["mamba", "attention"] * 2, "logits_scaling": 6, "model_type": "granitemoehybrid",
        "normalization_function": "rmsnorm", "num_experts_per_tok": 0, "num_local_experts": 0,
        "output_router_logits": False, "position_embedding_type": "nope", "residual_multiplier": 0.22,
        "router_aux_loss_coef": 0.01, "shared_intermediate_size": 96,
    },
    "Falcon-H1": COMMON | MIXER | TIME_STEPS | {
        "attention_in_multiplier": 1.0, "attention_out_multiplier": 0.9375, "attn_layer_indices": None,
        "embedding_multiplier": 5.65, "head_dim": 16, "key_multiplier": 0.39, "lm_head_multiplier": 0.039,
        "mamba_d_ssm": 128, "mamba_norm_before_gate": False, "mamba_rms_norm": False, "mamba_use_mlp": True,
        "mlp_expansion_factor": 8, "mlp_multipliers": [0.88, 0.58], "model_type": "falcon_h1",
        "num_logits_to_keep": 1, "projectors_bias": False, "rope_theta": 100_000_000_000.0, "ssm_in_multiplier": 1.25,
        "ssm_multipliers": [0.35, 0.25, 0.35, 0.5, 0.35], "ssm_out_multiplier": 0.235, "time_step_rank": "auto",
        "use_mamba_kernels": True,
    },
}  # fmt: skip
"""Configs with all fields that released files have, and small sizes."""


def parse(fields):
    config, _ = hf.parse_config(ConfigFields(fields, "config.json"), dtype="float32")
    return config


def completed(fields):
    """Return the fields as the class of transformers writes them."""
    config = transformers.AutoConfig.for_model(**fields)
    return json.loads(config.to_json_string(use_diff=False))


@pytest.mark.parametrize("release", PUBLISHED)
def test_all_fields_of_releases_are_read(release):
    fields = ConfigFields(PUBLISHED[release], "config.json")
    config, _ = hf.parse_config(fields, dtype="float32")
    assert describe_unread(fields) == ()
    assert config == parse(completed(PUBLISHED[release]))


SIZES = {"hidden_size", "num_key_value_heads"}
REQUIRED = {
    "Qwen3.5": {"linear_num_key_heads", "num_hidden_layers"},
    "Qwen3-Next": {"linear_num_key_heads"},
    "LFM2": {"num_key_value_heads"},
    "Mamba-2": {"hidden_size", "num_heads", "head_dim"},
    "Bamba": SIZES | {"num_attention_heads", "mamba_n_heads"},
    "Nemotron-H": {"num_key_value_heads", "hybrid_override_pattern"},
    "Granite 4": {"hidden_size", "num_hidden_layers", "num_local_experts", "mamba_n_heads"},
    "Falcon-H1": {"num_key_value_heads", "mamba_n_heads", "mamba_d_ssm"},
}
"""Fields whose default does not fit the other sizes."""


@pytest.mark.parametrize("release", PUBLISHED)
def test_fields_that_are_left_out_have_the_values_of_transformers(release):
    fields = PUBLISHED[release]
    for name in fields.keys() - {"model_type"}:
        sparse = without(fields, name)
        if name in REQUIRED[release]:
            with pytest.raises(UsageError):
                parse(sparse)
        else:
            assert parse(sparse) == parse(completed(sparse)), name


def test_rotated_part_of_qwen3_5():
    """The two places of the field, and the default of the class."""
    theta = {"rope_theta": 10_000_000}
    rotated = lambda rope, **top: (
        parse(without(QWEN3_5, "rope_parameters") | {"rope_parameters": rope} | top).rotary_dim
    )
    assert rotated(ROPE) == rotated(theta) == rotated(theta, partial_rotary_factor=0.25) == 4
    assert rotated(theta | {"partial_rotary_factor": 0.5}) == rotated(theta, partial_rotary_factor=0.5) == 8
    assert rotated(theta, partial_rotary_factor=None) == 4
    with pytest.raises(UsageError, match=r"partial_rotary_factor 0.5 and rope_parameters.partial_rotary_factor 0.25"):
        rotated(ROPE, partial_rotary_factor=0.5)


def test_text_fields_of_a_multimodal_config():
    text = PUBLISHED["Qwen3.5"]
    images = {
        "architectures": ["Qwen3_5ForConditionalGeneration"], "image_token_id": 126, "model_type": "qwen3_5",
        "text_config": text, "tie_word_embeddings": False, "video_token_id": 127, "vision_end_token_id": 125,
        "vision_config": {"depth": 1, "hidden_size": 8}, "vision_start_token_id": 124,
    }  # fmt: skip
    fields = ConfigFields(images, "config.json")
    assert hf.parse_config(fields, dtype="float32")[0] == parse(text) and describe_unread(fields) == ()
    outside = images | {"tie_word_embeddings": True, "text_config": without(text, "tie_word_embeddings")}
    assert parse(outside).tied and not parse(images).tied
    with pytest.raises(UsageError, match="lacks the field text_config"):
        parse(without(images, "text_config"))


def test_kinds_by_list_interval_and_letters():
    qwen = PUBLISHED["Qwen3.5"]
    assert parse(without(qwen, "layer_types")) == parse(qwen) == parse(qwen | {"layer_types": None})
    third = parse(without(qwen, "layer_types") | {"full_attention_interval": 3, "num_hidden_layers": 5})
    assert [kind.attends for kind in third.kinds] == [False, False, True, False, False]
    lfm2 = PUBLISHED["LFM2"] | {"layer_types": ["full_attention", "conv", "conv", "conv"]}
    assert [kind.attends for kind in parse(lfm2).kinds] == [True, False, False, False]  # not those of full_attn_idxs
    granite = PUBLISHED["Granite 4"] | {"layer_types": ["attention"] * 4, "position_embedding_type": "rope"}
    assert all(kind.attends for kind in parse(granite).kinds) and parse(granite).rotates


REFUSED = [
    ("Qwen3.5", {"attn_output_gate": False}, "attn_output_gate false, which specjax does not support .only true"),
    ("Qwen3.5", {"hidden_size": 64.0}, "hidden_size 64.0, which must be a whole number"),
    ("Qwen3.5", {"attention_bias": True}, "sets attention_bias"),
    ("Qwen3.5", {"hidden_act": "gelu"}, 'hidden_act "gelu"; specjax supports silu only'),
    ("Qwen3.5", {"full_attention_interval": 0, "layer_types": None}, "full_attention_interval 0, which must be"),
    ("Qwen3.5", {"layer_types": ["linear_attention"] * 3}, "3 layer_types, but num_hidden_layers is 4"),
    ("Qwen3.5", {"layer_types": ["sliding_attention"] * 4}, '"sliding_attention" among its layer_types'),
    ("Qwen3.5", {"linear_num_value_heads": 3}, "linear_num_value_heads 3, which must be a multiple"),
    ("Qwen3.5", {"rope_parameters": ROPE | {"rope_type": "dynamic"}}, 'RoPE scaling "dynamic"'),
    ("Qwen3-Next", {"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok 5, which must be at most 4"),
    ("LFM2", {"block_use_swiglu": False}, "block_use_swiglu false, which specjax does not support"),
    ("LFM2", {"use_pos_enc": False}, "use_pos_enc false, which specjax does not support"),
    ("LFM2", {"conv_L_cache": 1}, "conv_L_cache 1, which must be a whole number from 2"),
    ("LFM2", {"block_multiple_of": 0}, "block_multiple_of 0, which must be"),
    ("Mamba-2", {"rms_norm": False}, "rms_norm false, which specjax does not support"),
    ("Granite 4", {"normalization_function": "layernorm"}, 'normalization_function "layernorm", which specjax does'),
    ("Nemotron-H", {"sliding_window": 64}, "has a sliding_window, which specjax does not support"),
    ("Falcon-H1", {"mamba_d_ssm": None, "mamba_expand": 1.5}, "mamba_expand 1.5, which must be a whole number"),
    ("Falcon-H1", {"mamba_d_head": 8}, "8 heads of 8 numbers in mamba_n_heads and mamba_d_head"),
]  # fmt: skip


@pytest.mark.parametrize(("release", "changes", "message"), REFUSED)
def test_fields_that_are_refused(release, changes, message):
    with pytest.raises(UsageError, match=message) as error:
        parse(PUBLISHED[release] | changes)
    assert "\n" not in str(error.value)


def test_expansion_of_falcon_h1_has_no_effect_beside_its_width():
    fields = PUBLISHED["Falcon-H1"]
    assert parse(fields | {"mamba_expand": None}) == parse(fields | {"mamba_expand": 9}) == parse(fields)
    assert parse(fields | {"mamba_d_ssm": None}).mamba2.inner == 128
