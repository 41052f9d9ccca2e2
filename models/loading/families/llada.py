"""LLaDA-8B: a Llama under the names of OLMo, whose configuration has names of its own."""

from __future__ import annotations

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.llama import LlamaConfig
from specjax.models.loading.families.config_fields import HEADS, LAYERS, ROWS, WIDTH, ConfigFields, check_heads
from specjax.models.loading.families.rope import BASE
from specjax.models.loading.tensors.assembly import StoredTensor

HF_TYPES = ("llada",)
GGUF_TYPES = ()

HF_HEADS = "n_heads", "n_kv_heads", "d_model"

_BLOCK = "model.transformer.blocks.*."
NAMES = {
    "embed.weight": "model.transformer.wte.weight",
    "norm.weight": "model.transformer.ln_f.weight",
    "head.weight": "model.transformer.ff_out.weight",  # the leaf that blocks call so is another one
    "layers.*.attention_norm.weight": _BLOCK + "attn_norm.weight",
    "layers.*.attention.q.weight": _BLOCK + "q_proj.weight",
    "layers.*.attention.k.weight": _BLOCK + "k_proj.weight",
    "layers.*.attention.v.weight": _BLOCK + "v_proj.weight",
    "layers.*.attention.o.weight": _BLOCK + "attn_out.weight",
    "layers.*.mlp_norm.weight": _BLOCK + "ff_norm.weight",
    "layers.*.mlp.gate.weight": _BLOCK + "ff_proj.weight",
    "layers.*.mlp.up.weight": _BLOCK + "up_proj.weight",
    "layers.*.mlp.down.weight": _BLOCK + "ff_out.weight",
}

WANTED = {
    "activation_type": "silu", "block_type": "llama", "layer_norm_type": "rms", "rope": True, "alibi": False,
    "attention_layer_norm": False, "include_bias": False, "include_qkv_bias": False, "input_emb_norm": False,
    "scale_logits": False, "bias_for_layer_norm": False, "block_group_size": 1,
}  # fmt: skip
"""Fields of the modelling code that change what it computes, and the one value that specjax has; absent is as good."""


def stored_hf(config: LlamaConfig, kind: str) -> dict[str, StoredTensor]:
    """By parameter path: what a checkpoint keeps."""
    return {path: StoredTensor(name) for path, name in NAMES.items()}


def config_from_hf(hf: ConfigFields, **options) -> LlamaConfig:
    """`hf`: config.json. `options`: dtype, stacked, cache_dtype, cache_lanes, name."""
    for field, wanted in WANTED.items():
        if hf.given(field) and hf.values[field] != wanted:
            raise UsageError(
                f"{hf.where} has {field} {quote(hf.values[field])}; of LLaDA specjax supports {quote(wanted)} only"
            )
    width, heads = hf.size("d_model", most=WIDTH), hf.size("n_heads", most=HEADS)
    kv_heads = hf.size("n_kv_heads", heads, most=HEADS)
    if width % heads:
        raise UsageError(f"{hf.where} has d_model {width}, which must be a multiple of n_heads, {heads}")
    check_heads(hf, HF_HEADS, heads, kv_heads, width // heads)
    return LlamaConfig(
        vocab_size=hf.size("embedding_size", hf.size("vocab_size", most=ROWS), most=ROWS),
        width=width,
        num_layers=hf.size("n_layers", most=LAYERS),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width // heads,
        mlp_width=hf.size("mlp_hidden_size", most=ROWS),
        rope_base=hf.number("rope_theta", **BASE),
        norm_eps=hf.number("rms_norm_eps", 1e-5, most=1.0),
        tied=hf.flag("weight_tying"),
        max_positions=hf.size("max_sequence_length"),
        **options,
    )
