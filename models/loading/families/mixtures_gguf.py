"""Mixtures of experts in GGUF files: fields and tensor names of llama.cpp.

Sources: the tables of the package gguf 0.19, and what llama.cpp's converter writes. No file of a published mixture was
read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.experts.routing import Routing
from specjax.models.experts.sizes import MixtureSizes
from specjax.models.loading.families.config_fields import LAYERS, ROWS, ConfigFields
from specjax.models.loading.families.deepseek.routing import EPSILON
from specjax.models.loading.families.mixtures import EXPERTS, MLP_PARTS, PARTS, check_num_chosen
from specjax.models.loading.tensors.assembly import StoredTensor

Scores = Literal["softmax", "sigmoid", "softmax_of_chosen"]


class GgufMixture(NamedTuple):
    """Rules of the mixtures of an architecture, which its files omit or may omit."""

    scores: Scores | None = "softmax"  # None: sigmoid if the file has corrections, or else softmax
    normalized: bool = False  # weights are divided by their sum, for a file without the field
    has_more: bool = False  # files may have a scale, groups of experts, shared MLPs and dense layers
    sizes: Mapping[str, Any] = MappingProxyType({})  # fields of MixtureSizes


ROWS_OF_GGUF: Mapping[str, GgufMixture] = MappingProxyType(
    {
        "llama": GgufMixture(normalized=True),  # Mixtral
        "qwen3moe": GgufMixture(normalized=True),
        "olmoe": GgufMixture(),
        "gpt-oss": GgufMixture("softmax_of_chosen", sizes={"router_bias": True, "bias": True, "limit": 7.0}),
        "glm4moe": GgufMixture("sigmoid", has_more=True, sizes={"correction": True}),
        "deepseek2": GgufMixture(None, has_more=True),
    }
)
"""Rules by `general.architecture`."""

GATING: Mapping[int, Scores] = MappingProxyType({1: "softmax", 2: "sigmoid", 3: "softmax_of_chosen"})
"""Scores by the number in `expert_gating_func`."""

CORRECTION = "exp_probs_b.bias"


def sizes_from_gguf(arch: str, meta: ConfigFields, names: Collection[str]) -> MixtureSizes | None:
    """Return the sizes of the mixtures of a GGUF file; None if it has none.

    names: the tensors of the file.

    Raises: UsageError for an architecture or a router that specjax does not read, and for counts that contradict each
      other.
    """
    if not meta.size("expert_count", 0, minimum=0):
        meta.skip("expert_used_count")
        return None
    if arch not in ROWS_OF_GGUF:
        raise UsageError(
            f"{meta.where} is a mixture of experts, which specjax does not read from files of the architecture "
            f"{quote(arch)}; use its safetensors"
        )
    row, count = ROWS_OF_GGUF[arch], meta.size("expert_count", maximum=EXPERTS)
    width_field = "expert_feed_forward_length" if meta.has("expert_feed_forward_length") else "feed_forward_length"
    width = meta.size(width_field, maximum=ROWS)
    scores = _scores(row, meta, names)
    is_sigmoid = scores == "sigmoid"
    groups, best_groups = _groups(meta, count)
    routing = Routing(
        check_num_chosen(meta, "expert_used_count", count, 2),
        scores,
        normalized=meta.flag("expert_weights_norm", row.normalized),
        epsilon=EPSILON if is_sigmoid else 0.0,
        scale=meta.number("expert_weights_scale", 1.0, minimum=0.0) or 1.0,  # llama.cpp writes 0 for none
        num_groups=groups,
        num_chosen_groups=best_groups,
        group_score="two_best" if is_sigmoid else "maximum",
    )
    sizes = MixtureSizes(count, width, routing, **row.sizes)
    if row.has_more:
        return _with_shared(meta, sizes._replace(correction=is_sigmoid))
    if routing.scale != 1.0 or groups != 1:
        raise UsageError(
            f"{meta.where} has {meta.prefix}expert_weights_scale {routing.scale:g} and expert_group_count {groups}; "
            f"specjax supports 1 and 1 only for the architecture {quote(arch)}"
        )
    return sizes


def _scores(row: GgufMixture, meta: ConfigFields, names: Collection[str]) -> Scores:
    """Return the scores of a router. Raises: UsageError for those of another router than the architecture has."""
    supported: tuple[Scores, ...] = ("softmax", "sigmoid") if row.scores is None else (row.scores,)
    default = supported[-1] if any(name.endswith(CORRECTION) for name in names) else supported[0]
    field = "expert_gating_func"
    number = meta.size(field, 0, minimum=0)
    scores = GATING.get(number) if number else default
    if scores not in supported:
        numbers = " or ".join(str(code) for code, name in GATING.items() if name in supported)
        raise UsageError(
            f"{meta.where} has {meta.prefix}{field} {number}, a router that specjax does not support for this "
            f"architecture (only {numbers})"
        )
    return scores


def _groups(meta: ConfigFields, count: int) -> tuple[int, int]:
    """Return the number of groups of experts, and of those whose experts can be chosen.

    Raises: UsageError for groups that do not divide the experts, or for more chosen groups than there are.
    """
    names = "expert_group_count", "expert_group_used_count"
    groups, best = (max(meta.size(name, 1, minimum=0, maximum=EXPERTS), 1) for name in names)
    if count % groups or best > groups:
        raise UsageError(
            f"{meta.where} has {meta.prefix}expert_group_count {groups} and expert_group_used_count {best} for {count} "
            "experts; groups must divide the experts, and the second number must be at most the first"
        )
    return groups, best


def _with_shared(meta: ConfigFields, sizes: MixtureSizes) -> MixtureSizes:
    """Return the sizes with the MLP that reads every row, and the first layers, which are dense.

    Raises: UsageError for a model whose layers are all dense.
    """
    shared = meta.size("expert_shared_count", 0, minimum=0, maximum=EXPERTS)
    dense, layers = (
        meta.size("leading_dense_block_count", 0, minimum=0), meta.size("block_count", maximum=LAYERS),
    )  # fmt: skip
    if dense >= layers:
        raise UsageError(
            f"{meta.where} has {meta.prefix}leading_dense_block_count {dense}, so none of its {layers} layers has "
            "experts; specjax needs a layer with experts for this architecture"
        )
    return sizes._replace(shared_width=shared * sizes.width, dense_layers=tuple(range(dense)))


def stored_gguf() -> dict[str, StoredTensor]:
    """Map the parameters of mixtures to tensors of a GGUF file, one for each matrix of all experts."""
    stored = {
        "layers.*.mlp.router.weight": StoredTensor("blk.*.ffn_gate_inp.weight"),
        "layers.*.mlp.router.bias": StoredTensor("blk.*.ffn_gate_inp.bias"),
        "layers.*.mlp.router.correction": StoredTensor(f"blk.*.{CORRECTION}"),
    }
    for part, name in zip(PARTS, MLP_PARTS, strict=True):
        stored[f"layers.*.mlp.shared.{name}.weight"] = StoredTensor(f"blk.*.ffn_{name}_shexp.weight")
        for leaf in ("weight", "bias"):
            stored[f"layers.*.mlp.{part}.{leaf}"] = StoredTensor(f"blk.*.ffn_{name}_exps.{leaf}", stacked=True)
    return stored


def earlier_gguf(names: Collection[str]) -> dict[str, StoredTensor]:
    """Map the paths that differ in files of earlier converters of Mixtral, which have a tensor per expert."""
    if not any(name.endswith(".ffn_gate.0.weight") for name in names):
        return {}
    return {
        f"layers.*.mlp.{part}.weight": StoredTensor(f"blk.*.ffn_{name}.#.weight")
        for part, name in zip(PARTS, MLP_PARTS, strict=True)
    }
