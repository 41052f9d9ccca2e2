"""Llama 3.2 1B."""

from specjax.models import LlamaConfig
from specjax.models.rotary import RopeScaling

HUB_ID = "meta-llama/Llama-3.2-1B"


def get_config(dtype: str = "bfloat16") -> LlamaConfig:
    """Return the shapes of `HUB_ID`."""
    return LlamaConfig(
        vocab_size=128256,
        width=2048,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        mlp_width=8192,
        rope_base=500000.0,
        rope_scaling=RopeScaling("llama3", 32.0, 1.0, 4.0, 8192),
        tied=True,
        max_positions=131072,
        dtype=dtype,
        stacked=True,
        name="llama3-1b",
    )
