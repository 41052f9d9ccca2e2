"""Qwen3.5, text only: gated delta nets, and attention with an output gate in every fourth layer.

A model is dense, or a mixture of experts with a gated MLP beside them, whose files have all experts in two tensors. All
norms store w for a factor of 1 + w, except the norm inside of the gated delta net. GGUF files have the 1 added.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from specjax.models.hybrid.config import GatedDeltaSizes, HybridConfig
from specjax.models.loading.families import llama, mixtures
from specjax.models.loading.families.config_fields import LAYERS, ConfigFields
from specjax.models.loading.families.hybrid import delta_fields
from specjax.models.loading.tensors.assembly import StoredTensor

MULTIMODAL = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
"""Types of multimodal models, of which only the text part is loaded, and the types of these parts."""

MODEL_TYPES = tuple(MULTIMODAL.values())
HF_TYPES = (*MODEL_TYPES, *MULTIMODAL)
GGUF_TYPES = ("qwen35", "qwen35moe")

FIELDS = {
    "vocab_size": 248_320, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 32,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32,
}  # fmt: skip
"""Defaults of the class of transformers."""

FIELDS_OF_EXPERTS = FIELDS | {
    "hidden_size": 2048, "num_hidden_layers": 40, "num_key_value_heads": 2, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "num_experts": 256, "num_experts_per_tok": 8,
    "intermediate_size": 512,  # of dense layers, which published models do not have
}  # fmt: skip
"""Defaults of the class of its mixtures of experts."""

_HF, _GGUF = "model.layers.*.linear_attn.", "blk.*."
_RECURRENT = "layers.*.recurrent."
NAMES = {
    "convolved.weight": ("in_proj_qkv.weight", "attn_qkv.weight"),
    "output_gate.weight": ("in_proj_z.weight", "attn_gate.weight"),
    "beta.weight": ("in_proj_b.weight", "ssm_beta.weight"),
    "alpha.weight": ("in_proj_a.weight", "ssm_alpha.weight"),
}
"""Names of the input projections in both formats."""


def stored_hf(config: HybridConfig, kind: str) -> dict[str, StoredTensor]:
    """Map parameter paths to tensors of a Hugging Face checkpoint with this `model_type`."""
    inputs = {_RECURRENT + path: StoredTensor(_HF + name) for path, (name, _) in NAMES.items()}
    experts: dict[str, StoredTensor] = {}
    if config.experts is not None:
        module = "model.layers.*.mlp.experts."
        experts = mixtures.stacked_experts(module + "gate_up_proj", module + "down_proj", config.experts.width)
    return delta_fields.stored_hf(config) | inputs | experts


def variant_hf(config: HybridConfig, names: Collection[str]) -> dict[str, StoredTensor]:
    """Map the paths that differ in files with a tensor for each matrix of an expert, which transformers writes."""
    return separate_hf(config) if mixtures.are_separate(names) else {}


def separate_hf(config: HybridConfig) -> dict[str, StoredTensor]:
    """Map the parameters of experts to separate tensors."""
    return mixtures.separate_experts("model.layers.*.mlp.experts.#.")


def stored_gguf(config: HybridConfig, arch: str) -> dict[str, StoredTensor]:
    """Map parameter paths to tensors of a GGUF file, which tiles the value heads.

    Value head j of the file belongs to key head j % num_key_heads, so the value heads of a key head are not neighbours.
    """
    stored = delta_fields.stored_gguf(config)
    stored |= {_RECURRENT + path: StoredTensor(_GGUF + name) for path, (_, name) in NAMES.items()}
    sizes = config.gated_delta
    if sizes is None:
        return stored
    heads, values, channels = tiled_orders(sizes)
    orders = {
        "convolved.weight": channels, "convolution.kernel": channels, "output_gate.weight": values,
        "beta.weight": heads, "alpha.weight": heads, "decay.rate": heads, "decay.bias": heads,
    }  # fmt: skip
    for path, order in orders.items():
        stored[_RECURRENT + path] = stored[_RECURRENT + path]._replace(order=order)
    out = _RECURRENT + "out.weight"
    return stored | {out: stored[out]._replace(columns=values)}


def tiled_orders(sizes: GatedDeltaSizes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the place in a file of each value head, of each of their numbers, and of each channel.

    Returns: int[num_value_heads], int[num_value_heads * value_dim] and int[channels].
    """
    repeats = sizes.num_value_heads // sizes.num_key_heads
    head = np.arange(sizes.num_value_heads)
    heads = head % repeats * sizes.num_key_heads + head // repeats
    values = (heads[:, None] * sizes.value_dim + np.arange(sizes.value_dim)).reshape(-1)
    keys = 2 * sizes.num_key_heads * sizes.key_dim  # rows of queries and keys
    return heads, values, np.concatenate([np.arange(keys), keys + values])


def config_from_hf(hf: ConfigFields, **options) -> HybridConfig:
    """Build a config from the config.json of one of HF_TYPES.

    `options`: dtype, cache_dtype, name, and those of `storage_options`.
    """
    kind = hf.text("model_type")
    if kind in MULTIMODAL:
        kind, hf = MULTIMODAL[kind], llama.text_config(hf, {})
    if kind == "qwen3_5_text":
        return delta_fields.config_from_hf(hf, FIELDS, model_type=kind, **options)
    hf = hf.with_defaults(FIELDS_OF_EXPERTS)
    hf.skip("output_router_logits", "router_aux_loss_coef", "norm_topk_prob")  # of training, and always true
    experts = delta_fields.experts_from_hf(hf, hf.size("num_hidden_layers", maximum=LAYERS), normalized=True)
    return delta_fields.config_from_hf(hf, FIELDS_OF_EXPERTS, model_type=kind, experts=experts, **options)


def config_to_hf(c: HybridConfig) -> dict[str, Any]:
    """Return the fields that `config_from_hf` reads."""
    fields = delta_fields.config_to_hf(c) | {"architectures": ["Qwen3_5ForCausalLM"], "model_type": c.model_type}
    if c.experts is None:
        return fields
    return fields | delta_fields.experts_to_hf(c) | {"architectures": ["Qwen3_5MoeForCausalLM"]}


def config_from_gguf(meta: ConfigFields, shapes: dict[str, tuple[int, ...]], factors, **options) -> HybridConfig:
    """Build a config from the metadata of a file of one of GGUF_TYPES.

    Args:
      shapes: shapes of the file's tensors.
      factors: its tensors of rope.GGUF_DIVISORS, which must be empty.
    """
    kind = "qwen3_5_moe_text" if meta.prefix == "qwen35moe." else "qwen3_5_text"
    return delta_fields.config_from_gguf(meta, shapes, factors, model_type=kind, **options)
