"""LFM2: gated short convolutions, and attention with q/k norms in some layers."""

from __future__ import annotations

from typing import Any

from specjax.errors import UsageError
from specjax.models.hybrid.config import HybridConfig, LayerKind
from specjax.models.loading.families import rope
from specjax.models.loading.families.config_fields import ROWS, ConfigFields
from specjax.models.loading.families.hybrid import common
from specjax.models.loading.tensors.assembly import StoredTensor

HF_TYPES = ("lfm2",)
GGUF_TYPES = MODEL_TYPES = HF_TYPES

CONVOLUTION, FULL = "conv", "full_attention"
KINDS = {CONVOLUTION: LayerKind("short_convolution"), FULL: LayerKind("attention")}

FIELDS = {
    "vocab_size": 65_536, "hidden_size": 2560, "intermediate_size": 12_288, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 128_000, "norm_eps": 1e-5,
    "tie_word_embeddings": True, "conv_L_cache": 3, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
}  # fmt: skip
"""Defaults of the class of transformers."""

UNUSED = (
    "block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_xavier_init", "conv_dim",
    "conv_dim_out", "conv_use_xavier_init", "num_heads",
)  # fmt: skip
"""Fields of published files that the class of transformers does not use."""

_LAYER = "model.layers.*."
NAMES = common.by_path(
    common.WEIGHTS,
    hf={
        "norm.weight": "model.embedding_norm.weight",
        "layers.*.mixer_norm.weight": _LAYER + "operator_norm.weight",
        "layers.*.attention.o.weight": _LAYER + "self_attn.out_proj.weight",
        "layers.*.attention.q_norm.weight": _LAYER + "self_attn.q_layernorm.weight",
        "layers.*.attention.k_norm.weight": _LAYER + "self_attn.k_layernorm.weight",
        "layers.*.mlp_norm.weight": _LAYER + "ffn_norm.weight",
        "layers.*.mlp.gate.weight": _LAYER + "feed_forward.w1.weight",
        "layers.*.mlp.up.weight": _LAYER + "feed_forward.w3.weight",
        "layers.*.mlp.down.weight": _LAYER + "feed_forward.w2.weight",
        **{
            f"layers.*.recurrent.{ours}.{part}": f"{_LAYER}conv.{name}.{part}"
            for ours, name in (("input", "in_proj"), ("out", "out_proj"))
            for part in ("weight", "bias")
        },
        "layers.*.recurrent.convolution.bias": _LAYER + "conv.conv.bias",
    },
    gguf={
        "norm.weight": "token_embd_norm.weight",  # the final norm, in spite of its name
        "layers.*.recurrent.convolution.kernel": "blk.*.shortconv.conv.weight",
        "layers.*.recurrent.convolution.bias": "blk.*.shortconv.conv.bias",
        **{
            f"layers.*.recurrent.{ours}.{part}": f"blk.*.shortconv.{name}.{part}"
            for ours, name in (("input", "in_proj"), ("out", "out_proj"))
            for part in ("weight", "bias")
        },
    },
)


def stored_hf(config: HybridConfig, kind: str) -> dict[str, StoredTensor]:
    """Map parameter paths to tensors of a Hugging Face checkpoint with this `model_type`."""
    stored = {path: StoredTensor(row.hf) for path, row in NAMES.items()}
    stored["layers.*.recurrent.convolution.kernel"] = common.convolution(_LAYER + "conv.conv.weight")
    return stored


def stored_gguf(config: HybridConfig, arch: str) -> dict[str, StoredTensor]:
    """Map parameter paths to tensors of a GGUF file."""
    return {path: StoredTensor(row.gguf) for path, row in NAMES.items()}


