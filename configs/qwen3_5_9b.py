"""Qwen3.5 9B, text only: three gated delta nets to one attention layer."""

from specjax.configs.qwen3_5_0_8b import qwen3_5
from specjax.models.hybrid.config import HybridConfig

HUB_ID = "Qwen/Qwen3.5-9B"
MODULE = "qwen3_5"  # the form of its module for multi-token prediction (`models.loading.mtp_dialects`)


def get_config(dtype: str = "bfloat16") -> HybridConfig:
    """Return the shapes of `HUB_ID`."""
    return qwen3_5(
        "qwen3.5-9b", width=4096, num_layers=32, mlp_width=12288, heads=(16, 4), delta_heads=(16, 32), tied=False,
        dtype=dtype,
    )  # fmt: skip
