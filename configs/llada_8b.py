"""LLaDA 8B, a diffusion language model."""

from specjax.models import LlamaConfig
from specjax.models.loading.families.denoisers import DenoiserSettings

HUB_ID = "GSAI-ML/LLaDA-8B-Instruct"


def get_config(dtype: str = "bfloat16") -> LlamaConfig:
    """Return the shapes of `HUB_ID`."""
    return LlamaConfig(
        vocab_size=126464,
        width=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        mlp_width=12288,
        rope_base=500000.0,
        tied=False,
        max_positions=4096,
        dtype=dtype,
        stacked=True,
        name="llada-8b",
    )


def get_denoiser_settings() -> DenoiserSettings:
    """Return its settings as a denoiser."""
    return DenoiserSettings(126336, "full", None, "same", "all_masked")
