"""Gemma 3 270M."""

from specjax.models import Gemma3Config

HUB_ID = "google/gemma-3-270m-it"


def get_config(dtype: str = "bfloat16") -> Gemma3Config:
    """Return the shapes of `HUB_ID`."""
    return Gemma3Config(
        vocab_size=262144,
        width=640,
        num_layers=18,
        num_heads=4,
        num_kv_heads=1,
        head_dim=256,
        mlp_width=2048,
        is_global=tuple((i + 1) % 6 == 0 for i in range(18)),
        window=512,
        rope_base=1000000.0,
        local_rope_base=10000.0,
        query_scale=256**-0.5,
        max_positions=32768,
        dtype=dtype,
        stacked=True,
        name="gemma3-270m",
    )
