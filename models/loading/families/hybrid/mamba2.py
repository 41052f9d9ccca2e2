"""Mamba-2 without attention: each layer is a norm and a mixer."""

from __future__ import annotations

from typing import Any

from specjax.models.hybrid.config import HybridConfig, LayerKind
from specjax.models.loading.families import rope
from specjax.models.loading.families.config_fields import LAYERS, ROWS, WIDTH, ConfigFields
from specjax.models.loading.families.hybrid import common, mamba_mixer
from specjax.models.loading.families.hybrid.mamba_mixer import MixerFields
from specjax.models.loading.tensors.assembly import StoredTensor

HF_TYPES = GGUF_TYPES = MODEL_TYPES = ("mamba2",)

FIELDS = {
    "vocab_size": 32_768, "hidden_size": 4096, "num_hidden_layers": 64, "num_heads": 128, "head_dim": 64,
    "state_size": 128, "n_groups": 8, "conv_kernel": 4, "expand": 2, "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": mamba_mixer.UNLIMITED_TEXT,
}  # fmt: skip
"""Defaults of the class of transformers, which has no limit of the length."""

MIXER = MixerFields(
    "num_heads", "head_dim", "n_groups", "state_size", "conv_kernel", "use_conv_bias", "use_bias", "use_bias"
)
UNUSED = "intermediate_size", "norm_before_gate"
"""Fields that the class of transformers does not use. Its norm is behind the gate."""

KIND = LayerKind("mamba2", "none")


def stored_hf(config: HybridConfig, kind: str) -> dict[str, StoredTensor]:
    """Map parameter paths to tensors of a Hugging Face checkpoint with this `model_type`."""
    return {
        "embed.weight": StoredTensor("backbone.embeddings.weight"),
        "norm.weight": StoredTensor("backbone.norm_f.weight"),
        "head.weight": StoredTensor("lm_head.weight"),
        "layers.*.mixer_norm.weight": StoredTensor("backbone.layers.*.norm.weight"),
        **mamba_mixer.stored_hf(config, "backbone.layers.*.mixer"),
    }


def stored_gguf(config: HybridConfig, arch: str) -> dict[str, StoredTensor]:
    """Map parameter paths to tensors of a GGUF file."""
    return {path: StoredTensor(row.gguf) for path, row in common.by_path(common.WEIGHTS).items()} | (
        mamba_mixer.stored_gguf(config)
    )


def config_from_hf(hf: ConfigFields, **options) -> HybridConfig:
    """Build a config from the config.json of one of HF_TYPES.

    `options`: dtype, cache_dtype, name, and those of `storage_options`.
    """
    hf = rope.with_length(hf).with_defaults(FIELDS)
    common.check_only(hf, {"rms_norm": True})
    hf.skip(*UNUSED)
    width, layers = hf.size("hidden_size", maximum=WIDTH), hf.size("num_hidden_layers", maximum=LAYERS)
    return HybridConfig(
        vocab_size=hf.size("vocab_size", maximum=ROWS),
        width=width,
        num_layers=layers,
        kinds=(KIND,) * layers,
        mamba2=mamba_mixer.sizes_from_hf(hf, MIXER, mamba_mixer.expansion(hf, "expand", width)),
        mlp_width=0,
        norm_eps=hf.number("layer_norm_epsilon", maximum=1.0),
        tied=hf.flag("tie_word_embeddings"),
        max_positions=hf.size("max_position_embeddings"),
        model_type="mamba2",
        **mamba_mixer.without_attention(),
        **options,
    )


def config_to_hf(c: HybridConfig) -> dict[str, Any]:
    """Return the fields that `config_from_hf` reads."""
    assert c.mamba2 is not None
    return {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "vocab_size": c.vocab_size,
        "hidden_size": c.width,
        "num_hidden_layers": c.num_layers,
        "expand": mamba_mixer.expansion_to_hf(c),
        **mamba_mixer.fields_to_hf(c.mamba2, MIXER),
        "layer_norm_epsilon": c.norm_eps,
        "residual_in_fp32": False,
        "tie_word_embeddings": c.tied,
        "torch_dtype": c.dtype,
    }


def config_from_gguf(meta: ConfigFields, shapes: dict[str, tuple[int, ...]], factors, **options) -> HybridConfig:
    """Build a config from the metadata of a file of one of GGUF_TYPES.

    Args:
      shapes: shapes of the file's tensors.
      factors: tensors of rope.GGUF_DIVISORS, which this family does not use.
    """
    meta.skip("attention.head_count")  # llama.cpp writes 0
    sizes = common.gguf_sizes_of_model(meta, shapes)
    return HybridConfig(
        **sizes,
        kinds=(KIND,) * sizes["num_layers"],
        mamba2=mamba_mixer.gguf_sizes(meta, shapes),
        mlp_width=0,
        model_type="mamba2",
        **mamba_mixer.without_attention(),
        **options,
    )
