"""Mixtures of diffusion models in float64 NumPy, by the names of the tensors in their files.

transformers has no class for LLaDA-MoE, LLaDA2 and SDAR-30B-A3B. Each function follows the equations of the releases.
"""

import json

import numpy as np
from safetensors.numpy import load_file

QWEN = {
    "embed": "model.embed_tokens.weight", "attention": "self_attn", "q_norm": "q_norm", "k_norm": "k_norm",
    "out": "o_proj",
}  # fmt: skip
LLADA2 = {
    "embed": "model.word_embeddings.weight", "attention": "attention", "q_norm": "query_layernorm",
    "k_norm": "key_layernorm", "out": "dense",
}  # fmt: skip


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def routes_of_qwen(c, scores, bias):
    """Return the experts [T, k] and their weights: the likeliest of a softmax."""
    p = softmax(scores)
    experts = np.argsort(-p, kind="stable")[:, : c["num_experts_per_tok"]]
    weights = np.take_along_axis(p, experts, 1)
    return experts, weights / weights.sum(1, keepdims=True) if c.get("norm_topk_prob") else weights


def routes_of_llada2(c, scores, bias):
    """Return the experts [T, k] and their weights: a corrected sigmoid, whose best groups are the choice."""
    p = sigmoid(scores)
    corrected = p + bias
    groups = corrected.reshape(len(p), c["n_group"], -1)
    of_group = np.sort(groups)[..., -2:].sum(-1)
    best = np.argsort(-of_group, kind="stable")[:, : c["topk_group"]]
    is_open = np.zeros(of_group.shape, bool)
    np.put_along_axis(is_open, best, True, 1)
    corrected = np.where(is_open[..., None], groups, -np.inf).reshape(p.shape)
    experts = np.argsort(-corrected, kind="stable")[:, : c["num_experts_per_tok"]]
    weights = np.take_along_axis(p, experts, 1)
    return experts, weights / (weights.sum(1, keepdims=True) + 1e-20) * c["routed_scaling_factor"]


def oracle_logits(folder, kind, tokens, mask):
    """Return the logits [T, V] of tokens int[T], of which mask bool[T, T] names those that each one sees."""
    c = json.loads((folder / "config.json").read_text())
    tensors = {name: x.astype(np.float64) for name, x in load_file(folder / "model.safetensors").items()}
    is_llada2 = kind == "llada2_moe"
    names, routes = (LLADA2, routes_of_llada2) if is_llada2 else (QWEN, routes_of_qwen)
    heads, kv_heads, eps = c["num_attention_heads"], c["num_key_value_heads"], c["rms_norm_eps"]
    rope = c.get("rope_parameters") or c
    base, share = rope["rope_theta"], (c.get("partial_rotary_factor") or 0.5) if is_llada2 else 1.0

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * tensors[f"{name}.weight"]

    def rotated(x):
        size = int(x.shape[-1] * share)
        angles = np.outer(np.arange(len(x)), base ** (-np.arange(0, size, 2) / size))
        cos, sin = (np.concatenate([f(angles)] * 2, -1)[:, None] for f in (np.cos, np.sin))
        first, second = x[..., : size // 2], x[..., size // 2 : size]
        turned = x[..., :size] * cos + np.concatenate([-second, first], -1) * sin
        return np.concatenate([turned, x[..., size:]], -1)

    def mlp(x, name):
        gate, up, down = (tensors[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        y = x @ gate.T
        return (y * sigmoid(y) * (x @ up.T)) @ down.T

    def feed(x, name):
        if f"{name}.gate.weight" not in tensors:
            return mlp(x, name)
        bias = tensors.get(f"{name}.gate.expert_bias")
        experts, weights = routes(c, x @ tensors[f"{name}.gate.weight"].T, bias)
        rows = [
            sum(w * mlp(row, f"{name}.experts.{e}") for e, w in zip(of_row, share_of_row, strict=True))
            for row, of_row, share_of_row in zip(x, experts, weights, strict=True)
        ]
        return np.stack(rows) + (mlp(x, f"{name}.shared_experts") if is_llada2 else 0.0)

    def attend(x, name):
        dim = len(tensors[f"{name}.{names['q_norm']}.weight"])
        if is_llada2:
            joined = x @ tensors[f"{name}.query_key_value.weight"].T
            q, k, v = np.split(joined, [heads * dim, (heads + kv_heads) * dim], -1)
        else:
            q, k, v = (x @ tensors[f"{name}.{part}_proj.weight"].T for part in "qkv")
        q, k, v = (part.reshape(len(x), -1, dim) for part in (q, k, v))
        q, k = rotated(norm(q, f"{name}.{names['q_norm']}")), rotated(norm(k, f"{name}.{names['k_norm']}"))
        k, v = (np.repeat(part, heads // kv_heads, 1) for part in (k, v))
        scores = np.where(mask, np.einsum("qhd,khd->hqk", q, k) * dim**-0.5, -np.inf)
        out = np.einsum("hqk,khd->qhd", softmax(scores), v).reshape(len(x), -1)
        return out @ tensors[f"{name}.{names['out']}.weight"].T

    x = tensors[names["embed"]][tokens]
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        x = x + attend(norm(x, f"{at}.input_layernorm"), f"{at}.{names['attention']}")
        x = x + feed(norm(x, f"{at}.post_attention_layernorm"), f"{at}.mlp")
    return norm(x, "model.norm") @ tensors.get("lm_head.weight", tensors[names["embed"]]).T
