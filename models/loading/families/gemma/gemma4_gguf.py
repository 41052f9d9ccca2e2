"""Gemma 4 in GGUF files: names and fields of llama.cpp.

Source: the tables of the package gguf 0.19, which name the tensors and fields. No file of a published model was read.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.decoder import UNLIMITED_WINDOW
from specjax.models.hybrid.config import HybridConfig, LayerInputSizes
from specjax.models.loading.families import llama
from specjax.models.loading.families.config_fields import HEADS, WIDTH, ConfigFields, check_heads
from specjax.models.loading.families.gemma import gemma4
from specjax.models.loading.families.hybrid import common
from specjax.models.loading.families.rope import BASE, FULL, GGUF_DIVISORS, SLIDING
from specjax.models.loading.tensors.assembly import StoredTensor
from specjax.models.rotary import RopeScaling

HF_TYPES: tuple[str, ...] = ()
MODEL_TYPES: tuple[str, ...] = ()
GGUF_TYPES = ("gemma4",)

SHARED = "attention.shared_kv_layers"
NAMES = {
    "layers.*.mlp_norm.weight": "blk.*.ffn_norm.weight",
    "layers.*.layer_input.gate.weight": "blk.*.inp_gate.weight",
    "layers.*.layer_input.projection.weight": "blk.*.proj.weight",
    "layers.*.layer_input.norm.weight": "blk.*.post_norm.weight",
    "layers.*.scale.weight": "blk.*.layer_output_scale.weight",
    "layer_inputs.table.weight": "per_layer_token_embd.weight",
    "layer_inputs.projection.weight": "per_layer_model_proj.weight",
    "layer_inputs.norm.weight": "per_layer_proj_norm.weight",
}
DIVISORS, *_OTHER_DIVISORS = GGUF_DIVISORS
NO_ROTATION = 1e20  # llama.cpp divides the frequencies that are zero by 1e30


def stored_gguf(config: HybridConfig, arch: str) -> dict[str, StoredTensor]:
    """Map parameter paths to tensors of a GGUF file, whose norms store the factor itself too."""
    return {path: StoredTensor(row.gguf) for path, row in gemma4.names_of(gguf=NAMES).items()}


def unused_gguf(config: HybridConfig) -> frozenset[str]:
    """Return the tensors that a GGUF file may have for layers without keys of their own."""
    return gemma4.tensors_of_shared(config, "blk.{}.{}.weight", ("attn_k", "attn_v", "attn_k_norm"))


def config_from_gguf(meta: ConfigFields, shapes: dict[str, tuple[int, ...]], factors, **options) -> HybridConfig:
    """Build a config from the metadata of a file of one of GGUF_TYPES.

    Args:
      shapes: shapes of the file's tensors.
      factors: tensors of rope.GGUF_DIVISORS. Frequencies with a large divisor are zero.

    Raises: UsageError for a mixture of experts, or layers of one kind that differ.
    """
    common.refuse_experts(meta, "expert_count")
    sizes = common.gguf_sizes_of_model(meta, shapes)
    names = [FULL if full else SLIDING for full in llama.gguf_global_layers(meta, sizes["num_layers"], 6)]
    if names[-1] != FULL:
        raise UsageError(f"{meta.where} has a last layer with a window, and that of each Gemma 4 model has none")
    heads, shared = meta.size("attention.head_count", maximum=HEADS), meta.size(SHARED, 0, minimum=0)
    kv_heads = _kv_heads(meta, names, heads)
    full_dim = meta.size("attention.key_length", maximum=HEADS)
    local_dim = meta.size("attention.key_length_swa", full_dim, maximum=HEADS)
    meta.skip("attention.value_length_swa")
    for name, head_dim in ((FULL, full_dim), (SLIDING, local_dim)):
        check_heads(meta, llama.GGUF_HEADS, heads, kv_heads[name], head_dim)
    scaling = _rotary(meta, factors, full_dim, local_dim)
    width, table = meta.size("embedding_length_per_layer_input", 0, minimum=0, maximum=WIDTH), "per_layer_token_embd"
    full_layers = [layer for layer, name in enumerate(names) if name == FULL and layer < len(names) - shared]
    joined = any(f"blk.{layer}.attn_v.weight" not in shapes for layer in full_layers)
    base = meta.number("rope.freq_base", 1e6, **BASE)
    mlp_widths = _mlp_widths(meta, shapes, len(names), shared)
    of_full = gemma4.full_layer(full_dim, kv_heads[FULL], base, scaling, joined)
    return HybridConfig(
        **sizes,
        **gemma4.CONSTANTS,
        num_heads=heads,
        num_kv_heads=kv_heads[SLIDING],
        head_dim=local_dim,
        kinds=gemma4.kinds_of_layers(names, shared, of_full, mlp_widths, f"{meta.where} has {meta.prefix}{SHARED}"),
        mlp_width=mlp_widths[0],
        window=meta.size("attention.sliding_window", maximum=UNLIMITED_WINDOW),
        rope_base=meta.number("rope.freq_base_swa", 1e4, **BASE),
        logit_softcap=meta.number("final_logit_softcapping", None),
        layer_inputs=LayerInputSizes(width, common.gguf_rows(shapes, f"{table}.weight", meta.where)) if width else None,
        **options,
    )


def _kv_heads(meta: ConfigFields, names: list[str], heads: int) -> dict[str, int]:
    """Return the number of key/value heads of each kind of layer. The field is a number or has one per layer.

    Raises: UsageError if layers of one kind differ.
    """
    field = "attention.head_count_kv"
    if not isinstance(meta.value(field), list):
        return dict.fromkeys((FULL, SLIDING), meta.size(field, heads, maximum=HEADS))
    counts = meta.array(field, int, len(names))
    by_name = {name: {count for count, other in zip(counts, names, strict=True) if other == name} for name in names}
    if any(len(numbers) > 1 for numbers in by_name.values()) or not 1 <= min(counts) <= max(counts) <= HEADS:
        raise UsageError(
            f"{meta.where} has {meta.prefix}{field} {quote(counts)}, which must be from 1 to {HEADS}, and equal in "
            "layers of one kind"
        )
    return {name: min(by_name.get(name, counts)) for name in (FULL, SLIDING)}


def _rotary(meta: ConfigFields, factors: Mapping[str, np.ndarray], full_dim: int, local_dim: int) -> RopeScaling | None:
    """Return the rotary scaling of global layers.

    Raises: UsageError for heads that are rotated in part, or for divisors that change other frequencies than to zero.
    """
    for field, head_dim in (("rope.dimension_count", full_dim), ("rope.dimension_count_swa", local_dim)):
        rotated = meta.size(field, head_dim, maximum=HEADS)
        if rotated != head_dim:
            raise UsageError(
                f"{meta.where} has {meta.prefix}{field} {rotated}, and heads of {head_dim} numbers; specjax supports "
                "equal ones only for Gemma 4"
            )
    other = [name for name in _OTHER_DIVISORS if name in factors]
    divisors = factors.get(DIVISORS)
    if divisors is None:
        if not other:
            return None
        divisors = np.ones(0, np.float32)
    rotated = int((divisors < NO_ROTATION).sum())
    if other or len(divisors) != full_dim // 2 or not rotated or not (divisors[:rotated] == 1.0).all():
        raise UsageError(
            f"{meta.where} has {other[0] if other else DIVISORS}, whose divisors are not {full_dim // 2} numbers, each "
            "1 for the first pairs and 1e30 for the others; convert the model again"
        )
    return RopeScaling("proportional", 1.0, share=rotated / len(divisors))


def _mlp_widths(meta: ConfigFields, shapes: dict[str, tuple[int, ...]], layers: int, shared: int) -> tuple[int, int]:
    """Return the hidden units of the MLPs of layers with keys, and of those without.

    Raises: UsageError if layers of one kind differ.
    """
    widths = [common.gguf_rows(shapes, f"blk.{layer}.ffn_up.weight", meta.where) for layer in range(layers)]
    boundary = max(layers - shared, 1)
    with_keys = set(widths[:boundary])
    without_keys = set(widths[boundary:]) or with_keys
    if len(with_keys) > 1 or len(without_keys) > 1 or not without_keys <= {min(with_keys), 2 * min(with_keys)}:
        raise UsageError(
            f"{meta.where} has MLPs of {quote(widths)} hidden units, which must be equal in all layers, or twice as "
            "many in the layers without keys"
        )
    return min(with_keys), min(without_keys)
