"""Gemma 4 E2B: local and global attention with heads of two sizes, shared keys, and inputs of each layer."""

from typing import Any

from specjax.models.hybrid.config import HybridConfig, LayerInputSizes, LayerKind
from specjax.models.rotary import RopeScaling

HUB_ID = "google/gemma-4-E2B-it"
NUM_LAYERS, OWN_KEYS, WIDTH_OF_MLP = 35, 15, 6144
LAST_LOCAL, LAST_GLOBAL = 13, 14  # the layers whose keys the layers from OWN_KEYS on read


def get_config(dtype: str = "bfloat16") -> HybridConfig:
    """Return the shapes of `HUB_ID`."""
    of_global: dict[str, Any] = {
        "head_dim": 512, "num_kv_heads": 1, "rope_base": 1e6,
        "rope_scaling": RopeScaling("proportional", 1.0, share=0.25), "window": None, "keys_are_values": False,
    }  # fmt: skip

    def kind_of(layer: int) -> LayerKind:
        is_global, is_shared = layer % 5 == 4, layer >= OWN_KEYS
        changes = (tuple(of_global.items()) if is_global else ()) + (("mlp_width", 2 * WIDTH_OF_MLP),) * is_shared
        return LayerKind(changes=changes, keys_of=(LAST_GLOBAL if is_global else LAST_LOCAL) if is_shared else None)

    return HybridConfig(
        vocab_size=262144,
        width=1536,
        num_layers=NUM_LAYERS,
        num_heads=8,
        num_kv_heads=1,
        head_dim=256,
        mlp_width=WIDTH_OF_MLP,
        kinds=tuple(map(kind_of, range(NUM_LAYERS))),
        window=512,
        rope_base=1e4,
        query_scale=1.0,
        norm_eps=1e-6,
        tied=True,
        qk_norm=True,
        value_norm=True,
        norms="both",
        activation="gelu",
        scales_embedding=True,
        logit_softcap=30.0,
        layer_inputs=LayerInputSizes(256, 262144),
        layer_scales=True,
        max_positions=131072,
        dtype=dtype,
        stacked=False,
        model_type="gemma4",
        name="gemma-4-e2b",
    )
