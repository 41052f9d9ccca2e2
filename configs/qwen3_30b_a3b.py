"""Qwen3 30B-A3B: 8 of 128 experts for each token."""

from specjax.models import LlamaConfig
from specjax.models.experts.routing import Routing
from specjax.models.experts.sizes import MixtureSizes

HUB_ID = "Qwen/Qwen3-30B-A3B"


def get_config(dtype: str = "bfloat16") -> LlamaConfig:
    """Return the shapes of `HUB_ID`."""
    return LlamaConfig(
        vocab_size=151936,
        width=2048,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        mlp_width=6144,
        rope_base=1000000.0,
        norm_eps=1e-6,
        tied=False,
        qk_norm=True,
        max_positions=40960,
        dtype=dtype,
        stacked=True,
        experts=MixtureSizes(128, 768, Routing(8, normalized=True)),
        name="qwen3-30b-a3b",
    )
