"""Families of Llama's kind, a row each: names of their weights, and their configurations in both formats."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.decoder import DecoderConfig
from specjax.models.llama import LlamaConfig
from specjax.models.loading.families import rope
from specjax.models.loading.families.config_fields import HEADS, LAYERS, ROWS, WIDTH, ConfigFields, check_heads
from specjax.models.loading.tensors.assembly import StoredTensor, WeightNames


class Row(NamedTuple):
    """An architecture: what its code has and its config does not say."""

    shape: Mapping[str, Any] = MappingProxyType({})  # fields of LlamaConfig
    layers: Callable[[ConfigFields, int], tuple[bool, ...]] = lambda hf, layers: (
        (True,) * layers
    )  # by default; True: global
    window: int | None = 4096  # of the others, by default
    head_dim: int | None = None  # by default; None: the width by the heads
    rope_base: float = 10_000.0  # likewise
    stretches_all: bool = True  # scaled rotations are those of all layers, not of the global ones alone
    partial: bool = False  # may rotate a part of each head
    joined: bool = False  # q, k and v are one matrix, and so are gate and up


_WINDOWED = lambda hf, layers: (False,) * layers
_BEHIND = {"norms": "after", "qk_norm": True, "qk_norm_of": "projection"}


def _of_qwen(hf: ConfigFields, layers: int) -> tuple[bool, ...]:
    """Windows only from some layer on, and only if asked."""
    first = hf.size("max_window_layers", 28, least=0) if hf.flag("use_sliding_window") else layers
    return tuple(i < first for i in range(layers))


ROWS_OF_HF = {
    "llama": Row(),
    "mistral": Row(layers=_WINDOWED),
    "ministral": Row(layers=_WINDOWED),
    "qwen2": Row({"qkv_bias": True}, layers=_of_qwen),
    "qwen3": Row({"qk_norm": True}, layers=_of_qwen, head_dim=128),
    "phi3": Row(layers=_WINDOWED, window=None, partial=True, joined=True),  # and Phi-3.5, Phi-4
    "olmo2": Row(_BEHIND),
    "olmo3": Row(
        _BEHIND, layers=lambda hf, layers: every(4, layers), rope_base=500_000.0, stretches_all=False
    ),
}  # fmt: skip
"""By `model_type`."""

ROWS_OF_GGUF = {"llama": Row(), "olmo2": ROWS_OF_HF["olmo3"]} | {
    kind: ROWS_OF_HF[kind] for kind in ("qwen2", "qwen3", "phi3")
}
"""By `general.architecture`; olmo2 is OLMo 3's too, and llama Mistral's."""

HF_TYPES = (*ROWS_OF_HF, "mistral3")  # the last is multimodal; its text part, of one of the others, is loaded
GGUF_TYPES = tuple(ROWS_OF_GGUF)

FULL, SLIDING = "full_attention", "sliding_attention"

HF_HEADS = "num_attention_heads", "num_key_value_heads", "head_dim"
GGUF_HEADS = "attention.head_count", "attention.head_count_kv", "attention.key_length"

WEIGHTS = (
    WeightNames("embed.weight", "model.embed_tokens.weight", "token_embd.weight"),
    WeightNames("norm.weight", "model.norm.weight", "output_norm.weight"),
    WeightNames("head.weight", "lm_head.weight", "output.weight"),
    WeightNames("layers.*.attention_norm.weight", "model.layers.*.input_layernorm.weight", "blk.*.attn_norm.weight"),
    WeightNames("layers.*.attention.q.weight", "model.layers.*.self_attn.q_proj.weight", "blk.*.attn_q.weight"),
    WeightNames("layers.*.attention.k.weight", "model.layers.*.self_attn.k_proj.weight", "blk.*.attn_k.weight"),
    WeightNames("layers.*.attention.v.weight", "model.layers.*.self_attn.v_proj.weight", "blk.*.attn_v.weight"),
    WeightNames("layers.*.attention.o.weight", "model.layers.*.self_attn.o_proj.weight", "blk.*.attn_output.weight"),
    WeightNames("layers.*.attention.q.bias", "model.layers.*.self_attn.q_proj.bias", "blk.*.attn_q.bias"),
    WeightNames("layers.*.attention.k.bias", "model.layers.*.self_attn.k_proj.bias", "blk.*.attn_k.bias"),
    WeightNames("layers.*.attention.v.bias", "model.layers.*.self_attn.v_proj.bias", "blk.*.attn_v.bias"),
    WeightNames(
        "layers.*.attention.q_norm.weight", "model.layers.*.self_attn.q_norm.weight", "blk.*.attn_q_norm.weight"
    ),
    WeightNames(
        "layers.*.attention.k_norm.weight", "model.layers.*.self_attn.k_norm.weight", "blk.*.attn_k_norm.weight"
    ),
    WeightNames("layers.*.mlp_norm.weight", "model.layers.*.post_attention_layernorm.weight", "blk.*.ffn_norm.weight"),
    WeightNames("layers.*.mlp.gate.weight", "model.layers.*.mlp.gate_proj.weight", "blk.*.ffn_gate.weight"),
    WeightNames("layers.*.mlp.up.weight", "model.layers.*.mlp.up_proj.weight", "blk.*.ffn_up.weight"),
    WeightNames("layers.*.mlp.down.weight", "model.layers.*.mlp.down_proj.weight", "blk.*.ffn_down.weight"),
)


POST_NORMS = (
    WeightNames(
        "layers.*.attention_post_norm.weight",
        "model.layers.*.post_attention_layernorm.weight",
        "blk.*.post_attention_norm.weight",
    ),
    WeightNames(
        "layers.*.mlp_post_norm.weight",
        "model.layers.*.post_feedforward_layernorm.weight",
        "blk.*.post_ffw_norm.weight",
    ),
)
"""Of families that have them."""


def stored_hf(config: LlamaConfig, kind: str) -> dict[str, StoredTensor]:
    """By parameter path: what a Hugging Face checkpoint of a `model_type` keeps."""
    stored = {w.path: StoredTensor(w.hf) for w in (*WEIGHTS, *POST_NORMS)}
    if kind in ROWS_OF_HF and ROWS_OF_HF[kind].joined:
        layer = "model.layers.*."
        stored |= joined(config, f"{layer}self_attn.qkv_proj.weight", f"{layer}mlp.gate_up_proj.weight")
    return stored


def joined(config: LlamaConfig, attention: str, mlp: str) -> dict[str, StoredTensor]:
    """By parameter path, of files that have one matrix for q, k and v, and one for gate and up."""
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    parts = {
        attention: {"attention.q": heads, "attention.k": kv, "attention.v": kv},
        mlp: {"mlp.gate": config.mlp_width, "mlp.up": config.mlp_width},
    }
    stored = {}
    for name, rows in parts.items():
        firsts = itertools.accumulate(rows.values(), initial=0)
        for part, first in zip(rows, firsts, strict=False):
            stored[f"layers.*.{part}.weight"] = StoredTensor(name, first=first, rows=sum(rows.values()))
    return stored


def stored_gguf(config: LlamaConfig, arch: str) -> dict[str, StoredTensor]:
    """By parameter path: what a GGUF keeps. Of "llama" files q and k are permuted, to rotate neighbouring rows."""
    heads = {"q": config.num_heads, "k": config.num_kv_heads} if arch == "llama" else {}
    stored = {w.path: StoredTensor(w.gguf, heads=heads.get(w.path.split(".")[-2], 0)) for w in (*WEIGHTS, *POST_NORMS)}
    return stored | (joined(config, "blk.*.attn_qkv.weight", "blk.*.ffn_up.weight") if arch == "phi3" else {})


def config_from_hf(hf: ConfigFields, **options) -> LlamaConfig:
    """`hf`: config.json of one of HF_TYPES. `options`: dtype, stacked, cache_dtype, cache_lanes, name."""
    if hf.text("model_type") == "mistral3":
        hf = text_part(hf, {"model_type": "mistral"})
    kind, where = hf.text("model_type"), hf.where
    if kind not in ROWS_OF_HF:
        raise UsageError(
            f"{where} has the architecture {quote(kind)} in {hf.prefix}model_type, which specjax does not support "
            f"(only {', '.join(ROWS_OF_HF)})"
        )
    row = ROWS_OF_HF[kind]
    for field in ("attention_bias", "mlp_bias", "lm_head_bias"):
        if hf.flag(field):
            raise UsageError(f"{where} sets {field}, which specjax does not support")
    if hf.text("hidden_act", "silu") != "silu":
        raise UsageError(f"{where} has hidden_act {quote(hf.text('hidden_act'))}; specjax supports silu only")
    width, heads = hf.size("hidden_size", most=WIDTH), hf.size("num_attention_heads", most=HEADS)
    kv_heads = hf.size("num_key_value_heads", heads, most=HEADS)
    head_dim = hf.size("head_dim", row.head_dim or width // heads, most=HEADS)
    check_heads(hf, HF_HEADS, heads, kv_heads, head_dim)
    layers = hf.size("num_hidden_layers", most=LAYERS)
    window, is_global = _windows(hf, row, layers)
    base, scaling, rotary_dim = rope.from_hf(hf, head_dim, base=row.rope_base, layer_type=FULL, partial=row.partial)
    local = None if is_global is None or row.stretches_all else rope.local_from_hf(hf, head_dim, base)
    return LlamaConfig(
        vocab_size=hf.size("vocab_size", most=ROWS),
        width=width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_width=hf.size("intermediate_size", most=ROWS),
        rope_base=base,
        rope_scaling=scaling,
        rotary_dim=rotary_dim,
        norm_eps=hf.number("rms_norm_eps", 1e-6, most=1.0),
        tied=hf.flag("tie_word_embeddings"),
        window=window,
        is_global=is_global,
        local_rope_base=local,
        max_positions=hf.size("max_position_embeddings"),
        **row.shape,
        **options,
    )


def text_part(hf: ConfigFields, defaults: Mapping[str, Any]) -> ConfigFields:
    """Of a multimodal file; defaults: what it may leave out. Raises: UsageError without it."""
    stated = hf.inside("text_config")
    if not stated.values:
        raise UsageError(f"{hf.where} lacks the field text_config, so the shape of the model is unknown")
    known = {stated.prefix + name: value for name, value in defaults.items()}
    tied = {stated.prefix + name: hf.values[name] for name in ("tie_word_embeddings",) if hf.given(name)}
    return dataclasses.replace(stated, values={**known, **tied, **stated.values})


def _windows(hf: ConfigFields, row: Row, layers: int) -> tuple[int | None, tuple[bool, ...] | None]:
    """(window, the layers without it), the second None where all layers have it, rotated as those without would be."""
    is_global = global_layers(hf, layers) or row.layers(hf, layers)
    # Mistral 0.1 and OLMo 3 may leave out the window that they have; null is none.
    window = hf.size("sliding_window", None if hf.stated("sliding_window") else row.window)
    if window is None or all(is_global):
        return None, None
    return window, is_global if any(is_global) or not row.stretches_all else None


def global_layers(hf: ConfigFields, layers: int) -> tuple[bool, ...]:
    """By `layer_types`, which layers have full attention; () without it. Raises: UsageError for other attention."""
    types = hf.array("layer_types", str)
    if types and len(types) != layers:
        raise UsageError(f"{hf.where} has {len(types)} layer_types for {layers} layers (num_hidden_layers)")
    others = [kind for kind in types if kind not in (FULL, SLIDING)]
    if others:
        raise UsageError(
            f"{hf.where} has {quote(others[0])} among its layer_types, which specjax does not support (only {FULL}, "
            f"{SLIDING})"
        )
    return tuple(kind == FULL for kind in types)


def every(pattern: int, layers: int) -> tuple[bool, ...]:
    """Each so many-th layer is global."""
    return tuple((i + 1) % pattern == 0 for i in range(layers))


def layer_types(c: DecoderConfig) -> list[str]:
    """What `global_layers` reads."""
    is_global = c.is_global or (c.window is None,) * c.num_layers
    return [FULL if full else SLIDING for full in is_global]


def config_to_hf(c: LlamaConfig) -> dict[str, Any]:
    """What `config_from_hf` reads."""
    kind, own = kind_of(c), rope.to_hf(c.rope_base, c.rope_scaling)
    if kind == "olmo3":
        local = rope.to_hf(c.local_rope_base or c.rope_base, None)
        own = {"rope_parameters": {FULL: rope.in_new_form(own), SLIDING: rope.in_new_form(local)}}
    if c.rotary_dim is not None:
        own["partial_rotary_factor"] = c.rotary_dim / c.head_dim
    if c.rope_scaling is not None and c.rope_scaling.kind == "longrope":
        own["original_max_position_embeddings"] = c.rope_scaling.original_positions
    if kind == "phi3":
        own["pad_token_id"] = None  # else it is 32000, and transformers refuses smaller vocabularies
    return {
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "model_type": kind,
        "vocab_size": c.vocab_size,
        "hidden_size": c.width,
        "intermediate_size": c.mlp_width,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": c.norm_eps,
        **own,
        "sliding_window": c.window,
        "use_sliding_window": c.window is not None,
        "layer_types": layer_types(c),
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": c.max_positions,
        "tie_word_embeddings": c.tied,
        "torch_dtype": c.dtype,
    }


def kind_of(c: LlamaConfig) -> str:
    """The `model_type` whose code computes what a config says."""
    if c.rotary_dim is not None:  # first: layers of heads may have q/k norms besides, which their files show
        return "phi3"
    if c.norms == "after":
        return "olmo2" if c.window is None else "olmo3"
    if c.qk_norm or c.qkv_bias:
        return "qwen3" if c.qk_norm else "qwen2"
    if c.window is not None:
        return "mistral" if c.is_global is None else "ministral"
    return "llama"


def config_from_gguf(meta: ConfigFields, shapes: dict[str, tuple[int, ...]], factors, **options) -> LlamaConfig:
    """`meta`: of a file of one of GGUF_TYPES. `shapes`: of its tensors. `factors`: its tensors of rope.OF_GGUF."""
    arch, where = meta.prefix.removesuffix("."), meta.where
    if meta.size("expert_count", 0, least=0):
        raise UsageError(f"{where} is a mixture of experts, which specjax does not support")
    width, heads = meta.size("embedding_length", most=WIDTH), meta.size("attention.head_count", most=HEADS)
    kv_heads = meta.size("attention.head_count_kv", heads, most=HEADS)
    row, layers = ROWS_OF_GGUF[arch], meta.size("block_count", most=LAYERS)
    rotary_dim = meta.size("rope.dimension_count", width // heads, most=HEADS)
    head_dim = meta.size("attention.key_length", width // heads if row.partial else rotary_dim, most=HEADS)
    check_heads(meta, GGUF_HEADS, heads, kv_heads, head_dim)
    if row.partial and (rotary_dim % 2 or rotary_dim > head_dim):
        raise UsageError(
            f"{where} rotates {rotary_dim} of the {head_dim} numbers of a head (rope.dimension_count); these must be even "
            "and no more than there are"
        )
    base, scaling = rope.from_gguf(meta)
    scaling = rope.divided(factors, meta, rotary_dim if row.partial else head_dim, base) or scaling
    least = 0 if arch == "phi3" else 1  # of a window: llama.cpp writes 0 for none
    window = meta.size("attention.sliding_window", None, least=least) or None
    is_global = None if row.stretches_all or window is None else windowed_by_gguf(meta, layers, 4)
    return LlamaConfig(
        vocab_size=vocabulary_of(shapes, where),
        width=width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_width=meta.size("feed_forward_length", most=ROWS),
        rope_base=base,
        rope_scaling=scaling,
        rotary_dim=rotary_dim if row.partial and rotary_dim < head_dim else None,
        norm_eps=meta.number("attention.layer_norm_rms_epsilon", most=1.0),
        tied="output.weight" not in shapes,
        window=window,
        is_global=is_global,
        local_rope_base=None if is_global is None else base,
        max_positions=meta.size("context_length"),
        **row.shape,
        **options,
    )


def windowed_by_gguf(meta: ConfigFields, layers: int, pattern: int) -> tuple[bool, ...]:
    """Which layers have full attention: an array says of each whether it is windowed, a number is the period.

    pattern: that of a file that says neither.
    """
    name = "attention.sliding_window_pattern"
    if isinstance(meta.values.get(meta.prefix + name), list):
        return tuple(not windowed for windowed in meta.array(name, int, layers))
    return every(meta.size(name, pattern), layers)


def vocabulary_of(shapes: dict[str, tuple[int, ...]], where: str) -> int:
    """Rows of the embedding: GGUF does not state the size of the vocabulary."""
    shape = shapes.get("token_embd.weight", ())
    if len(shape) != 2 or not 1 <= shape[0] <= ROWS:
        raise UsageError(f"{where} has no token_embd.weight of two dimensions, so the vocabulary is unknown")
    return shape[0]
