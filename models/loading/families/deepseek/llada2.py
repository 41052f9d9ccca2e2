"""LLaDA2: the layers of GLM-4.5 with groups of experts and q/k norms, under names of its own."""

from __future__ import annotations

from typing import Any

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.decoder import DecoderConfig
from specjax.models.experts.sizes import MixtureSizes
from specjax.models.loading.families import mixtures
from specjax.models.loading.families.config_fields import ConfigFields
from specjax.models.loading.families.deepseek import routing
from specjax.models.loading.tensors.assembly import StoredTensor

FIELDS = {
    "rms_norm_eps": 1e-6, "num_shared_experts": 1, "first_k_dense_replace": 1, "norm_topk_prob": True, "n_group": 8,
    "topk_group": 4, "routed_scaling_factor": 2.5, "partial_rotary_factor": 0.5, "use_qk_norm": True,
}  # fmt: skip
"""Values of the released models, for a file without them."""

SKIPPED = (
    "max_window_layers", "use_rmsnorm", "use_sliding_window", "norm_head", "norm_softmax", "output_dropout",
    "router_dtype", "moe_router_enable_expert_bias", "moe_shared_expert_intermediate_size", "mtp_loss_scaling_factor",
    "using_split_qkv_in_self_attention", "rotary_type", "router_type", "num_shared_experts",
)  # fmt: skip
"""Fields of training, and fields that its class does not read."""

_ATTENTION, _STORED = "layers.*.attention.", "model.layers.*.attention."


def sizes_from_hf(hf: ConfigFields, layers: int) -> MixtureSizes:
    """Return the sizes of a mixture. Raises: UsageError as `routing.sizes_from_hf`, and for another score function."""
    function = hf.text("score_function", "sigmoid")
    if function != "sigmoid":
        raise UsageError(f"{hf.where} has score_function {quote(function)}; specjax supports sigmoid only")
    shared = {"n_shared_experts": hf.size("num_shared_experts", 0, minimum=0)}
    return routing.sizes_from_hf(hf.with_defaults(shared), layers)


def stored_hf(c: DecoderConfig) -> dict[str, StoredTensor]:
    """Map parameter paths to tensors of a checkpoint."""
    heads, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    joined = lambda first: StoredTensor(_STORED + "query_key_value.weight", first=first, rows=heads + 2 * kv)
    firsts = {"q": 0, "k": heads, "v": heads + kv}
    projections = {f"{_ATTENTION}{part}.weight": joined(first) for part, first in firsts.items()}
    return {
        **routing.stored_hf(c),
        **projections,
        "layers.*.mlp.router.correction": StoredTensor("model.layers.*.mlp.gate.expert_bias"),
        _ATTENTION + "q_norm.weight": StoredTensor(_STORED + "query_layernorm.weight"),
        _ATTENTION + "k_norm.weight": StoredTensor(_STORED + "key_layernorm.weight"),
        _ATTENTION + "o.weight": StoredTensor(_STORED + "dense.weight"),
        "embed.weight": StoredTensor("model.word_embeddings.weight"),
    }


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    """Return the fields that `sizes_from_hf` reads."""
    fields = routing.to_hf(c)
    return fields | {"num_experts": fields["n_routed_experts"], "num_shared_experts": fields["n_shared_experts"]}


FORM = mixtures.MixtureForm(sizes_from_hf, stored_hf, to_hf)
