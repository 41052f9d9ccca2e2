"""LFM2 1.2B: short convolutions beside attention."""

from specjax.models.hybrid.config import HybridConfig, LayerKind

HUB_ID = "LiquidAI/LFM2-1.2B"
ATTENTION_LAYERS = 2, 5, 8, 10, 12, 14


def get_config(dtype: str = "bfloat16") -> HybridConfig:
    """Return the shapes of `HUB_ID`."""
    kind_of = lambda i: LayerKind("attention" if i in ATTENTION_LAYERS else "short_convolution")
    return HybridConfig(
        vocab_size=65536,
        width=2048,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        mlp_width=8192,
        kinds=tuple(map(kind_of, range(16))),
        convolution_kernel=3,
        rope_base=1000000.0,
        norm_eps=1e-5,
        tied=True,
        qk_norm=True,
        max_positions=128000,
        dtype=dtype,
        stacked=True,
        model_type="lfm2",
        name="lfm2-1.2b",
    )
