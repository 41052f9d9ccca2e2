"""Qwen3 8B."""

from specjax.models import LlamaConfig

HUB_ID = "Qwen/Qwen3-8B"


def get_config(dtype: str = "bfloat16") -> LlamaConfig:
    """Return the shapes of `HUB_ID`."""
    return LlamaConfig(
        vocab_size=151936,
        width=4096,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        mlp_width=12288,
        rope_base=1000000.0,
        norm_eps=1e-6,
        tied=False,
        qk_norm=True,
        max_positions=40960,
        dtype=dtype,
        stacked=True,
        name="qwen3-8b",
    )
