"""Dream 7B, a diffusion language model."""

from specjax.models import LlamaConfig
from specjax.models.loading.families.denoisers import DenoiserSettings

HUB_ID = "Dream-org/Dream-v0-Instruct-7B"


def get_config(dtype: str = "bfloat16") -> LlamaConfig:
    """Return the shapes of `HUB_ID`."""
    return LlamaConfig(
        vocab_size=152064,
        width=3584,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        mlp_width=18944,
        rope_base=1000000.0,
        norm_eps=1e-6,
        tied=False,
        qkv_bias=True,
        max_positions=131072,
        dtype=dtype,
        stacked=True,
        name="dream-7b",
    )


def get_denoiser_settings() -> DenoiserSettings:
    """Return its settings as a denoiser."""
    return DenoiserSettings(151666, "full", None, "shifted", "all_masked")
