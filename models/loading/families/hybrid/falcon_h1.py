"""Falcon-H1: Mamba-2 and attention side by side on one normed input, then a gated MLP, with many constant factors.

llama.cpp multiplies the weights of a GGUF file by the factors, so they are 1 there.
"""

from __future__ import annotations

from typing import Any

from specjax.errors import UsageError
from specjax.models.hybrid.config import NO_MULTIPLIERS, HybridConfig, LayerKind, Multipliers
from specjax.models.loading.families import rope
from specjax.models.loading.families.config_fields import ROWS, ConfigFields
from specjax.models.loading.families.hybrid import bamba, common, mamba_mixer
from specjax.models.loading.tensors.assembly import StoredTensor

HF_TYPES = MODEL_TYPES = ("falcon_h1",)
GGUF_TYPES = ("falcon-h1",)

FIELDS = {
    "vocab_size": 128_000, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192,
    "mamba_d_ssm": 1024, "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4,
    "mamba_expand": 2,
}  # fmt: skip
"""Defaults of the class of transformers."""

MIXER = mamba_mixer.FIELDS_OF_HYBRIDS._replace(out_bias="projectors_bias")
KIND = LayerKind("attention_and_mamba2")

FACTORS = {
    "embedding": "embedding_multiplier",
    "logits": "lm_head_multiplier",
    "attention_in": "attention_in_multiplier",
    "attention_out": "attention_out_multiplier",
    "key": "key_multiplier",
    "mamba_in": "ssm_in_multiplier",
    "mamba_out": "ssm_out_multiplier",
}
"""Fields of the config by fields of `Multipliers`."""

NEUTRAL_PARTS = (1.0,) * 5
UNUSED = "mamba_use_mlp", "mlp_expansion_factor", "attn_layer_indices", "mamba_expand"
"""Fields that the class of transformers does not use, except the last one if `mamba_d_ssm` is null."""

_LAYER = "model.layers.*."


def stored_hf(config: HybridConfig, kind: str) -> dict[str, StoredTensor]:
    """Map parameter paths to tensors of a Hugging Face checkpoint with this `model_type`."""
    return bamba.stored_hf(config, kind)


def stored_gguf(config: HybridConfig, arch: str) -> dict[str, StoredTensor]:
    """Map parameter paths to tensors of a GGUF file."""
    stored = {path: StoredTensor(row.gguf) for path, row in common.by_path(common.WEIGHTS).items()}
    return stored | mamba_mixer.stored_gguf(config)


def config_from_hf(hf: ConfigFields, **options) -> HybridConfig:
    """Build a config from the config.json of one of HF_TYPES.

    `options`: dtype, cache_dtype, name, and those of `storage_options`.
    """
    hf = rope.with_length(hf).with_defaults(FIELDS)
    common.check_activation(hf)
    common.refuse_flags(hf, "attention_bias", "mlp_bias")
    hf.skip(*UNUSED)
    sizes = common.sizes_of_hf(hf)
    stated = hf.size("mamba_d_ssm", None, maximum=ROWS)
    inner = stated or mamba_mixer.expansion(hf, "mamba_expand", sizes["width"])
    base, scaling, _ = rope.rotary_from_hf(hf, sizes["head_dim"])
    parts = _factors(hf, "ssm_multipliers", 5)
    mixer = mamba_mixer.sizes_from_hf(
        hf, MIXER, inner, has_norm=hf.flag("mamba_rms_norm"), multipliers=None if parts == NEUTRAL_PARTS else parts,
    )  # fmt: skip
    is_first = hf.flag("mamba_norm_before_gate", True) and mixer.has_norm  # without a norm it has no effect
    gate, down = _factors(hf, "mlp_multipliers", 2)
    factors = {ours: hf.number(name, 1.0, minimum=-1e30) for ours, name in FACTORS.items()}
    return HybridConfig(
        **sizes,
        kinds=(KIND,) * sizes["num_layers"],
        mamba2=mixer._replace(norm_before_gate=is_first),
        mlp_width=hf.size("intermediate_size", maximum=ROWS),
        rope_base=base,
        rope_scaling=scaling,
        multipliers=NO_MULTIPLIERS._replace(gate=gate, down=down, **factors),
        norm_eps=hf.number("rms_norm_eps", maximum=1.0),
        tied=hf.flag("tie_word_embeddings"),
        max_positions=rope.max_positions(hf, scaling),
        model_type="falcon_h1",
        **options,
    )


def _factors(hf: ConfigFields, name: str, count: int) -> tuple[float, ...]:
    """Return a list of factors, all 1 if it is absent."""
    return tuple(map(float, hf.array(name, (int, float), count) or [1.0] * count))


def config_to_hf(c: HybridConfig) -> dict[str, Any]:
    """Return the fields that `config_from_hf` reads."""
    mixer, factors = c.mamba2, c.multipliers
    assert mixer is not None
    return common.attention_to_hf(c) | {
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "intermediate_size": c.mlp_width,
        "mamba_d_ssm": mixer.inner,
        **mamba_mixer.fields_to_hf(mixer, MIXER),
        "mamba_rms_norm": mixer.has_norm,
        "mamba_norm_before_gate": mixer.norm_before_gate,
        "ssm_multipliers": list(mixer.multipliers or NEUTRAL_PARTS),
        "mlp_multipliers": [factors.gate, factors.down],
        **{name: getattr(factors, ours) for ours, name in FACTORS.items()},
        **rope.rotary_to_hf(c.rope_base, c.rope_scaling),
        "rms_norm_eps": c.norm_eps,
        "hidden_act": "silu",
    }


def config_from_gguf(meta: ConfigFields, shapes: dict[str, tuple[int, ...]], factors, **options) -> HybridConfig:
    """Build a config from the metadata of a file of one of GGUF_TYPES.

    Args:
      shapes: shapes of the file's tensors.
      factors: tensors of rope.GGUF_DIVISORS, which must be empty.
    """
    if factors:
        raise UsageError(f"{meta.where} has a {min(factors)}, which specjax does not support for falcon-h1")
    sizes = common.gguf_sizes_of_model(meta, shapes)
    base, scaling = rope.rotary_from_gguf(meta)
    meta.skip("rope.dimension_count")  # the whole head
    kinds = (KIND,) * sizes["num_layers"]
    return HybridConfig(
        **sizes,
        **common.gguf_attention(meta, sizes["width"]),
        kinds=kinds,
        mamba2=mamba_mixer.gguf_sizes(meta, shapes),
        mlp_width=common.gguf_mlp_width(shapes, kinds, meta.where),
        rope_base=base,
        rope_scaling=scaling,
        multipliers=Multipliers(),
        model_type="falcon_h1",
        **options,
    )
