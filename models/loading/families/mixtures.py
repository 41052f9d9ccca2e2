"""Mixtures of experts with the attention of the Llama family: fields and tensor names of each architecture."""

from __future__ import annotations

from collections.abc import Mapping
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
            ("gate_proj", "up_proj", "down_proj"), num_chosen=8, num_experts=128,
            default_width=768,
        ),
        "mixtral": MixtureFields(
            ("num_local_experts",), "intermediate_size", "block_sparse_moe", ("w1", "w3", "w2"), normalized=True
        ),
        "olmoe": MixtureFields(
            ("num_experts", "num_local_experts"), "intermediate_size", "mlp", ("gate_proj", "up_proj", "down_proj"),
            num_chosen=8, num_experts=64, default_width=2048,
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
    stated = {name: hf.size(name, maximum=EXPERTS) for name in fields.counts if hf.has(name)}
    if len(set(stated.values())) > 1:
        raise UsageError(
            f"{hf.where} has {' and '.join(f'{name} {count}' for name, count in stated.items())}; make them equal"
        )
    count = next(iter(stated.values()), fields.num_experts)
    num_chosen = check_num_chosen(hf, "num_experts_per_tok", count, fields.num_chosen)
    normalized = hf.flag("norm_topk_prob") if fields.normalized is None else fields.normalized
    dense = dense_layers(hf, layers) if kind == "qwen3_moe" else ()
    return MixtureSizes(
        count,
        hf.size(fields.width, fields.default_width, maximum=ROWS),
        Routing(num_chosen, normalized=normalized),
        dense_layers=dense,
    )


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


def stored_hf(kind: str) -> dict[str, StoredTensor]:
    """Map parameter paths of the experts to tensors of a Hugging Face checkpoint of a `model_type` in FIELDS."""
    fields = FIELDS[kind]
    module = f"model.layers.*.{fields.module}."
    matrices = {
        f"layers.*.mlp.{part}.weight": StoredTensor(f"{module}experts.#.{name}.weight")
        for part, name in zip(PARTS, fields.matrices, strict=True)
    }
    return matrices | {"layers.*.mlp.router.weight": StoredTensor(f"{module}gate.weight")}


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
    if not c.qk_norm:
        return "mixtral"
    return "qwen3_moe" if c.qk_norm_scope == "head" else "olmoe"
