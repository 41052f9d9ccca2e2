"""Llama, Mistral, Qwen2 and Qwen3: names of their weights, and their configurations in both formats."""

from __future__ import annotations

import functools

from specjax.errors import UsageError
from specjax.models.llama import LlamaConfig
from specjax.models.loading import rope
from specjax.models.loading.assembly import Stored, Weight
from specjax.models.loading.fields import require, width_of_heads

HF_TYPES = ("llama", "mistral", "qwen2", "qwen3")
GGUF_TYPES = ("llama", "qwen2", "qwen3")

WEIGHTS = (
    Weight("embed.weight", "model.embed_tokens.weight", "token_embd.weight"),
    Weight("norm.weight", "model.norm.weight", "output_norm.weight"),
    Weight("head.weight", "lm_head.weight", "output.weight"),
    Weight("layers.*.attention_norm.weight", "model.layers.*.input_layernorm.weight", "blk.*.attn_norm.weight"),
    Weight("layers.*.attention.q.weight", "model.layers.*.self_attn.q_proj.weight", "blk.*.attn_q.weight"),
    Weight("layers.*.attention.k.weight", "model.layers.*.self_attn.k_proj.weight", "blk.*.attn_k.weight"),
    Weight("layers.*.attention.v.weight", "model.layers.*.self_attn.v_proj.weight", "blk.*.attn_v.weight"),
    Weight("layers.*.attention.o.weight", "model.layers.*.self_attn.o_proj.weight", "blk.*.attn_output.weight"),
    Weight("layers.*.attention.q.bias", "model.layers.*.self_attn.q_proj.bias", "blk.*.attn_q.bias"),
    Weight("layers.*.attention.k.bias", "model.layers.*.self_attn.k_proj.bias", "blk.*.attn_k.bias"),
    Weight("layers.*.attention.v.bias", "model.layers.*.self_attn.v_proj.bias", "blk.*.attn_v.bias"),
    Weight("layers.*.attention.q_norm.weight", "model.layers.*.self_attn.q_norm.weight", "blk.*.attn_q_norm.weight"),
    Weight("layers.*.attention.k_norm.weight", "model.layers.*.self_attn.k_norm.weight", "blk.*.attn_k_norm.weight"),
    Weight("layers.*.mlp_norm.weight", "model.layers.*.post_attention_layernorm.weight", "blk.*.ffn_norm.weight"),
    Weight("layers.*.mlp.gate.weight", "model.layers.*.mlp.gate_proj.weight", "blk.*.ffn_gate.weight"),
    Weight("layers.*.mlp.up.weight", "model.layers.*.mlp.up_proj.weight", "blk.*.ffn_up.weight"),
    Weight("layers.*.mlp.down.weight", "model.layers.*.mlp.down_proj.weight", "blk.*.ffn_down.weight"),
)


def stored_hf(config: LlamaConfig) -> dict[str, Stored]:
    """By parameter path: what a Hugging Face checkpoint keeps."""
    return {w.path: Stored(w.hf) for w in WEIGHTS}


def stored_gguf(config: LlamaConfig, arch: str) -> dict[str, Stored]:
    """By parameter path: what a GGUF keeps. Of "llama" files q and k are permuted, to rotate neighbouring rows."""
    heads = {"q": config.num_heads, "k": config.num_kv_heads} if arch == "llama" else {}
    return {w.path: Stored(w.gguf, heads=heads.get(w.path.split(".")[-2], 0)) for w in WEIGHTS}


def config_from_hf(hf: dict, where: str, **options) -> LlamaConfig:
    """`hf`: config.json of one of HF_TYPES. `options`: dtype, stacked, cache_dtype, cache_lanes, name."""
    kind = hf["model_type"]
    for field in ("attention_bias", "mlp_bias"):
        if hf.get(field):
            raise UsageError(f"{where} sets {field}, which specjax does not support")
    if hf.get("hidden_act", "silu") != "silu":
        raise UsageError(f'{where} has hidden_act "{hf["hidden_act"]}"; specjax supports silu only')
    get = functools.partial(require, hf, where)
    base, scaling = rope.from_hf(hf, where)
    return LlamaConfig(
        vocab_size=get("vocab_size"),
        width=get("hidden_size"),
        num_layers=get("num_hidden_layers"),
        num_heads=get("num_attention_heads"),
        num_kv_heads=hf.get("num_key_value_heads") or get("num_attention_heads"),
        head_dim=hf.get("head_dim") or (128 if kind == "qwen3" else width_of_heads(hf, where)),
        mlp_width=get("intermediate_size"),
        rope_base=base,
        rope_scaling=scaling,
        norm_eps=hf.get("rms_norm_eps", 1e-6),
        tied=hf.get("tie_word_embeddings", False),
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        window=_window(hf, where),
        max_positions=get("max_position_embeddings"),
        **options,
    )


def _window(hf: dict, where: str) -> int | None:
    """Mistral windows every layer; Qwen only the layers from `max_window_layers` on, and only if asked."""
    layers, kind = hf["num_hidden_layers"], hf["model_type"]
    types = set(hf.get("layer_types") or ())
    if types:
        windowed = types != {"full_attention"}
        mixed = len(types) > 1
    elif kind == "mistral":
        windowed, mixed = True, False
    else:
        first = hf.get("max_window_layers", 28)
        windowed = kind != "llama" and hf.get("use_sliding_window", False) and first < layers
        mixed = windowed and first > 0
    if mixed:
        raise UsageError(f"{where} mixes windowed and full attention layers, which specjax supports for Gemma 3 only")
    # Mistral 0.1 is the only one whose window is the default; later ones say null.
    return hf.get("sliding_window", 4096) if windowed else None


def config_from_gguf(meta: dict, shapes: dict[str, tuple[int, ...]], factors, where: str, **options) -> LlamaConfig:
    """`meta`: of a file of one of GGUF_TYPES. `shapes`: of its tensors. `factors`: its rope_freqs.weight, or None."""
    arch = meta["general.architecture"]
    get = functools.partial(require, meta, where, prefix=f"{arch}.")
    if meta.get(f"{arch}.expert_count"):
        raise UsageError(f"{where} is a mixture of experts, which specjax does not support")
    width, heads = get("embedding_length"), get("attention.head_count")
    head_dim = meta.get(f"{arch}.attention.key_length") or meta.get(f"{arch}.rope.dimension_count") or width // heads
    base, scaling = rope.from_gguf(meta, arch, where)
    if factors is not None:
        scaling = rope.llama3_from_factors(factors, head_dim, base, where)
    return LlamaConfig(
        vocab_size=shapes.get("token_embd.weight", (0,))[0],
        width=width,
        num_layers=get("block_count"),
        num_heads=heads,
        num_kv_heads=meta.get(f"{arch}.attention.head_count_kv", heads),
        head_dim=head_dim,
        mlp_width=get("feed_forward_length"),
        rope_base=base,
        rope_scaling=scaling,
        norm_eps=get("attention.layer_norm_rms_epsilon"),
        tied="output.weight" not in shapes,
        qkv_bias=arch == "qwen2",
        qk_norm=arch == "qwen3",
        window=meta.get(f"{arch}.attention.sliding_window"),
        max_positions=get("context_length"),
        **options,
    )
