"""Qwen3-Next: the layers of Qwen3.5, with two joined input projections whose rows go by key heads."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from specjax.models.experts.sizes import MixtureSizes
from specjax.models.hybrid.config import GatedDeltaSizes, HybridConfig
from specjax.models.loading.families import mixtures
from specjax.models.loading.families.config_fields import LAYERS, ROWS, ConfigFields
from specjax.models.loading.families.hybrid import common, delta_fields
from specjax.models.loading.tensors.assembly import StoredTensor

HF_TYPES = MODEL_TYPES = ("qwen3_next",)
GGUF_TYPES = ("qwen3next",)

FIELDS = {
    "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 48,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "num_experts": 512, "decoder_sparse_step": 1,
    "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
}  # fmt: skip
"""Defaults of the class of transformers."""

OF_EXPERTS = "moe_intermediate_size", "shared_expert_intermediate_size", "num_experts_per_tok", "norm_topk_prob"
"""Fields without effect in a model without experts."""

_LAYER = "model.layers.*.linear_attn."
_RECURRENT = "layers.*.recurrent."


def stored_hf(config: HybridConfig, kind: str) -> dict[str, StoredTensor]:
    """Map parameter paths to tensors of a Hugging Face checkpoint with this `model_type`."""
    gates = joined_gates(config, _LAYER + "in_proj_ba.weight")
    experts = {} if config.experts is None else mixtures.separate_experts("model.layers.*.mlp.experts.#.")
    return delta_fields.stored_hf(config) | gates | joined_inputs(config, _LAYER + "in_proj_qkvz.weight") | experts


def stored_gguf(config: HybridConfig, arch: str) -> dict[str, StoredTensor]:
    """Map parameter paths to tensors of a GGUF file.

    The converter has queries, keys and values of all heads in one matrix, and the gates in another one.
    """
    return {
        **delta_fields.stored_gguf(config),
        **joined_gates(config, "blk.*.ssm_ba.weight"),
        _RECURRENT + "convolved.weight": StoredTensor("blk.*.attn_qkv.weight"),
        _RECURRENT + "output_gate.weight": StoredTensor("blk.*.attn_gate.weight"),
    }


def earlier_gguf(config: HybridConfig, names: Collection[str]) -> dict[str, StoredTensor]:
    """Map the paths that differ in files of earlier converters, which have the joined matrix of Hugging Face."""
    is_earlier = any(name.endswith(".ssm_in.weight") for name in names)
    return joined_inputs(config, "blk.*.ssm_in.weight") if is_earlier else {}


def joined_inputs(config: HybridConfig, name: str) -> dict[str, StoredTensor]:
    """Map the inputs of the convolution and the gate to a matrix with the rows of both for each key head."""
    if config.gated_delta is None:
        return {}
    convolved, gate, *_ = grouped_rows(config.gated_delta)
    part = lambda order: StoredTensor(name, rows=len(convolved) + len(gate), order=order)
    return {_RECURRENT + "convolved.weight": part(convolved), _RECURRENT + "output_gate.weight": part(gate)}


def joined_gates(config: HybridConfig, name: str) -> dict[str, StoredTensor]:
    """Map the projections of beta and alpha to a matrix with the rows of both for each key head."""
    if config.gated_delta is None:
        return {}
    *_, beta, alpha = grouped_rows(config.gated_delta)
    rows = len(beta) + len(alpha)
    return {
        _RECURRENT + "beta.weight": StoredTensor(name, rows=rows, order=beta),
        _RECURRENT + "alpha.weight": StoredTensor(name, rows=rows, order=alpha),
    }


def grouped_rows(sizes: GatedDeltaSizes) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the rows of the joined matrices that the convolution, the gate, beta and alpha have.

    Each key head has the rows of its query, its key, its values and their gates in a row.
    """
    groups, repeats = sizes.num_key_heads, sizes.num_value_heads // sizes.num_key_heads
    keys, values = sizes.key_dim, repeats * sizes.value_dim
    part = lambda size, first: common.head_rows(groups, size, 2 * (keys + values), first)
    convolved = np.concatenate([part(keys, 0), part(keys, keys), part(values, 2 * keys)])
    beta, alpha = (common.head_rows(groups, repeats, 2 * repeats, first) for first in (0, repeats))
    return convolved, part(values, 2 * keys + values), beta, alpha


def config_from_hf(hf: ConfigFields, **options) -> HybridConfig:
    """Build a config from the config.json of one of HF_TYPES.

    `options`: dtype, cache_dtype, name, and those of `storage_options`.
    """
    hf = hf.with_defaults(FIELDS)
    experts = experts_from_hf(hf)
    return delta_fields.config_from_hf(hf, FIELDS, model_type="qwen3_next", experts=experts, **options)


def experts_from_hf(hf: ConfigFields) -> MixtureSizes | None:
    """Return the sizes of the experts; None if no layer has experts."""
    layers = hf.size("num_hidden_layers", maximum=LAYERS)
    step, dense = hf.size("decoder_sparse_step"), hf.array("mlp_only_layers", int)
    hf.skip("output_router_logits", "router_aux_loss_coef")  # of training
    if hf.size("num_experts", minimum=0, maximum=ROWS) and any(
        i not in dense and (i + 1) % step == 0 for i in range(layers)
    ):
        return delta_fields.experts_from_hf(hf, layers, normalized=hf.flag("norm_topk_prob"))
    hf.skip(*OF_EXPERTS)
    return None


def config_to_hf(c: HybridConfig) -> dict[str, Any]:
    """Return the fields that `config_from_hf` reads."""
    dense = {"num_experts": 0, "mlp_only_layers": list(range(c.num_layers))}
    return delta_fields.config_to_hf(c) | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        **(dense if c.experts is None else delta_fields.experts_to_hf(c)),
    }


def config_from_gguf(meta: ConfigFields, shapes: dict[str, tuple[int, ...]], factors, **options) -> HybridConfig:
    """Build a config from the metadata of a file of one of GGUF_TYPES.

    Args:
      shapes: shapes of the file's tensors.
      factors: its tensors of rope.GGUF_DIVISORS, which must be empty.
    """
    return delta_fields.config_from_gguf(meta, shapes, factors, model_type="qwen3_next", **options)
