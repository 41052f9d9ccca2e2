"""The mixtures of gpt-oss: biases, clamped activations, and gates that alternate with the other projections.

Files with floats have matrices [in, out] of all experts. Files in MXFP4 have rows of 32 numbers along the inputs, so
their matrices are [out, in]. In both, even outputs of one matrix are the gates, and odd ones the other projections.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from specjax.errors import UsageError
from specjax.models.decoder import DecoderConfig
from specjax.models.experts.feed import STEEPNESS
from specjax.models.experts.routing import Routing
from specjax.models.experts.sizes import MixtureSizes
from specjax.models.loading.families import mixtures
from specjax.models.loading.families.config_fields import ROWS, ConfigFields
from specjax.models.loading.tensors.assembly import StoredTensor

FIELDS = {
    "vocab_size": 201_088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128,
    "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "attention_bias": True,
}  # fmt: skip
"""Defaults of the class of transformers."""

ROTARY = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
"""Rotary settings of a file without them."""

SKIPPED = "experts_per_token", "initial_context_length"
"""Fields that repeat others, and that its class does not read."""

COUNTS = "num_local_experts", "num_experts"

_EXPERTS = "model.layers.*.mlp.experts."


def with_rotary(hf: ConfigFields) -> ConfigFields:
    """Return the fields with rotary settings."""
    has_settings = hf.is_stated("rope_scaling") or hf.is_stated("rope_parameters")
    return hf if has_settings else hf.with_defaults({"rope_parameters": ROTARY})


def sizes_from_hf(hf: ConfigFields, layers: int) -> MixtureSizes:
    """Return the sizes of a mixture from a config.json.

    Raises: UsageError for counts that contradict each other, or for another steepness of the activation.
    """
    count = mixtures.num_experts(hf, COUNTS, 128)
    if hf.number("swiglu_alpha", STEEPNESS) != STEEPNESS:
        raise UsageError(
            f"{hf.where} has swiglu_alpha {hf.number('swiglu_alpha'):g}; specjax supports {STEEPNESS} only"
        )
    return MixtureSizes(
        count,
        hf.size("intermediate_size", maximum=ROWS),
        Routing(mixtures.check_num_chosen(hf, "num_experts_per_tok", count, 4), "softmax_of_chosen"),
        router_bias=True,
        bias=True,
        limit=hf.number("swiglu_limit", 7.0),
    )


def stored_hf(c: DecoderConfig) -> dict[str, StoredTensor]:
    """Map parameter paths of the experts to tensors of a file with floats."""
    assert c.experts is not None
    return _stored(c.experts, "gate_up_proj", "down_proj", transposed=True)


def variant_hf(sizes: MixtureSizes, names: Collection[str]) -> dict[str, StoredTensor]:
    """Map the paths that differ in files in MXFP4 or with separate experts, by the names of the tensors of a file."""
    if mixtures.are_separate(names):
        return separate_hf()
    is_mxfp4 = any(name.endswith(".experts.gate_up_proj.weight") for name in names)
    return _stored(sizes, "gate_up_proj.weight", "down_proj.weight", transposed=False) if is_mxfp4 else {}


def separate_hf() -> dict[str, StoredTensor]:
    """Map the parameters of experts to tensors of a file with matrices and biases for each expert."""
    return mixtures.separate_experts(f"{_EXPERTS}#.")


def _stored(sizes: MixtureSizes, gate_up: str, down: str, *, transposed: bool) -> dict[str, StoredTensor]:
    joined = lambda name, first, transposed: StoredTensor(
        _EXPERTS + name, rows=2 * sizes.width, order=np.arange(first, 2 * sizes.width, 2), stacked=True,
        transposed=transposed,
    )  # fmt: skip
    gates = {
        f"layers.*.mlp.expert_{part}.{leaf}": joined(name, first, is_transposed)
        for first, part in enumerate(("gate", "up"))
        for leaf, name, is_transposed in (("weight", gate_up, transposed), ("bias", "gate_up_proj_bias", False))
    }
    return gates | {
        "layers.*.mlp.expert_down.weight": StoredTensor(_EXPERTS + down, stacked=True, transposed=transposed),
        "layers.*.mlp.expert_down.bias": StoredTensor(_EXPERTS + "down_proj_bias", stacked=True),
        "layers.*.mlp.router.weight": StoredTensor("model.layers.*.mlp.router.weight"),
        "layers.*.mlp.router.bias": StoredTensor("model.layers.*.mlp.router.bias"),
        "layers.*.attention.sinks": StoredTensor("model.layers.*.self_attn.sinks"),
        "layers.*.attention.o.bias": StoredTensor("model.layers.*.self_attn.o_proj.bias"),
    }


def to_hf(c: DecoderConfig) -> dict[str, Any]:
    """Return the fields that `sizes_from_hf` reads."""
    sizes = c.experts
    assert sizes is not None
    return {
        "num_local_experts": sizes.num_experts,
        "num_experts_per_tok": sizes.routing.num_chosen,
        "intermediate_size": sizes.width,
        "swiglu_limit": sizes.limit,
    }


FORM = mixtures.MixtureForm(sizes_from_hf, stored_hf, to_hf)
