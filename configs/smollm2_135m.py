"""SmolLM2 135M."""

from specjax.models import LlamaConfig

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"


def get_config(dtype: str = "float32") -> LlamaConfig:
    """Return the shapes of `HUB_ID`."""
    return LlamaConfig(
        vocab_size=49152,
        width=576,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        mlp_width=1536,
        rope_base=100000.0,
        max_positions=8192,
        dtype=dtype,
        name="smollm2-135m",
    )
