"""Mixtures of experts with the attention of the Llama family: fields and tensor names of each architecture."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.decoder import DecoderConfig
from specjax.models.experts.routing import Routing
from specjax.models.experts.sizes import MixtureSizes
from specjax.models.loading.families.config_fields import ROWS, ConfigFields
from specjax.models.loading.tensors.assembly import StoredTensor

EXPERTS = 1 << 12
"""Upper bound of the number of experts of any model."""

PARTS = "expert_gate", "expert_up", "expert_down"
MATRICES = "gate_proj", "up_proj", "down_proj"
MLP_PARTS = "gate", "up", "down"


class MixtureForm(NamedTuple):
    """The functions that read and write the mixtures of an architecture with the attention of the Llama family."""

    sizes: Callable[[ConfigFields, int], MixtureSizes]  # of a config.json with so many layers
    stored: Callable[[DecoderConfig], dict[str, StoredTensor]]  # tensors by parameter path
    to_hf: Callable[[DecoderConfig], dict[str, Any]]  # the fields that `sizes` reads


class MixtureFields(NamedTuple):
    """Fields of config.json of an architecture, and the names of its tensors."""

    counts: tuple[str, ...]  # names of the number of experts; the first one is written
    width: str  # of an expert
    module: str  # of the mixture in a layer
    matrices: tuple[str, str, str]  # gate, up and down of an expert
    normalized: bool | None = None  # weights are divided by their sum; None: the field norm_topk_prob
    num_chosen: int = 2  # of a file without the field
    num_experts: int = 8  # of a file without the fields
    default_width: int = 14336  # of a file without the field


FIELDS: Mapping[str, MixtureFields] = MappingProxyType(
    {
        "qwen3_moe": MixtureFields(
            ("num_experts", "num_local_experts"), "moe_intermediate_size", "mlp",
            MATRICES, num_chosen=8, num_experts=128, default_width=768,
        ),
        "mixtral": MixtureFields(
            ("num_local_experts",), "intermediate_size", "block_sparse_moe", ("w1", "w3", "w2"), normalized=True
        ),
        "olmoe": MixtureFields(
            ("num_experts", "num_local_experts"), "intermediate_size", "mlp", MATRICES, num_chosen=8, num_experts=64,
            default_width=2048,
        ),
    }
)  # fmt: skip
"""Fields by `model_type`. Softmax scores over all experts choose the best ones."""


def sizes_from_hf(kind: str, hf: ConfigFields, layers: int) -> MixtureSizes:
    """Return the sizes of a mixture from the config.json of a `model_type` in FIELDS.

    Raises: UsageError for counts that contradict each other, for more chosen experts than there are, and for a model
      whose layers all have an MLP.
    """
    fields = FIELDS[kind]
    count = num_experts(hf, fields.counts, fields.num_experts)
    num_chosen = check_num_chosen(hf, "num_experts_per_tok", count, fields.num_chosen)
    normalized = hf.flag("norm_topk_prob") if fields.normalized is None else fields.normalized
    dense = dense_layers(hf, layers) if kind == "qwen3_moe" else ()
    return MixtureSizes(
        count,
        hf.size(fields.width, fields.default_width, maximum=ROWS),
        Routing(num_chosen, normalized=normalized),
        dense_layers=dense,
    )


def num_experts(hf: ConfigFields, names: tuple[str, ...], default: int | None = None) -> int:
    """Return the number of experts, which a config.json has under one of these names.

    default: the number of a file without them; None: there is none.

    Raises: UsageError for names with different numbers, or for a file without a number.
    """
    counts = {name: hf.size(name, maximum=EXPERTS) for name in names if hf.has(name)}
    if len(set(counts.values())) > 1:
        raise UsageError(
            f"{hf.where} has {' and '.join(f'{name} {count}' for name, count in counts.items())}; make them equal"
        )
    if default is None and not counts:
        return hf.size(names[0], maximum=EXPERTS)
    return next(iter(counts.values()), default or 0)


def check_num_chosen(fields: ConfigFields, name: str, count: int, default: int) -> int:
    """Return the number of experts of a row. Raises: UsageError if it is larger than `count`, their number."""
    num_chosen = fields.size(name, default, maximum=EXPERTS)
    if num_chosen > count:
        raise UsageError(
            f"{fields.where} has {fields.prefix}{name} {num_chosen}, which must be at most {count}, the number of "
            "experts"
        )
    return num_chosen


def dense_layers(hf: ConfigFields, layers: int) -> tuple[int, ...]:
    """Return the layers of a Qwen model that have an MLP in place of experts.

    Raises: UsageError if all have one, or for a list with other entries than layers.
    """
    step, listed = hf.size("decoder_sparse_step", 1), hf.array("mlp_only_layers", int)
    if any(not 0 <= layer < layers for layer in listed):
        raise UsageError(f"{hf.where} has mlp_only_layers {quote(listed)}, which must be layers from 0 to {layers - 1}")
    dense = tuple(layer for layer in range(layers) if layer in listed or (layer + 1) % step)
    if len(dense) == layers:
        raise UsageError(
            f"{hf.where} has experts in none of its {layers} layers (decoder_sparse_step, mlp_only_layers); state "
            "the model_type of a dense model"
        )
    return dense


def form(kind: str) -> MixtureForm:
    """Return the functions for a `model_type` in FIELDS."""
    bind = functools.partial
    return MixtureForm(bind(sizes_from_hf, kind), bind(stored_hf, kind), bind(to_hf, kind))


def stored_hf(kind: str, c: DecoderConfig) -> dict[str, StoredTensor]:
    """Map parameter paths of the experts to tensors of a Hugging Face checkpoint of a `model_type` in FIELDS."""
    fields = FIELDS[kind]
    module = f"model.layers.*.{fields.module}."
    return separate_experts(f"{module}experts.#.", fields.matrices) | {
        "layers.*.mlp.router.weight": StoredTensor(f"{module}gate.weight")
    }


def separate_experts(prefix: str, matrices: tuple[str, str, str] = MATRICES) -> dict[str, StoredTensor]:
    """Map the parameters of experts to tensors of a file with three matrices for each expert, and perhaps biases.

    prefix: of their names, with `#` for the expert.
    """
    return {
        f"layers.*.mlp.{part}.{leaf}": StoredTensor(f"{prefix}{name}.{leaf}")
        for part, name in zip(PARTS, matrices, strict=True)
        for leaf in ("weight", "bias")
    }


def are_separate(names: Collection[str]) -> bool:
    """Return True if a file has a tensor for each matrix of an expert, in a family whose files stack them.

    transformers writes some families so, and specjax writes quantised experts so.
    """
    return any(name.endswith(".experts.0.gate_proj.weight") for name in names)


def stacked_experts(gate_up: str, down: str, width: int) -> dict[str, StoredTensor]:
    """Map the parameters of experts to two tensors [E, 2 F, D] and [E, D, F] of a file, the gates before the others.

    width: F, the number of hidden units of an expert.
    """
    part = lambda first: StoredTensor(gate_up, first=first, rows=2 * width, stacked=True)
    return dict(
        zip(
            (f"layers.*.mlp.{part}.weight" for part in PARTS),
            (part(0), part(width), StoredTensor(down, stacked=True)),
            strict=True,
        )
    )


def shared_expert(prefix: str) -> dict[str, StoredTensor]:
    """Map the parameters of the MLP that reads every row to tensors whose names have this prefix."""
    return {f"layers.*.mlp.shared.{part}.weight": StoredTensor(f"{prefix}{part}_proj.weight") for part in MLP_PARTS}


def to_hf(kind: str, c: DecoderConfig) -> dict[str, Any]:
    """Return the fields that `sizes_from_hf` reads."""
    fields, sizes = FIELDS[kind], c.experts
    assert sizes is not None
    result: dict[str, Any] = {
        fields.counts[0]: sizes.num_experts,
        fields.width: sizes.width,
        "num_experts_per_tok": sizes.routing.num_chosen,
    }
    if fields.normalized is None:
        result["norm_topk_prob"] = sizes.routing.normalized
    if kind == "qwen3_moe":
        result |= {"decoder_sparse_step": 1, "mlp_only_layers": list(sizes.dense_layers)}
    return result


def kind_of(c: DecoderConfig) -> str:
    """Return the `model_type` with code that computes the same as a config with experts."""
    assert c.experts is not None
    if c.sinks:
        return "gpt_oss"
    if c.experts.routing.scores == "sigmoid":
        return "glm4_moe"
    if not c.qk_norm:
        return "mixtral"
    return "qwen3_moe" if c.qk_norm_scope == "head" else "olmoe"