def config_from_hf(hf: ConfigFields, **options) -> HybridConfig:
    """Build a config from the config.json of one of HF_TYPES.

    `options`: dtype, cache_dtype, name, and those of `storage_options`.
    """
    hf = rope.with_length(hf).with_defaults(FIELDS)
    common.check_only(hf, {"block_use_swiglu": True, "use_pos_enc": True})
    hf.skip(*UNUSED)
    sizes = common.sizes_of_hf(hf)
    layers = sizes["num_layers"]
    attends = hf.array("full_attn_idxs", int) if hf.has("full_attn_idxs") else list(range(layers))
    by_index = lambda: [FULL if i in attends else CONVOLUTION for i in range(layers)]
    names = common.layer_names(hf, layers, by_index, (CONVOLUTION, FULL))
    base, scaling, _ = rope.rotary_from_hf(hf, sizes["head_dim"], base=1_000_000.0, layer_type=FULL)
    return HybridConfig(
        **sizes,
        kinds=tuple(KINDS[name] for name in names),
        convolution_kernel=hf.size("conv_L_cache", minimum=2, maximum=64),
        convolution_bias=hf.flag("conv_bias"),
        mlp_width=_mlp_width(hf),
        rope_base=base,
        rope_scaling=scaling,
        norm_eps=hf.number("norm_eps", maximum=1.0),
        tied=hf.flag("tie_embedding", hf.flag("tie_word_embeddings")),
        qk_norm=True,
        max_positions=rope.max_positions(hf, scaling),
        model_type="lfm2",
        **options,
    )


def _mlp_width(hf: ConfigFields) -> int:
    """Return the number of hidden units of the MLP, which the config states before its adjustment."""
    width = hf.size("block_ff_dim", hf.size("intermediate_size", maximum=ROWS), maximum=ROWS)
    factor, multiple = hf.number("block_ffn_dim_multiplier"), hf.size("block_multiple_of", maximum=ROWS)
    if not hf.flag("block_auto_adjust_ff_dim"):
        return width
    adjusted = int(factor * int(2 * width / 3))
    rounded = multiple * -(-adjusted // multiple)
    if rounded > ROWS:
        raise UsageError(f"{hf.where} describes an MLP of {rounded} units, which must be at most {ROWS}")
    return rounded


def config_to_hf(c: HybridConfig) -> dict[str, Any]:
    """Return the fields that `config_from_hf` reads, with the adjusted width of the MLP."""
    return common.attention_to_hf(c) | {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "intermediate_size": c.mlp_width,
        "block_ff_dim": c.mlp_width,
        "block_auto_adjust_ff_dim": False,
        "layer_types": [FULL if kind.attends else CONVOLUTION for kind in c.kinds],
        "conv_L_cache": c.convolution_kernel,
        "conv_bias": c.convolution_bias,
        "rope_parameters": rope.to_rope_parameters(rope.rotary_to_hf(c.rope_base, c.rope_scaling)),
        "norm_eps": c.norm_eps,
        "tie_embedding": c.tied,
    }


def config_from_gguf(meta: ConfigFields, shapes: dict[str, tuple[int, ...]], factors, **options) -> HybridConfig:
    """Build a config from the metadata of a file of one of GGUF_TYPES.

    Args:
      shapes: shapes of the file's tensors.
      factors: its tensors of rope.GGUF_DIVISORS, which must be empty.
    """
    where = meta.where
    common.refuse_experts(meta, "expert_count")
    if factors:
        raise UsageError(f"{where} has a {min(factors)}, which specjax does not support for LFM2")
    sizes = common.gguf_sizes_of_model(meta, shapes)
    base, scaling = rope.rotary_from_gguf(meta)
    kinds = {"shortconv.conv": KINDS[CONVOLUTION], "attn_q": KINDS[FULL]}
    layers = common.gguf_kinds(shapes, sizes["num_layers"], kinds, where)
    attention = common.gguf_attention(meta, sizes["width"])
    if common.gguf_rotary_dim(meta, attention["head_dim"]) is not None:
        raise UsageError(f"{where} rotates a part of each head, which specjax does not support for LFM2")
    return HybridConfig(
        **sizes,
        **attention,
        kinds=layers,
        convolution_kernel=meta.size("shortconv.l_cache", minimum=2, maximum=64),
        convolution_bias=any(name.endswith("shortconv.conv.bias") for name in shapes),
        mlp_width=common.gguf_mlp_width(shapes, layers, where),
        rope_base=base,
        rope_scaling=scaling,
        qk_norm=True,
        model_type="lfm2",
        **options,
    )
