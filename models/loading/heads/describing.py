"""The parts of config.json that several kinds of heads share."""

from __future__ import annotations

from typing import Any

from specjax.models.llama import LlamaConfig
from specjax.version import __version__


def described_layers(c: LlamaConfig) -> dict[str, Any]:
    """Of decoder layers, as Hugging Face's configs have them."""
    scaling = c.rope_scaling
    rope: dict[str, Any] | None = None
    if scaling is not None:
        rope = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            rope |= {
                "low_freq_factor": scaling.low, "high_freq_factor": scaling.high,
                "original_max_position_embeddings": scaling.original_positions,
            }  # fmt: skip
        if scaling.kind == "yarn":
            rope |= {
                "beta_slow": scaling.low, "beta_fast": scaling.high, "attention_factor": scaling.amplitude,
                "original_max_position_embeddings": scaling.original_positions, "truncate": scaling.whole,
            }  # fmt: skip
    return {
        "model_type": "qwen3" if c.qk_norm else "qwen2" if c.qkv_bias else "mistral" if c.window else "llama",
        "vocab_size": c.vocab_size,
        "hidden_size": c.width,
        "intermediate_size": c.mlp_width,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_base,
        "rope_scaling": rope,
        "sliding_window": c.window,
        "layer_types": [("sliding_attention" if c.window else "full_attention")] * c.num_layers,
        "attention_bias": c.qkv_bias,
        "mlp_bias": False,
        "max_position_embeddings": c.max_positions,
        "tie_word_embeddings": False,
        "torch_dtype": c.dtype,
    }


def described_verifier(algorithm: str, architecture: str, about: dict[str, Any]) -> dict[str, Any]:
    """What all configs of vllm speculators begin with. `about`: `num_tokens` to draft, and the target's `name`
    and `architectures`."""
    proposal = {
        "proposal_type": "greedy", "speculative_tokens": about["num_tokens"], "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }  # fmt: skip
    return {
        "architectures": [architecture],
        "speculators_model_type": algorithm,
        "speculators_version": f"specjax {__version__}",
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": about["name"], "architectures": about["architectures"]},
        },
    }
