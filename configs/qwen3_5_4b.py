"""Qwen3.5 4B, text only: three gated delta nets to one attention layer."""

from specjax.configs.qwen3_5_0_8b import qwen3_5
from specjax.models.hybrid.config import HybridConfig

HUB_ID = "Qwen/Qwen3.5-4B"
MODULE = "qwen3_5"  # the form of its module for multi-token prediction (`models.loading.mtp_dialects`)


def get_config(dtype: str = "bfloat16") -> HybridConfig:
    """Return the shapes of `HUB_ID`."""
    return qwen3_5(
        "qwen3.5-4b", width=2560, num_layers=32, mlp_width=9216, heads=(16, 4), delta_heads=(16, 32), dtype=dtype
    )
