"""The weights of one head, written as every writer writes them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

D, H, KV, F, V, VD, L = 32, 4, 2, 64, 64, 16, 6
"""Width, heads, key/value heads, MLP width, vocabulary, draft vocabulary, layers of the target."""
TAPS = (2, 3, 3)  # h_2, h_{L/2}, h_{L-3}
IDS = np.array([0, 3, 4, *range(20, 20 + VD - 3)])


def layers(hd: int, **changes) -> dict:
    """The part of config.json that all writers have."""
    return {
        "model_type": "llama", "hidden_size": D, "intermediate_size": F, "num_attention_heads": H,
        "num_key_value_heads": KV, "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "hidden_act": "silu", "vocab_size": V, "max_position_embeddings": 2048,
        **({} if hd == D // H else {"head_dim": hd}), **changes,
    }  # fmt: skip


def arrays_of(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, np.ndarray]:
    """0.1 N(0, 1), norms around 1."""
    rng = np.random.default_rng(seed)
    return {
        name: np.float32(0.1 * rng.standard_normal(shape) + ("norm" in name and len(shape) == 1))
        for name, shape in shapes.items()
    }


def attention(prefix: str, hd: int, reads: int = D) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.q_proj.weight": (H * hd, reads),
        f"{prefix}.k_proj.weight": (KV * hd, reads),
        f"{prefix}.v_proj.weight": (KV * hd, reads),
        f"{prefix}.o_proj.weight": (D, H * hd),
    }


def mlp(prefix: str) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}.{part}_proj.weight": (F, D) for part in ("gate", "up")} | {f"{prefix}.down_proj.weight": (D, F)}


def eagle3(hd: int = 8, taps: int = 3, vocab: int = VD, **extra: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Return tensors by the names of vllm speculators."""
    names = "input_layernorm", "hidden_norm", "post_attention_layernorm"
    shapes = {
        "fc.weight": (D, taps * D), "norm.weight": (D,), "lm_head.weight": (vocab, D),
        **{f"layers.0.{name}.weight": (D,) for name in names},
        **attention("layers.0.self_attn", hd, 2 * D), **mlp("layers.0.mlp"), **extra,
    }  # fmt: skip
    return arrays_of(shapes) | ({"d2t": IDS - np.arange(VD), "t2d": np.isin(np.arange(V), IDS)} if vocab < V else {})


def eagle(hd: int = 8) -> dict[str, np.ndarray]:
    """Return tensors by the names of EAGLE's authors."""
    return arrays_of({
        "embed_tokens.weight": (V, D), "fc.weight": (D, 2 * D), "fc.bias": (D,),
        "layers.0.post_attention_layernorm.weight": (D,),
        **attention("layers.0.self_attn", hd), **mlp("layers.0.mlp"),
    })  # fmt: skip


def falcon(hd: int = 8) -> dict[str, np.ndarray]:
    """Return tensors by the names of Falcon's authors: EAGLE's with an LSTM of PyTorch's in place of fc."""
    tensors = {name: value for name, value in eagle(hd).items() if not name.startswith("fc.")}
    lstm = {
        f"lstm.{what}_l{i}": shape
        for i, reads in enumerate((2 * D, D))
        for what, shape in {
            "weight_ih": (4 * D, reads), "weight_hh": (4 * D, D), "bias_ih": (4 * D,), "bias_hh": (4 * D,)
        }.items()
    }  # fmt: skip
    return tensors | arrays_of(lstm, seed=1)


def medusa(heads: int = 3, vocab: int = V) -> dict[str, np.ndarray]:
    """Return tensors by vLLM's names."""
    return arrays_of({
        name: shape
        for i in range(heads)
        for name, shape in {
            f"blocks.{i}.layers.0.weight": (D, D), f"blocks.{i}.layers.0.bias": (D,), f"lm_heads.{i}.weight": (vocab, D)
        }.items()
    })  # fmt: skip


def renamed(arrays: dict, *rules: tuple[str, str]) -> dict:
    for old, new in rules:
        arrays = {name.replace(old, new): value for name, value in arrays.items()}
    return arrays


