"""Bamba: Mamba-2 or attention in each layer, before a gated MLP. Half of each head is rotated.

GGUF files of it have the architecture of Granite, see `granite_hybrid`.
"""

from __future__ import annotations

from typing import Any

from specjax.errors import UsageError
from specjax.models.hybrid.config import HybridConfig, LayerKind
from specjax.models.loading.families import rope
from specjax.models.loading.families.config_fields import ROWS, ConfigFields
from specjax.models.loading.families.hybrid import common, mamba_mixer
from specjax.models.loading.tensors.assembly import StoredTensor

HF_TYPES = MODEL_TYPES = ("bamba",)
GGUF_TYPES = ()

FIELDS = {
    "vocab_size": 128_000, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 262_144,
    "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2,
}  # fmt: skip
"""Defaults of the class of transformers."""

ROTATED_PART = 0.5  # of each head, in all files of this family

KINDS = {"mamba": LayerKind("mamba2"), "attention": LayerKind("attention")}

_LAYER = "model.layers.*."
NAMES = {
    "norm.weight": "model.final_layernorm.weight",
    "layers.*.mlp_norm.weight": _LAYER + "pre_ff_layernorm.weight",
    **{f"layers.*.mlp.{part}.weight": f"{_LAYER}feed_forward.{part}_proj.weight" for part in ("gate", "up", "down")},
}
"""Names that differ from those of Llama, also in Falcon-H1."""


def stored_hf(config: HybridConfig, kind: str) -> dict[str, StoredTensor]:
    """Map parameter paths to tensors of a Hugging Face checkpoint with this `model_type`."""
    rows = common.by_path(common.WEIGHTS, hf=NAMES)
    return {path: StoredTensor(row.hf) for path, row in rows.items()} | mamba_mixer.stored_hf(config, _LAYER + "mamba")


def config_from_hf(hf: ConfigFields, **options) -> HybridConfig:
    """Build a config from the config.json of one of HF_TYPES.

    `options`: dtype, cache_dtype, name, and those of `storage_options`.
    """
    hf = rope.with_length(hf).with_defaults(FIELDS)
    common.check_activation(hf)
    common.refuse_flags(hf, "attention_bias", "mlp_bias")
    sizes = common.sizes_of_hf(hf)
    layers = sizes["num_layers"]
    attends = hf.array("attn_layer_indices", int)
    names = common.layer_names(
        hf, layers, lambda: [mamba_mixer.FULL if i in attends else mamba_mixer.MAMBA for i in range(layers)],
        mamba_mixer.ATTENTION_NAMES, "layers_block_type",
    )  # fmt: skip
    inner = mamba_mixer.expansion(hf, "mamba_expand", sizes["width"])
    base, scaling, rotary_dim = rotary(hf, sizes["head_dim"])
    return HybridConfig(
        **sizes,
        kinds=mamba_mixer.kinds_from_names(names, KINDS),
        mamba2=mamba_mixer.sizes_from_hf(hf, mamba_mixer.FIELDS_OF_HYBRIDS, inner),
        mlp_width=hf.size("intermediate_size", maximum=ROWS),
        rope_base=base,
        rope_scaling=scaling,
        rotary_dim=rotary_dim,
        norm_eps=hf.number("rms_norm_eps", maximum=1.0),
        tied=hf.flag("tie_word_embeddings"),
        max_positions=rope.max_positions(hf, scaling),
        model_type="bamba",
        **options,
    )


def rotary(hf: ConfigFields, head_dim: int) -> rope.Rotary:
    """Return the rotary settings. The class of transformers rotates half of each head, whatever an old config has.

    Raises: UsageError for an old config that states another part.
    """
    settings = rope.rotary_from_hf(hf, head_dim, partial=True, part=ROTATED_PART)
    rotated = settings.rotary_dim or head_dim
    stated = hf.size("attn_rotary_emb", rotated)
    if stated != rotated:
        raise UsageError(
            f"{hf.where} has attn_rotary_emb {stated}, but {rotated} of the {head_dim} numbers of a head are rotated"
        )
    return settings


def config_to_hf(c: HybridConfig) -> dict[str, Any]:
    """Return the fields that `config_from_hf` reads."""
    assert c.mamba2 is not None
    part = (c.rotary_dim or c.head_dim) / c.head_dim
    settings = rope.to_rope_parameters(rope.rotary_to_hf(c.rope_base, c.rope_scaling))
    return common.attention_to_hf(c) | {
        "architectures": ["BambaForCausalLM"],
        "model_type": "bamba",
        "intermediate_size": c.mlp_width,
        "attn_layer_indices": [i for i, kind in enumerate(c.kinds) if kind.attends],
        "mamba_expand": mamba_mixer.expansion_to_hf(c),
        **mamba_mixer.fields_to_hf(c.mamba2, mamba_mixer.FIELDS_OF_HYBRIDS),
        "rope_parameters": settings | {"partial_rotary_factor": part},
        "rms_norm_eps": c.norm_eps,
        "hidden_act": "silu",
    }
