"""gpt-oss 20B: 4 of 32 experts for each token, sinks in attention, and a window in every second layer."""

from specjax.models import LlamaConfig
from specjax.models.experts.routing import Routing
from specjax.models.experts.sizes import MixtureSizes
from specjax.models.rotary import RopeScaling
from specjax.numerics.quantized_array import WeightFormat

HUB_ID = "openai/gpt-oss-20b"
FILE_FORMATS = (("layers.*.mlp.expert_*", WeightFormat(5, "int8", 32)),)
"""The formats of the matrices of its files, as they are kept in memory. MXFP4 has 32 numbers in a group."""


def get_config(dtype: str = "bfloat16") -> LlamaConfig:
    """Return the shapes of `HUB_ID` in floats. Its files have the experts in `FILE_FORMATS`."""
    routing = Routing(4, scores="softmax_of_chosen")
    amplitude = 1.3465735902799727  # 0.1 ln(32) + 1
    return LlamaConfig(
        vocab_size=201088,
        width=2880,
        num_layers=24,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        mlp_width=2880,
        rope_base=150000.0,
        rope_scaling=RopeScaling("yarn", 32.0, 1.0, 32.0, 4096, amplitude, whole=False),
        tied=False,
        qkv_bias=True,
        out_bias=True,
        sinks=True,
        window=128,
        is_global=(False, True) * 12,
        max_positions=131072,
        dtype=dtype,
        stacked=True,
        experts=MixtureSizes(32, 2880, routing, router_bias=True, bias=True, limit=7.0),
        name="gpt-oss-20b",
    )
