"""SDAR 4B, a block-diffusion language model."""

from specjax.models import LlamaConfig
from specjax.models.loading.families.denoisers import DenoiserSettings

HUB_ID = "JetLM/SDAR-4B-Chat"


def get_config(dtype: str = "bfloat16") -> LlamaConfig:
    """Return the shapes of `HUB_ID`."""
    return LlamaConfig(
        vocab_size=151936,
        width=2560,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        mlp_width=9728,
        rope_base=1000000.0,
        norm_eps=1e-6,
        tied=False,
        qk_norm=True,
        max_positions=32768,
        dtype=dtype,
        stacked=True,
        name="sdar-4b",
    )


def get_denoiser_settings() -> DenoiserSettings:
    """Return its settings as a denoiser. There are variants with blocks of 8 to 64 columns."""
    return DenoiserSettings(151669, "block_causal", 4, "same", "all_masked")
