"""Qwen3.5 0.8B, text only: three gated delta nets to one attention layer."""

from typing import Any

from specjax.models.hybrid.config import Feed, GatedDeltaSizes, HybridConfig, LayerKind

HUB_ID = "Qwen/Qwen3.5-0.8B"
MODULE = "qwen3_5"  # the form of its module for multi-token prediction (`models.loading.mtp_dialects`)


def get_config(dtype: str = "bfloat16") -> HybridConfig:
    """Return the shapes of `HUB_ID`."""
    return qwen3_5(
        "qwen3.5-0.8b", width=1024, num_layers=24, mlp_width=3584, heads=(8, 2), delta_heads=(16, 16), dtype=dtype
    )


def qwen3_5(
    name: str, *, width: int, num_layers: int, mlp_width: int, heads: tuple[int, int], delta_heads: tuple[int, int],
    dtype: str, feed: Feed = "gated", vocab_size: int = 248320, **fields: Any,
) -> HybridConfig:  # fmt: skip
    """Return the shapes of a model of the family, with other fields of its config as `fields`.

    heads: query and key/value heads of attention. delta_heads: key and value heads of the gated delta nets.
    """
    group = (*[LayerKind("gated_delta", feed)] * 3, LayerKind("attention", feed))
    return HybridConfig(
        vocab_size=vocab_size,
        width=width,
        num_layers=num_layers,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=256,
        mlp_width=mlp_width,
        kinds=group * (num_layers // len(group)),
        gated_delta=GatedDeltaSizes(*delta_heads, 128, 128),
        rope_base=10000000.0,
        rotary_dim=64,
        norm_eps=1e-6,
        qk_norm=True,
        attention_gate=True,
        max_positions=262144,
        dtype=dtype,
        stacked=True,
        name=name,
        **{"model_type": "qwen3_5_text"} | fields,
    )
