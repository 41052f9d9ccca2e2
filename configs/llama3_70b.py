"""Llama 3.1 70B."""

from specjax.models import LlamaConfig
from specjax.models.rotary import RopeScaling

HUB_ID = "meta-llama/Llama-3.1-70B"


def get_config(dtype: str = "bfloat16") -> LlamaConfig:
    """Return the shapes of `HUB_ID`."""
    return LlamaConfig(
        vocab_size=128256,
        width=8192,
        num_layers=80,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        mlp_width=28672,
        rope_base=500000.0,
        rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 8192),
        tied=False,
        max_positions=131072,
        dtype=dtype,
        stacked=True,
        name="llama3-70b",
    )
