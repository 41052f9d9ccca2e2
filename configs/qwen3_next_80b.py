"""Qwen3-Next 80B-A3B: three gated delta nets to one attention layer, and 10 of 512 experts for each token."""

from specjax.configs.qwen3_5_0_8b import qwen3_5
from specjax.models.experts.routing import Routing
from specjax.models.experts.sizes import MixtureSizes
from specjax.models.hybrid.config import HybridConfig

HUB_ID = "Qwen/Qwen3-Next-80B-A3B-Instruct"
MODULE = "qwen3_5"  # the form of its module for multi-token prediction (`models.loading.mtp_dialects`)


def get_config(dtype: str = "bfloat16") -> HybridConfig:
    """Return the shapes of `HUB_ID`."""
    return qwen3_5(
        "qwen3-next-80b", width=2048, num_layers=48, mlp_width=5120, heads=(16, 2), delta_heads=(16, 32), dtype=dtype,
        feed="moe", vocab_size=151936, tied=False, model_type="qwen3_next",
        experts=MixtureSizes(512, 512, Routing(10, normalized=True), shared_width=512, shared_gate=True),
    )  # fmt: skip
