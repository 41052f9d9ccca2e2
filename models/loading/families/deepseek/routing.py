"""Routers of DeepSeek-V3 and GLM-4.5: sigmoid scores, a correction for the choice, groups, and a shared MLP."""

from __future__ import annotations

from typing import Any

from specjax.errors import UsageError
from specjax.models.decoder import DecoderConfig
from specjax.models.experts.routing import Routing
from specjax.models.experts.sizes import MixtureSizes
from specjax.models.loading.families import mixtures
from specjax.models.loading.families.config_fields import ROWS, ConfigFields
from specjax.models.loading.tensors.assembly import StoredTensor

COUNTS = "n_routed_experts", "num_experts", "num_local_experts"
EPSILON = 1e-20  # added to the sum of the weights of the chosen experts

FIELDS_OF_GLM = {
    "vocab_size": 151_552, "hidden_size": 4096, "intermediate_size": 10_944, "num_hidden_layers": 46,
    "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5, "n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
    "n_group": 1, "topk_group": 1, "partial_rotary_factor": 0.5,
}  # fmt: skip
"""Defaults of the class of transformers for GLM-4.5."""

_MLP = "model.layers.*.mlp."


def sizes_from_hf(hf: ConfigFields, layers: int) -> MixtureSizes:
    """Return the sizes of a mixture with sigmoid scores.

    Raises: UsageError for counts or groups that contradict each other, or for a model whose layers are all dense.
    """
    count = mixtures.num_experts(hf, COUNTS)
    groups, best_groups = group_counts(hf, count)
    routing = Routing(
        mixtures.check_num_chosen(hf, "num_experts_per_tok", count, 8),
        "sigmoid",
        normalized=hf.flag("norm_topk_prob", True),
        epsilon=EPSILON,
        scale=hf.number("routed_scaling_factor", 1.0),
        num_groups=groups,
        num_chosen_groups=best_groups,
        group_score="two_best",
    )
    return with_shared(hf, layers, MixtureSizes(count, width_of(hf), routing, correction=True))


def with_shared(hf: ConfigFields, layers: int, sizes: MixtureSizes) -> MixtureSizes:
    """Return the sizes with the MLP that reads every row, and the first layers, which are dense."""
    shared = hf.size("n_shared_experts", 0, minimum=0, maximum=mixtures.EXPERTS)
    first = hf.size("first_k_dense_replace", 0, minimum=0)
    if hf.size("moe_layer_freq", 1) != 1:
        raise UsageError(f"{hf.where} has moe_layer_freq {hf.size('moe_layer_freq')}; specjax supports 1 only")
    if first >= layers:
        raise UsageError(
            f"{hf.where} has first_k_dense_replace {first}, so none of its {layers} layers has experts; state the "
            "model_type of a dense model"
        )
    return sizes._replace(shared_width=shared * sizes.width, dense_layers=tuple(range(first)))


def width_of(hf: ConfigFields) -> int:
    """Return the number of hidden units of an expert."""
    return hf.size("moe_intermediate_size", maximum=ROWS)


def group_counts(hf: ConfigFields, count: int) -> tuple[int, int]:
    """Return the number of groups of experts, and of those whose experts can be chosen.

    Raises: UsageError for groups that do not divide the experts, or for more chosen groups than there are.
    """
    groups, best = (hf.size(name, 1, maximum=mixtures.EXPERTS) for name in ("n_group", "topk_group"))
    if count % groups or best > groups:
        raise UsageError(
            f"{hf.where} has n_group {groups} and topk_group {best} for {count} experts; groups must divide the "
            "experts, and topk_group must be at most n_group"
        )
    return groups, best


def stored_hf(c: DecoderConfig) -> dict[str, StoredTensor]:
    """Map parameter paths of the experts to tensors of a Hugging Face checkpoint."""
    return {
        **mixtures.separate_experts(_MLP + "experts.#."),
        **mixtures.shared_expert(_MLP + "shared_experts."),
        "layers.*.mlp.router.weight": StoredTensor(_MLP + "gate.weight"),
        "layers.*.mlp.router.correction": StoredTensor(_MLP + "gate.e_score_correction_bias"),
    }


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    """Return the fields that `sizes_from_hf` reads."""
    sizes = c.experts
    assert sizes is not None
    return {
        "n_routed_experts": sizes.num_experts,
        "num_experts_per_tok": sizes.routing.num_chosen,
        "moe_intermediate_size": sizes.width,
        "n_shared_experts": sizes.shared_width // sizes.width,
        "first_k_dense_replace": len(sizes.dense_layers),
        "norm_topk_prob": sizes.routing.normalized,
        "routed_scaling_factor": sizes.routing.scale,
        "n_group": sizes.routing.num_groups,
        "topk_group": sizes.routing.num_chosen_groups,
    }


FORM = mixtures.MixtureForm(sizes_from_hf, stored_hf, to_hf)
"""The form of GLM-4.5."""
