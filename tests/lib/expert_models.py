"""Small mixtures of experts of transformers with random weights, in the form of published files.

`PUBLISHED` has every field of config.json as it is published, and `TINY` the smaller sizes of the test.
"""

import json

import pytest
from hybrid_models import torch

transformers = pytest.importorskip("transformers")

TINY = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "head_dim": 16, "initializer_range": 0.1, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
COMMON = {
    "attention_dropout": 0.0, "hidden_act": "silu", "torch_dtype": "bfloat16", "use_cache": True,
    "tie_word_embeddings": False, "transformers_version": "4.57.0",
}  # fmt: skip
QWEN = COMMON | {
    "attention_bias": False, "rms_norm_eps": 1e-6, "output_router_logits": False, "router_aux_loss_coef": 0.001,
}  # fmt: skip
DELTA = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_value_head_dim": 8,
}  # fmt: skip
YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 32, "type": "yarn"}
DEEPSEEK = COMMON | {
    "attention_bias": False, "aux_loss_alpha": 0.001, "ep_size": 1, "moe_layer_freq": 1, "pretraining_tp": 1,
    "rms_norm_eps": 1e-6, "rope_theta": 10000, "seq_aux": True,
}  # fmt: skip
SMALL_DEEPSEEK = {
    "num_key_value_heads": 4, "first_k_dense_replace": 1, "intermediate_size": 48, "kv_lora_rank": 16,
    "moe_intermediate_size": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 12,
}  # fmt: skip

PUBLISHED = {
    "qwen3_moe": QWEN | {
        "architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 1, "max_window_layers": 48,
        "mlp_only_layers": [], "model_type": "qwen3_moe", "norm_topk_prob": True, "rope_scaling": None,
        "rope_theta": 1000000.0, "sliding_window": None, "use_sliding_window": False,
    },
    "mixtral": COMMON | {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "output_router_logits": False,
        "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None,
    },
    "olmoe": COMMON | {
        "architectures": ["OlmoeForCausalLM"], "attention_bias": False, "clip_qkv": None, "model_type": "olmoe",
        "norm_topk_prob": False, "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_scaling": None,
        "rope_theta": 10000.0, "router_aux_loss_coef": 0.01,
    },
    "qwen3_next": QWEN | {  # Qwen3-Next-80B-A3B
        "architectures": ["Qwen3NextForCausalLM"], "decoder_sparse_step": 1, "full_attention_interval": 4,
        "mlp_only_layers": [], "model_type": "qwen3_next", "norm_topk_prob": True, "partial_rotary_factor": 0.25,
        "rope_scaling": None, "rope_theta": 10000000, "use_sliding_window": False,
    },
    "qwen3_5_moe_text": QWEN | {  # text_config of Qwen3.5-35B-A3B
        "attn_output_gate": True, "full_attention_interval": 4, "mamba_ssm_dtype": "float32",
        "mlp_only_layers": [], "model_type": "qwen3_5_moe_text", "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25,
            "rope_theta": 10000000, "rope_type": "default",
        },
    },
    "gpt_oss": COMMON | {  # gpt-oss-20b
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "experts_per_token": 4,
        "initial_context_length": 4096, "model_type": "gpt_oss", "output_router_logits": False, "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
        "rope_theta": 150000, "router_aux_loss_coef": 0.9, "swiglu_limit": 7.0,
    },
    "granitemoe": COMMON | {  # granite-3.1-3b-a800m
        "architectures": ["GraniteMoeForCausalLM"], "attention_bias": False, "attention_multiplier": 0.015625,
        "attention_dropout": 0.0, "embedding_multiplier": 12.0, "logits_scaling": 6.0, "model_type": "granitemoe",
        "output_router_logits": False, "residual_multiplier": 0.22, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 10000000.0, "router_aux_loss_coef": 0.0, "tie_word_embeddings": True,
    },
    "granitemoehybrid": COMMON | {  # granite-4.0-h-tiny
        "architectures": ["GraniteMoeHybridForCausalLM"], "attention_bias": False, "attention_multiplier": 0.0078125,
        "embedding_multiplier": 12, "init_method": "mup", "logits_scaling": 6, "mamba_chunk_size": 256,
        "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_proj_bias": False,
        "model_type": "granitemoehybrid", "normalization_function": "rmsnorm", "output_router_logits": False,
        "position_embedding_type": "nope", "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": None,
        "rope_theta": 10000, "router_aux_loss_coef": 0.0001, "tie_word_embeddings": True,
    },
    "glm4_moe": COMMON | {  # GLM-4.5-Air
        "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "model_type": "glm4_moe",
        "norm_topk_prob": True, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000, "use_qk_norm": False,
    },
    "deepseek_v2": DEEPSEEK | {  # DeepSeek-V2-Lite
        "architectures": ["DeepseekV2ForCausalLM"], "auto_map": {
            "AutoConfig": "configuration_deepseek.DeepseekV2Config",
            "AutoModel": "modeling_deepseek.DeepseekV2Model",
            "AutoModelForCausalLM": "modeling_deepseek.DeepseekV2ForCausalLM",
        },
        "model_type": "deepseek_v2", "n_group": 1, "n_shared_experts": 2,
        "norm_topk_prob": False, "q_lora_rank": None, "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        "routed_scaling_factor": 1.0, "scoring_func": "softmax", "topk_group": 1, "topk_method": "greedy",
    },
    "deepseek_v3": DEEPSEEK | {  # DeepSeek-V3
        "architectures": ["DeepseekV3ForCausalLM"], "auto_map": {
            "AutoConfig": "configuration_deepseek.DeepseekV3Config",
            "AutoModel": "modeling_deepseek.DeepseekV3Model",
            "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
        },
        "model_type": "deepseek_v3", "n_shared_experts": 1,
        "norm_topk_prob": True, "num_nextn_predict_layers": 1,
        "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    },
}  # fmt: skip
"""Fields of published config.json files by `model_type`, without those of TINY and SMALL."""

