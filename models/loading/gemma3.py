"""Gemma 3: names of its weights, and its configuration in both formats."""

from __future__ import annotations

import dataclasses
from typing import Any

from specjax.errors import UsageError
from specjax.models.gemma3 import GLOBAL, Gemma3Config
from specjax.models.loading import llama, rope
from specjax.models.loading.assembly import Stored, Weight
from specjax.models.loading.fields import HEADS, LAYERS, ROWS, WIDTH, Fields, check_heads

HF_TYPES = ("gemma3_text", "gemma3")  # the second is multimodal; its text part is loaded
GGUF_TYPES = ("gemma3",)
PATTERN = 6  # every sixth layer is global

_SHARED = tuple(w for w in llama.WEIGHTS if not w.path.startswith("layers.*.mlp_norm") and not w.path.endswith("bias"))
WEIGHTS = (
    *_SHARED,
    Weight(
        "layers.*.attention_post_norm.weight",
        "model.layers.*.post_attention_layernorm.weight",
        "blk.*.post_attention_norm.weight",
    ),
    Weight("layers.*.mlp_norm.weight", "model.layers.*.pre_feedforward_layernorm.weight", "blk.*.ffn_norm.weight"),
    Weight(
        "layers.*.mlp_post_norm.weight",
        "model.layers.*.post_feedforward_layernorm.weight",
        "blk.*.post_ffw_norm.weight",
    ),
)


def stored_hf(config: Gemma3Config) -> dict[str, Stored]:
    """By parameter path: what a Hugging Face checkpoint keeps. Its norms hold w and multiply by 1 + w."""
    return {w.path: Stored(w.hf, add=1.0 if w.path.endswith("norm.weight") else 0.0) for w in WEIGHTS}


def stored_gguf(config: Gemma3Config, arch: str) -> dict[str, Stored]:
    """By parameter path: what a GGUF keeps. Its norms hold 1 + w already."""
    return {w.path: Stored(w.gguf) for w in WEIGHTS}


def config_from_hf(hf: Fields, **options) -> Gemma3Config:
    """`hf`: config.json of one of HF_TYPES. `options`: dtype, stacked, cache_dtype, cache_lanes, name."""
    where = hf.where
    if hf.text("model_type") == "gemma3":
        # The text part of a multimodal file states what differs from the defaults of the 4B model.
        defaults = {"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4}
        stated = hf.inside("text_config")
        if not stated.values:
            raise UsageError(f"{where} lacks the field text_config, so the shape of the model is unknown")
        known = {stated.prefix + name: value for name, value in defaults.items()}
        hf = dataclasses.replace(stated, values={**known, **stated.values})
    if hf.text("hidden_activation", "gelu_pytorch_tanh") != "gelu_pytorch_tanh" or hf.flag("attention_bias"):
        raise UsageError(f"{where} changes the activation or adds attention biases, which specjax does not support")
    if hf.flag("use_bidirectional_attention"):
        raise UsageError(f"{where} is an encoder (use_bidirectional_attention); specjax decodes causal models only")
    layers = hf.size("num_hidden_layers", most=LAYERS)
    pattern = hf.size("sliding_window_pattern", hf.size("_sliding_window_pattern", PATTERN))
    types = hf.array("layer_types", str, layers)
    is_global = tuple(t == "full_attention" for t in types) if types else _every(pattern, layers)
    base, scaling = rope.from_hf(hf, base=1_000_000.0, layer_type="full_attention", yarn=False)
    heads, kv_heads = (hf.size(f"num_{kind}_heads", most=HEADS) for kind in ("attention", "key_value"))
    head_dim = hf.size("head_dim", 256, most=HEADS)
    check_heads(hf, llama.HF_HEADS, heads, kv_heads, head_dim)
    return Gemma3Config(
        vocab_size=hf.size("vocab_size", most=ROWS),
        width=hf.size("hidden_size", most=WIDTH),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_width=hf.size("intermediate_size", most=ROWS),
        is_global=is_global,
        window=hf.size("sliding_window", 4096, most=GLOBAL),
        rope_base=base,
        rope_scaling=scaling,
        local_rope_base=_local_base(hf),
        query_scale=hf.number("query_pre_attn_scalar", 256.0) ** -0.5,
        norm_eps=hf.number("rms_norm_eps", 1e-6, most=1.0),
        tied=hf.flag("tie_word_embeddings", True),
        attention_softcap=hf.number("attn_logit_softcapping", None),
        logit_softcap=hf.number("final_logit_softcapping", None),
        max_positions=hf.size("max_position_embeddings", 131_072),
        **options,
    )


def config_to_hf(c: Gemma3Config) -> dict[str, Any]:
    """What `config_from_hf` reads."""
    scale = c.head_dim**-0.5 if c.query_scale is None else c.query_scale
    scalar = scale**-2
    if round(scalar) ** -0.5 == scale:  # as files have it
        scalar = round(scalar)
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": c.vocab_size,
        "hidden_size": c.width,
        "intermediate_size": c.mlp_width,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": c.norm_eps,
        **rope.to_hf(c.rope_base, c.rope_scaling),
        "rope_local_base_freq": c.local_rope_base,
        "sliding_window": c.window,
        "layer_types": ["full_attention" if full else "sliding_attention" for full in c.is_global],
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": c.attention_softcap,
        "final_logit_softcapping": c.logit_softcap,
        "attention_bias": False,
        "max_position_embeddings": c.max_positions,
        "tie_word_embeddings": c.tied,
        "torch_dtype": c.dtype,
    }


