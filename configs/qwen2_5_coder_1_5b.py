"""Qwen2.5-Coder 1.5B."""

from specjax.models import LlamaConfig

HUB_ID = "Qwen/Qwen2.5-Coder-1.5B-Instruct"


def get_config(dtype: str = "bfloat16") -> LlamaConfig:
    """Return the shapes of `HUB_ID`."""
    return LlamaConfig(
        vocab_size=151936,
        width=1536,
        num_layers=28,
        num_heads=12,
        num_kv_heads=2,
        head_dim=128,
        mlp_width=8960,
        rope_base=1000000.0,
        norm_eps=1e-6,
        tied=True,
        qkv_bias=True,
        max_positions=32768,
        dtype=dtype,
        stacked=True,
        name="qwen2.5-coder-1.5b",
    )
