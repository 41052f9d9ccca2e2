"""DeepSeek-V2-Lite: latent attention, and 6 of 64 experts beside a shared MLP for each token."""

from specjax.models.experts.routing import Routing
from specjax.models.experts.sizes import MixtureSizes
from specjax.models.hybrid.config import HybridConfig, LayerKind
from specjax.models.latent.sizes import LatentSizes
from specjax.models.rotary import RopeScaling

HUB_ID = "deepseek-ai/DeepSeek-V2-Lite"


def get_config(dtype: str = "bfloat16") -> HybridConfig:
    """Return the shapes of `HUB_ID`."""
    latent = LatentSizes(512, 64, 128, 128, mscale=0.707)
    mixer = LayerKind("latent_attention")
    return HybridConfig(
        vocab_size=102400,
        width=2048,
        num_layers=27,
        num_heads=16,
        num_kv_heads=1,
        head_dim=latent.cached,
        mlp_width=10944,
        kinds=(mixer, *[mixer._replace(feed="moe")] * 26),
        latent=latent,
        experts=MixtureSizes(64, 1408, Routing(6), shared_width=2816, dense_layers=(0,)),
        rope_base=10000.0,
        rope_scaling=RopeScaling("yarn", 40.0, 1.0, 32.0, 4096),
        rotary_dim=64,
        norm_eps=1e-6,
        tied=False,
        max_positions=163840,
        dtype=dtype,
        stacked=True,
        name="deepseek-v2-lite",
        model_type="deepseek_v2",
    )