WITH_SHARED_MLP = {
    "granitemoeshared": PUBLISHED["granitemoe"]  # granite-3.0-moe with a shared MLP
    | {"architectures": ["GraniteMoeSharedForCausalLM"], "model_type": "granitemoeshared"}
}
"""The same of a family that differs from another one by its shared MLP."""

SMALL = {
    "qwen3_moe": {
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "intermediate_size": 48,
        "mlp_only_layers": [0],
    },
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 16},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 16},
    "qwen3_next": DELTA | {
        "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "intermediate_size": 48,
        "shared_expert_intermediate_size": 24, "num_key_value_heads": 1, "full_attention_interval": 2,
    },
    "qwen3_5_moe_text": DELTA | {
        "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24, "num_key_value_heads": 1,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "gpt_oss": {
        "num_local_experts": 8, "num_experts_per_tok": 4, "intermediate_size": 64, "hidden_size": 64,
        "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"],
    },
    "granitemoe": {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 16},
    "granitemoeshared": {
        "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 16, "shared_intermediate_size": 24,
    },
    "granitemoehybrid": {
        "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 16, "shared_intermediate_size": 24,
        "layer_types": ["mamba", "attention"], "mamba_n_heads": 4, "mamba_d_state": 16, "mamba_d_head": 16,
    },
    "glm4_moe": {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "intermediate_size": 48,
    },
    "deepseek_v2": SMALL_DEEPSEEK,
    "deepseek_v3": SMALL_DEEPSEEK | {"q_lora_rank": 24, "n_group": 4, "topk_group": 2},
}  # fmt: skip
"""Small sizes of each family, besides TINY."""


def fields_of(kind, **changes):
    """Return the fields of a config.json in the published form, with small sizes."""
    fields = (PUBLISHED | WITH_SHARED_MLP)[kind] | TINY | SMALL[kind]
    if kind.startswith(("deepseek", "olmoe")):  # their heads have no size of their own
        fields = {name: value for name, value in fields.items() if name != "head_dim"}
    return fields | changes


def make(kind, **changes):
    """Return a model with random weights, vectors and buffers, because some have no effect at their initial values."""
    fields = json.loads(json.dumps(fields_of(kind, **changes)))  # transformers changes nested objects
    fields = {name: x for name, x in fields.items() if name not in ("torch_dtype", "auto_map")}
    config = transformers.AutoConfig.for_model(**fields)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        if kind == "gpt_oss" and name.endswith("gate_up_proj"):
            parameter.data *= 8  # so that some inputs of activations are clamped
        is_bias = parameter.ndim == 1 or name.endswith("_bias")
        if is_bias and "inv_freq" not in name:
            parameter.data += (1.0 if "sinks" in name else 0.3) * torch.randn_like(parameter)
    return model


def save(kind, folder, **changes):
    """Write a model to a folder with a config.json in the published form, and return it."""
    model = make(kind, **changes)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(fields_of(kind, **changes)))
    return model


def logits_of(model, tokens):
    """Return the logits of a model of transformers as an array."""
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.numpy()
