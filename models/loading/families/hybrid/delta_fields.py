"""Fields and tensor names that Qwen3.5 and Qwen3-Next share: all but the input projections of gated delta nets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from specjax.errors import UsageError
from specjax.models.experts.routing import Routing
from specjax.models.experts.sizes import MixtureSizes
from specjax.models.hybrid.config import GatedDeltaSizes, HybridConfig, LayerKind
from specjax.models.loading.families import llama, mixtures, mixtures_gguf, rope
from specjax.models.loading.families.config_fields import HEADS, ROWS, ConfigFields
from specjax.models.loading.families.hybrid import common
from specjax.models.loading.tensors.assembly import StoredTensor

ROTATED_PART = 0.25  # of each head, in files that do not state it
LINEAR, FULL = "linear_attention", "full_attention"
KINDS = {LINEAR: LayerKind("gated_delta"), FULL: LayerKind("attention")}

SIZES = {
    "linear_num_key_heads": "num_key_heads", "linear_num_value_heads": "num_value_heads",
    "linear_key_head_dim": "key_dim", "linear_value_head_dim": "value_dim", "linear_conv_kernel_dim": "kernel",
}  # fmt: skip
"""Fields of config.json and of `GatedDeltaSizes`."""

_LAYER = "model.layers.*.linear_attn."
_MLP = "model.layers.*.mlp."
_RECURRENT = "layers.*.recurrent."
NAMES = common.by_path(
    common.WEIGHTS,
    hf={
        _RECURRENT + "decay.bias": _LAYER + "dt_bias",
        _RECURRENT + "norm.weight": _LAYER + "norm.weight",
        _RECURRENT + "out.weight": _LAYER + "out_proj.weight",
    },
    gguf={
        _RECURRENT + "convolution.kernel": "blk.*.ssm_conv1d.weight",
        _RECURRENT + "decay.rate": "blk.*.ssm_a",
        _RECURRENT + "decay.bias": "blk.*.ssm_dt.bias",
        _RECURRENT + "norm.weight": "blk.*.ssm_norm.weight",
        _RECURRENT + "out.weight": "blk.*.ssm_out.weight",
        "layers.*.mlp_norm.weight": "blk.*.post_attention_norm.weight",
    },
)
PLAIN_NORM = _RECURRENT + "norm.weight"


def stored_hf(config: HybridConfig) -> dict[str, StoredTensor]:
    """Map parameter paths to tensors of a Hugging Face checkpoint."""
    has_unit = lambda path: path.endswith("norm.weight") and path != PLAIN_NORM
    stored = {path: StoredTensor(row.hf, add=1.0 if has_unit(path) else 0.0) for path, row in NAMES.items()}
    stored[_RECURRENT + "convolution.kernel"] = common.convolution(_LAYER + "conv1d.weight")
    stored[_RECURRENT + "decay.rate"] = common.decay_rate(_LAYER + "A_log")
    if config.experts is not None:
        stored |= mixtures.shared_expert(_MLP + "shared_expert.")
        stored["layers.*.mlp.router.weight"] = StoredTensor(_MLP + "gate.weight")
        stored["layers.*.mlp.shared_gate.weight"] = StoredTensor(_MLP + "shared_expert_gate.weight")
    return stored | gated_queries(config, "model.layers.*.self_attn.q_proj.weight")


def stored_gguf(config: HybridConfig) -> dict[str, StoredTensor]:
    """Map parameter paths to tensors of a GGUF file."""
    stored = {path: StoredTensor(row.gguf) for path, row in NAMES.items()}
    if config.experts is not None:
        stored |= mixtures_gguf.stored_gguf()
        stored["layers.*.mlp.shared_gate.weight"] = StoredTensor("blk.*.ffn_gate_inp_shexp.weight")
    return stored | gated_queries(config, "blk.*.attn_q.weight")


def gated_queries(config: HybridConfig, name: str) -> dict[str, StoredTensor]:
    """Map the queries and the output gate to one matrix with the rows of both for each head."""
    heads, size = config.num_heads, config.head_dim
    part = lambda first: StoredTensor(name, rows=2 * heads * size, order=common.head_rows(heads, size, 2 * size, first))
    return {"layers.*.attention.q.weight": part(0), "layers.*.attention.output_gate.weight": part(size)}


def experts_from_hf(hf: ConfigFields, layers: int, *, normalized: bool) -> MixtureSizes:
    """Return the sizes of the experts, and of the gated MLP beside them, by a config.json.

    normalized: the weights of the chosen experts are divided by their sum.

    Raises: UsageError as `mixtures.check_num_chosen` and `mixtures.dense_layers` do.
    """
    count = hf.size("num_experts", maximum=mixtures.EXPERTS)
    return MixtureSizes(
        count,
        hf.size("moe_intermediate_size", maximum=ROWS),
        Routing(mixtures.check_num_chosen(hf, "num_experts_per_tok", count, 8), normalized=normalized),
        shared_width=hf.size("shared_expert_intermediate_size", maximum=ROWS),
        shared_gate=True,
        dense_layers=mixtures.dense_layers(hf, layers),
    )


def experts_to_hf(c: HybridConfig) -> dict[str, Any]:
    """Return the fields that `experts_from_hf` reads."""
    sizes = c.experts
    assert sizes is not None
    return {
        "num_experts": sizes.num_experts,
        "num_experts_per_tok": sizes.routing.num_chosen,
        "moe_intermediate_size": sizes.width,
        "shared_expert_intermediate_size": sizes.shared_width,
        "norm_topk_prob": sizes.routing.normalized,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(sizes.dense_layers),
    }


def config_from_hf(
    hf: ConfigFields, defaults: Mapping[str, Any], *, experts: MixtureSizes | None = None, **options
) -> HybridConfig:
    """Build a config from a config.json.

    Args:
      experts: sizes of the mixture of experts in its layers; None: all have an MLP.
      options: model_type, dtype, cache_dtype, name, and those of `storage_options`.
    """
    hf = rope.with_length(hf).with_defaults(defaults)
    common.check_activation(hf)
    common.refuse_flags(hf, "attention_bias")
    common.check_only(hf, {"attn_output_gate": True})
    sizes = common.sizes_of_hf(hf)
    base, scaling, rotary_dim = rope.rotary_from_hf(
        hf, sizes["head_dim"], layer_type=FULL, partial=True, part=ROTATED_PART
    )
    interval = hf.size("full_attention_interval", 4)
    every_nth = lambda: [FULL if full else LINEAR for full in llama.every_nth_layer(interval, sizes["num_layers"])]
    names = common.layer_names(hf, sizes["num_layers"], every_nth, KINDS)
    hf.skip("mamba_ssm_dtype", "mlp_only_layers")  # the state is float32, and a model without experts has no list
    return HybridConfig(
        **sizes,
        kinds=with_experts(tuple(KINDS[name] for name in names), experts),
        experts=experts,
        gated_delta=_checked(
            {ours: hf.size(name, maximum=HEADS) for name, ours in SIZES.items()}, hf.where, tuple(SIZES)
        ),
        mlp_width=hf.size("intermediate_size", maximum=ROWS),
        rope_base=base,
        rope_scaling=scaling,
        rotary_dim=rotary_dim,
        norm_eps=hf.number("rms_norm_eps", 1e-6, maximum=1.0),
        tied=hf.flag("tie_word_embeddings"),
        qk_norm=True,
        attention_gate=True,
        max_positions=rope.max_positions(hf, scaling),
        **options,
    )


def with_experts(kinds: tuple[LayerKind, ...], experts: MixtureSizes | None) -> tuple[LayerKind, ...]:
    """Return the kinds of layers with experts in place of their MLPs, except in the dense layers."""
    if experts is None:
        return kinds
    return tuple(
        kind if layer in experts.dense_layers else kind._replace(feed="moe") for layer, kind in enumerate(kinds)
    )


def _checked(sizes: Mapping[str, int], where: str, names: tuple[str, ...]) -> GatedDeltaSizes:
    """Return the sizes of gated delta nets.

    Args:
      names: the fields of the file with the sizes, in the order of SIZES.

    Raises: UsageError for a convolution of another length, or for heads that do not share keys evenly.
    """
    result = GatedDeltaSizes(**sizes)
    if not 2 <= result.kernel <= 64:
        raise UsageError(f"{where} has {names[4]} {result.kernel}, which must be a whole number from 2 to 64")
    if result.num_value_heads % result.num_key_heads:
        raise UsageError(
            f"{where} has {names[1]} {result.num_value_heads}, which must be a multiple of {names[0]}, "
            f"{result.num_key_heads}"
        )
    return result


def config_to_hf(c: HybridConfig) -> dict[str, Any]:
    """Return the fields that `config_from_hf` reads."""
    assert c.gated_delta is not None
    settings = rope.to_rope_parameters(rope.rotary_to_hf(c.rope_base, c.rope_scaling))
    return common.attention_to_hf(c) | {
        "intermediate_size": c.mlp_width,
        "layer_types": [FULL if kind.attends else LINEAR for kind in c.kinds],
        **{name: getattr(c.gated_delta, ours) for name, ours in SIZES.items()},
        "rope_parameters": settings | {"partial_rotary_factor": (c.rotary_dim or c.head_dim) / c.head_dim},
        "rms_norm_eps": c.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
    }


def config_from_gguf(
    meta: ConfigFields, shapes: dict[str, tuple[int, ...]], factors: Mapping[str, np.ndarray], **options
) -> HybridConfig:
    """Build a config from GGUF metadata.

    Args:
      shapes: shapes of the file's tensors.
      factors: its tensors of rope.GGUF_DIVISORS, which must be empty.
      options: as in `config_from_hf`.
    """
    where = meta.where
    experts = _gguf_experts(meta)
    if factors:
        raise UsageError(f"{where} has a {min(factors)}, which specjax does not support for this architecture")
    sizes = common.gguf_sizes_of_model(meta, shapes)
    attention = common.gguf_attention(meta, sizes["width"])
    base, scaling = rope.rotary_from_gguf(meta)
    kinds = common.gguf_kinds(shapes, sizes["num_layers"], {"ssm_out": KINDS[LINEAR], "attn_q": KINDS[FULL]}, where)
    # The tensors show the kinds of layers, and the three positions of a token of text are equal.
    meta.skip("full_attention_interval", "rope.dimension_sections")
    return HybridConfig(
        **sizes,
        **attention,
        kinds=with_experts(kinds, experts),
        experts=experts,
        gated_delta=_gguf_sizes(meta),
        mlp_width=common.gguf_mlp_width(shapes, kinds, where) if experts is None else experts.width,
        rope_base=base,
        rope_scaling=scaling,
        rotary_dim=common.gguf_rotary_dim(meta, attention["head_dim"]),
        qk_norm=True,
        attention_gate=True,
        **options,
    )


def _gguf_experts(meta: ConfigFields) -> MixtureSizes | None:
    """Return the sizes of the experts, and of the gated MLP beside them, by GGUF metadata; None for a dense model."""
    count = meta.size("expert_count", 0, minimum=0, maximum=mixtures.EXPERTS)
    if not count:
        meta.skip("expert_used_count", "expert_feed_forward_length", "expert_shared_feed_forward_length")
        return None
    return MixtureSizes(
        count,
        meta.size("expert_feed_forward_length", maximum=ROWS),
        Routing(mixtures.check_num_chosen(meta, "expert_used_count", count, 8), normalized=True),
        shared_width=meta.size("expert_shared_feed_forward_length", maximum=ROWS),
        shared_gate=True,
    )


def _gguf_sizes(meta: ConfigFields) -> GatedDeltaSizes:
    """Return the sizes of gated delta nets from GGUF metadata. Raises: UsageError for sizes that do not fit."""
    inner, heads = meta.size("ssm.inner_size", maximum=ROWS), meta.size("ssm.time_step_rank", maximum=HEADS)
    if inner % heads:
        raise UsageError(
            f"{meta.where} has {meta.prefix}ssm.inner_size {inner}, which must be a multiple of "
            f"{meta.prefix}ssm.time_step_rank, {heads}"
        )
    sizes = {
        "num_key_heads": meta.size("ssm.group_count", maximum=HEADS),
        "num_value_heads": heads,
        "key_dim": meta.size("ssm.state_size", maximum=HEADS),
        "value_dim": inner // heads,
        "kernel": meta.size("ssm.conv_kernel", maximum=HEADS),
    }
    fields = "group_count", "time_step_rank", "state_size", "inner_size", "conv_kernel"
    return _checked(sizes, meta.where, tuple(f"{meta.prefix}ssm.{name}" for name in fields))