def fused(arrays: dict) -> dict:
    """Return the tensors joined as vLLM and SGLang keep them in memory, and as some writers save them."""
    tensors = dict(arrays)
    for joined, parts in (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj"))):
        for name in [name for name in tensors if f".{parts[0]}." in name]:
            tensors[name.replace(parts[0], joined)] = np.concatenate(
                [tensors.pop(name.replace(parts[0], p)) for p in parts]
            )
    return tensors


def of_speculators(kind: str, hd: int = 8, **changes) -> dict:
    """config.json."""
    verifier = {"name_or_path": "target", "architectures": ["LlamaForCausalLM"]}
    return {
        "architectures": ["Speculator"], "speculators_model_type": kind,
        "speculators_config": {"algorithm": kind, "verifier": verifier}, "transformer_layer_config": layers(hd),
    } | changes  # fmt: skip


def eagle3_dialects(arrays: dict, hd: int = 8) -> dict[str, tuple[dict, dict]]:
    """(config, tensors) by writer."""
    plain = layers(hd) | {"draft_vocab_size": VD}
    midlayer = renamed(arrays, ("layers.0.", "midlayer."))
    without_flags = {name: value for name, value in arrays.items() if name != "t2d"}
    above = lambda name: name if name.startswith(("lm_head", "d2t", "t2d")) else f"model.{name}"
    return {
        "speculators": (
            of_speculators(
                "eagle3", hd, draft_vocab_size=VD, norm_before_residual=False,
                eagle_aux_hidden_state_layer_ids=list(TAPS),
            ),
            arrays,
        ),
        "safeailab": (plain | {"architectures": ["LlamaForCausalLM"]}, midlayer),
        "specforge": (
            plain | {
                "architectures": ["LlamaForCausalLMEagle3"], "norm_output": True,
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in TAPS]},
            },
            midlayer,
        ),
        "deepspec": (
            plain | {"architectures": ["Qwen3Eagle3Model"], "target_layer_ids": [tap - 1 for tap in TAPS]}, arrays
        ),
        "modelopt": (
            plain | {
                "architectures": ["LlamaForCausalLMEagle3"],
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [], "use_aux_hidden_state": True},
            },
            without_flags,
        ),
        "automodel": (
            plain | {"architectures": ["LlamaEagle3DraftModel"], "num_aux_hidden_states": 3},
            {above(name): value for name, value in arrays.items()},
        ),
        "fused": (plain | {"architectures": ["LlamaForCausalLMEagle3"]}, fused(arrays)),
    }  # fmt: skip


def write(folder: Path, config: dict, arrays: dict, name: str = "model.safetensors") -> Path:
    """A folder with config.json and one file of weights, of PyTorch's by its name."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if name.endswith(".safetensors"):
        save_file({key: np.ascontiguousarray(value) for key, value in arrays.items()}, folder / name)
    else:
        import torch

        torch.save({key: torch.from_numpy(np.ascontiguousarray(value)) for key, value in arrays.items()}, folder / name)
    return folder


def layer(prefix: str) -> dict[str, tuple[int, ...]]:
    """A decoder layer with both of its norms."""
    norms = {f"{prefix}.{name}_layernorm.weight": (D,) for name in ("input", "post_attention")}
    return norms | attention(f"{prefix}.self_attn", D // H) | mlp(f"{prefix}.mlp")


def linear(name: str, out: int, into: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (out, into), f"{name}.bias": (out,)}


def kangaroo(hd: int = 8) -> dict[str, np.ndarray]:
    """Return tensors by the names of Kangaroo's authors."""
    norms = {"layers.0.input_layernorm.weight": (D,), "norm.weight": (D,)}
    return arrays_of(norms | attention("layers.0.self_attn", hd))


def clover(layers: int = 2) -> dict[str, np.ndarray]:
    """Clover-2 by its authors."""
    gates = {
        name: shape
        for gate in ("clover_head_mlp_rnn", "clover_head_mlp_rnn2")
        for part in "qkv"
        for name, shape in ({f"{gate}.input_layernorm.weight": (D,)} | linear(f"{gate}.{part}", D, D)).items()
    }
    return arrays_of({
        "clover_embed_tokens.weight": (V, D), "clover_norm.weight": (D,), "clover_head_norm.weight": (D,),
        **linear("clover_head_mlp", D, D), **linear("clover_head_mlp2", D, 2 * D), **gates,
        **{name: shape for i in range(layers) for name, shape in layer(f"layers.{i}").items()},
    })  # fmt: skip


def chimera(heads: int = 2) -> dict[str, dict[str, np.ndarray]]:
    """Return tensors by file, by the names of Chimera's authors."""
    files = {
        "trimlp": linear("0.linear", 3 * D, 3 * D) | {"1.weight": (D, 3 * D)},
        "fast_layer1": layer("0"),
        "chimera_head": {f"{i}.0.weight": (V, 2 * D) for i in range(heads)},
    }
    return {name: arrays_of(shapes, seed=i) for i, (name, shapes) in enumerate(files.items())}


def mlp_speculator(heads: int = 2, inner: int = 16) -> dict[str, np.ndarray]:
    """Return tensors by IBM's names."""
    return arrays_of({
        f"speculator.{name}": shape
        for i in range(heads)
        for name, shape in {
            f"emb.{i}.weight": (V, inner), f"head.{i}.weight": (V, inner),
            f"proj.{i}.weight": (inner, inner if i else D), f"ln.{i}.weight": (inner,),
            f"ln.{i}.bias": (inner,),
        }.items()
    })  # fmt: skip


def hydra(heads: int = 2, blocks: int = 2) -> dict[str, np.ndarray]:
    """Return tensors by the names of Hydra's authors, without a prefix layer."""
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(heads):
        for j in range(blocks):
            shapes |= linear(f"hydra_mlp.{i}.{j}.linear", D, D if j else (i + 2) * D)
        shapes |= linear(f"hydra_mlp.{i}.0.res_connection", D, (i + 2) * D) | linear(f"hydra_lm_head.{i}", V, D)
    return arrays_of(shapes)


def redrafter(layers: int = 2, width: int = 40) -> dict[str, np.ndarray]:
    """Return tensors by Apple's names."""
    blocks = {name: shape for j in range(layers) for name, shape in linear(f"lm_head.{j}.linear", width, width).items()}
    return arrays_of({
        "rnn_w.weight": (D, D), **linear("rnn_u", D, D), **linear("input_proj", width, 2 * D), **blocks,
        f"lm_head.{layers}.weight": (V, width),
    })  # fmt: skip
