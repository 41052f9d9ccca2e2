"""GGUF files of tiny torch models, by the rules of llama.cpp."""

import numpy as np
import pytest

from specjax.models.loading.families import llama
from specjax.models.loading.families.gemma import gemma3

gguf = pytest.importorskip("gguf")

ARCHITECTURES = {
    "gemma3_text": "gemma3", "mistral": "llama", "mixtral": "llama", "olmo3": "olmo2", "qwen3_moe": "qwen3moe",
}  # fmt: skip
"""Names of architectures that differ from the `model_type`."""

EXPERTS = {"qwen3_moe": ("num_experts", "moe_intermediate_size"), "olmoe": ("num_experts", "intermediate_size")}
EXPERTS["mixtral"] = ("num_local_experts", "intermediate_size")
"""Fields with the number of experts and their width."""

WORDS = [f"w{i}" for i in range(96)]


def split_experts(tensors):
    """Return tensors with the gates and the other projections of experts apart, as llama.cpp's converter writes."""
    result = {}
    for name, x in tensors.items():
        if name.endswith(".experts.gate_up_proj"):
            for part, rows in zip(("gate", "up"), x.chunk(2, 1), strict=True):
                result[name.replace("gate_up_proj", part)] = rows
        else:
            result[name.replace(".experts.down_proj", ".experts.down")] = x
    return result


def write(model, file, *, scaling=None, kind="F32", modules: dict[str, np.ndarray] | None = None):
    """Write a torch model as GGUF, by the rules of llama.cpp's convert_hf_to_gguf.py.

    modules: the `nextn` tensors of a module whose layer is the last one of the model.
    """
    c = model.config
    arch = ARCHITECTURES.get(c.model_type, c.model_type)
    family = gemma3 if arch.startswith("gemma") else llama
    windowed = getattr(c, "layer_types", None) or ()
    rope = c.rope_parameters.get("full_attention", c.rope_parameters)
    writer = gguf.GGUFWriter(str(file), arch)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    if arch == "phi3":
        writer.add_rope_dimension_count(int(8 * rope["partial_rotary_factor"]))
        writer.add_sliding_window(c.sliding_window or 0)
    else:
        writer.add_key_length(c.head_dim if hasattr(c, "head_dim") else c.hidden_size // c.num_attention_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    if c.model_type in EXPERTS:
        count, width = EXPERTS[c.model_type]
        writer.add_expert_count(getattr(c, count))
        writer.add_expert_used_count(c.num_experts_per_tok)
        if arch != "llama":
            writer.add_expert_feed_forward_length(getattr(c, width))
    if "sliding_attention" in windowed:
        writer.add_sliding_window(c.sliding_window)
    if arch in ("gemma3", "olmo2") and windowed:
        writer.add_array(f"{arch}.attention.sliding_window_pattern", [t != "full_attention" for t in c.layer_types])
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(c.attn_logit_softcapping)
        writer.add_final_logit_softcapping(c.final_logit_softcapping)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if rope["rope_type"] == "longrope":
        original = c.original_max_position_embeddings
        writer.add_rope_scaling_orig_ctx_len(original)
        factor = c.max_position_embeddings / original
        writer.add_rope_scaling_attn_factors((1 + np.log(factor) / np.log(original)) ** 0.5)
        for name in ("long", "short"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32))
    for name, value in (modules or {}).items():
        writer.add_tensor(name, value)
    if modules:
        writer.add_uint32(f"{arch}.nextn_predict_layers", 1)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(WORDS)
    writer.add_token_scores([0.0] * len(WORDS))
    writer.add_eos_token_id(2)
    if scaling is not None:
        writer.add_tensor("rope_freqs.weight", scaling)
    joined = {"qkv_proj": "attn_qkv", "gate_up_proj": "ffn_up"}
    names = {w.hf: w.gguf for w in family.WEIGHTS}
    names |= {w.hf: w.gguf for w in family.POST_NORMS} if arch == "olmo2" else {}
    names |= {f"model.layers.*.mlp.experts.{part}": f"blk.*.ffn_{part}_exps.weight" for part in ("gate", "up", "down")}
    names["model.layers.*.mlp.gate.weight"] = "blk.*.ffn_gate_inp.weight"
    names |= {
        f"model.layers.*.{part}.{name}.weight": f"blk.*.{joined[name]}.weight"
        for part in ("self_attn", "mlp")
        for name in joined
    }
    for name, p in split_experts(model.state_dict()).items():
        parts = name.split(".")
        layer = parts[2] if parts[1] == "layers" else ""
        stored = names[name.replace(f".{layer}.", ".*.") if layer else name].replace("*", layer)
        if stored == "output.weight" and c.tie_word_embeddings:
            continue
        w = p.numpy().astype(np.float32)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            w = w + 1
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = c.num_attention_heads if "q_proj" in name else c.num_key_value_heads
            w = w.reshape(heads, 2, -1, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)
        quant = gguf.GGMLQuantizationType[kind if w.ndim > 1 and "ffn_gate_inp" not in stored else "F32"]
        data = gguf.quants.quantize(w, quant)
        writer.add_tensor(stored, data, raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
