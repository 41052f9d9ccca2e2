"""LLaDA-8B: a Llama model with the tensor names of OLMo and its own configuration fields."""

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
    "head.weight": "model.transformer.ff_out.weight",  # a block has another tensor of this name
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

SUPPORTED_FIELDS = {
    "activation_type": "silu", "block_type": "llama", "layer_norm_type": "rms", "rope": True, "alibi": False,
    "attention_layer_norm": False, "include_bias": False, "include_qkv_bias": False, "input_emb_norm": False,
    "scale_logits": False, "bias_for_layer_norm": False, "block_group_size": 1, "layer_norm_with_affine": True,
    "multi_query_attention": False, "rope_full_precision": True,
}  # fmt: skip
"""Fields of the modelling code that change its results, with the one value that specjax supports; they may be absent.
"""


def stored_hf(config: LlamaConfig, kind: str) -> dict[str, StoredTensor]:
    """Map parameter paths to tensors of a checkpoint."""
    return {path: StoredTensor(name) for path, name in NAMES.items()}


def config_from_hf(hf: ConfigFields, **options) -> LlamaConfig:
    """Build a config from config.json. `options`: dtype, cache_dtype, name, and those of `storage_options`."""
    for field, supported_value in SUPPORTED_FIELDS.items():
        value = hf.value(field)
        if value is not None and value != supported_value:
            raise UsageError(
                f"{hf.where} has {field} {quote(value)}; for LLaDA specjax supports {quote(supported_value)} only"
            )
    hf.skip("alibi_bias_max", "attention_layer_norm_with_affine", "mlp_ratio")  # of parts that the model does not have
    width, heads = hf.size("d_model", maximum=WIDTH), hf.size("n_heads", maximum=HEADS)
    kv_heads = hf.size("n_kv_heads", heads, maximum=HEADS)
    if width % heads:
        raise UsageError(f"{hf.where} has d_model {width}, which must be a multiple of n_heads, {heads}")
    check_heads(hf, HF_HEADS, heads, kv_heads, width // heads)
    return LlamaConfig(
        vocab_size=hf.size("embedding_size", hf.size("vocab_size", maximum=ROWS), maximum=ROWS),
        width=width,
        num_layers=hf.size("n_layers", maximum=LAYERS),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width // heads,
        mlp_width=hf.size("mlp_hidden_size", maximum=ROWS),
        rope_base=hf.number("rope_theta", **BASE),
        norm_eps=hf.number("rms_norm_eps", 1e-5, maximum=1.0),
        tied=hf.flag("weight_tying"),
        max_positions=hf.size("max_sequence_length"),
        **options,
    )