def _local_base(hf: Fields) -> float:
    """The rotary base of the windowed layers; they are never stretched."""
    if not hf.given("rope_parameters"):
        return hf.number("rope_local_base_freq", 10_000.0, **rope.BASE)
    base, scaling = rope.from_hf(hf, layer_type="sliding_attention")
    if scaling is not None:
        raise UsageError(f"{hf.where} scales RoPE in its windowed layers, which specjax does not support")
    return base


def config_from_gguf(meta: Fields, shapes: dict[str, tuple[int, ...]], factors, **options) -> Gemma3Config:
    """`meta`: of a file of one of GGUF_TYPES. `shapes`: of its tensors. `factors`: must be None."""
    where = meta.where
    if factors is not None:
        raise UsageError(f"{where} has a rope_freqs.weight, which specjax does not support for Gemma 3")
    layers, width = meta.size("block_count", most=LAYERS), meta.size("embedding_length", most=WIDTH)
    heads, kv_heads = (meta.size(f"attention.head_count{kind}", most=HEADS) for kind in ("", "_kv"))
    head_dim = meta.size("attention.key_length", most=HEADS)
    check_heads(meta, llama.GGUF_HEADS, heads, kv_heads, head_dim)
    # An array says of each layer whether it is windowed; a number is the period.
    pattern = "attention.sliding_window_pattern"
    if isinstance(meta.values.get(meta.prefix + pattern), list):
        is_global = tuple(not w for w in meta.array(pattern, int, layers))
    else:
        is_global = _every(meta.size(pattern, PATTERN), layers)
    base, scaling = rope.from_gguf(meta)
    return Gemma3Config(
        vocab_size=llama.vocabulary_of(shapes, where),
        width=width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_width=meta.size("feed_forward_length", most=ROWS),
        is_global=is_global,
        window=meta.size("attention.sliding_window", most=GLOBAL),
        rope_base=base,
        rope_scaling=scaling,
        local_rope_base=meta.number("rope.freq_base_swa", 10_000.0, **rope.BASE),
        # The format does not keep query_pre_attn_scalar: only the 27B model (62 layers) has one of its own.
        query_scale=(width / heads if layers == 62 else head_dim) ** -0.5,
        norm_eps=meta.number("attention.layer_norm_rms_epsilon", most=1.0),
        tied="output.weight" not in shapes,
        logit_softcap=meta.number("final_logit_softcapping", None),
        max_positions=meta.size("context_length"),
        **options,
    )


def _every(pattern: int, layers: int) -> tuple[bool, ...]:
    return tuple((i + 1) % pattern == 0 for i in range(layers))
