"""Mamba-2 780M, with state-space layers only."""

from specjax.models.hybrid.config import HybridConfig, LayerKind, Mamba2Sizes

HUB_ID = "state-spaces/mamba2-780m"


def get_config(dtype: str = "bfloat16") -> HybridConfig:
    """Return the shapes of `HUB_ID`."""
    return HybridConfig(
        vocab_size=50288,
        width=1536,
        num_layers=48,
        num_heads=1,
        num_kv_heads=1,
        head_dim=64,
        mlp_width=1,
        kinds=(LayerKind("mamba2", "none"),) * 48,
        mamba2=Mamba2Sizes(num_heads=48, head_dim=64, num_groups=1, state_dim=128),
        norm_eps=1e-5,
        tied=True,
        max_positions=262144,
        dtype=dtype,
        stacked=True,
        model_type="mamba2",
        name="mamba2-780m",
    )
