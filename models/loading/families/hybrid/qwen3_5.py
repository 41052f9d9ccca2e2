"""Qwen3.5, text only: gated delta nets, and attention with an output gate in every fourth layer.

All norms store w for a factor of 1 + w, except the norm inside of the gated delta net.
"""

from __future__ import annotations

from typing import Any

from specjax.errors import UsageError
from specjax.models.hybrid.config import GatedDeltaSizes, HybridConfig, LayerKind
from specjax.models.loading.families import llama, rope
from specjax.models.loading.families.config_fields import HEADS, ROWS, ConfigFields
from specjax.models.loading.families.hybrid import common
from specjax.models.loading.tensors.assembly import StoredTensor

HF_TYPES = ("qwen3_5_text", "qwen3_5")  # the last is multimodal; only its text part is loaded
GGUF_TYPES = ()
MODEL_TYPES = ("qwen3_5_text",)

LINEAR, FULL = "linear_attention", "full_attention"

FIELDS = {
    "vocab_size": 248_320, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 32,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "partial_rotary_factor": 0.25,
}  # fmt: skip
"""Defaults of the class of transformers."""

_LAYER = "model.layers.*.linear_attn."
_RECURRENT = "layers.*.recurrent."
NAMES = common.by_path(
    common.WEIGHTS,
    hf={
        _RECURRENT + "convolved.weight": _LAYER + "in_proj_qkv.weight",
        _RECURRENT + "output_gate.weight": _LAYER + "in_proj_z.weight",
        _RECURRENT + "beta.weight": _LAYER + "in_proj_b.weight",
        _RECURRENT + "alpha.weight": _LAYER + "in_proj_a.weight",
        _RECURRENT + "decay.bias": _LAYER + "dt_bias",
        _RECURRENT + "norm.weight": _LAYER + "norm.weight",
        _RECURRENT + "out.weight": _LAYER + "out_proj.weight",
    },
)
PLAIN_NORM = _RECURRENT + "norm.weight"


def stored_hf(config: HybridConfig, kind: str) -> dict[str, StoredTensor]:
    """Map parameter paths to tensors of a Hugging Face checkpoint with this `model_type`."""
    has_unit = lambda path: path.endswith("norm.weight") and path != PLAIN_NORM
    stored = {path: StoredTensor(row.hf, add=1.0 if has_unit(path) else 0.0) for path, row in NAMES.items()}
    stored[_RECURRENT + "convolution.kernel"] = common.convolution(_LAYER + "conv1d.weight")
    stored[_RECURRENT + "decay.rate"] = common.decay_rate(_LAYER + "A_log")
    return stored | gated_queries(config, "model.layers.*.self_attn.q_proj.weight")


def gated_queries(config: HybridConfig, name: str) -> dict[str, StoredTensor]:
    """Map the queries and the output gate to one matrix with the rows of both for each head."""
    heads, size = config.num_heads, config.head_dim
    part = lambda first: StoredTensor(name, rows=2 * heads * size, order=common.head_rows(heads, size, 2 * size, first))
    return {"layers.*.attention.q.weight": part(0), "layers.*.attention.output_gate.weight": part(size)}


def config_from_hf(hf: ConfigFields, **options) -> HybridConfig:
    """Build a config from the config.json of one of HF_TYPES.

    `options`: dtype, cache_dtype, name, and those of `storage_options`.
    """
    if hf.text("model_type") == "qwen3_5":
        hf = llama.text_config(hf, {})
    hf = rope.with_length(hf).with_defaults(FIELDS)
    common.check_activation(hf)
    if hf.flag("attention_bias"):
        raise UsageError(f"{hf.where} sets attention_bias, which specjax does not support")
    sizes = common.sizes_of_hf(hf)
    base, scaling, rotary_dim = rope.rotary_from_hf(hf, sizes["head_dim"], layer_type=FULL, partial=True)
    return HybridConfig(
        **sizes,
        **delta_fields(hf, sizes["num_layers"]),
        mlp_width=hf.size("intermediate_size", maximum=ROWS),
        rope_base=base,
        rope_scaling=scaling,
        rotary_dim=rotary_dim,
        norm_eps=hf.number("rms_norm_eps", 1e-6, maximum=1.0),
        tied=hf.flag("tie_word_embeddings"),
        qk_norm=True,
        attention_gate=True,
        max_positions=rope.max_positions(hf, scaling),
        model_type="qwen3_5_text",
        **options,
    )


def delta_fields(hf: ConfigFields, layers: int) -> dict[str, Any]:
    """Return the kinds of the layers and the sizes of the gated delta nets."""
    interval = hf.size("full_attention_interval", 4)
    every_nth = lambda: [FULL if full else LINEAR for full in llama.every_nth_layer(interval, layers)]
    names = common.layer_names(hf, layers, every_nth, (LINEAR, FULL))
    key_heads, value_heads = (hf.size(f"linear_num_{kind}_heads", maximum=HEADS) for kind in ("key", "value"))
    if value_heads % key_heads:
        raise UsageError(
            f"{hf.where} has linear_num_value_heads {value_heads}, which must be a multiple of linear_num_key_heads, "
            f"{key_heads}"
        )
    sizes = GatedDeltaSizes(
        key_heads, value_heads, hf.size("linear_key_head_dim", maximum=HEADS),
        hf.size("linear_value_head_dim", maximum=HEADS), hf.size("linear_conv_kernel_dim", maximum=64, minimum=2),
    )  # fmt: skip
    hf.skip("mamba_ssm_dtype")  # the state is float32
    kinds = {LINEAR: LayerKind("gated_delta"), FULL: LayerKind("attention")}
    return {"kinds": tuple(kinds[name] for name in names), "gated_delta": sizes}
