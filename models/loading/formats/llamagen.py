"""Reading of LlamaGen's own checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.errors import UsageError
from specjax.models.bridge import make_model
from specjax.models.image_tokens.captions import CaptionConfig
from specjax.models.image_tokens.llamagen import LlamaGenConfig
from specjax.numerics.validation import check_integer
from specjax.types import Target

UNCONDITIONAL = "cls_embedding.uncond_embedding"
"""The tensor that only text-conditional checkpoints have."""

PARTS = {
    "attention_norm": "attention_norm", "mlp_norm": "ffn_norm", "o": "attention.wo", "gate": "feed_forward.w1",
    "up": "feed_forward.w3", "down": "feed_forward.w2",
}  # fmt: skip


def read_llamagen(tensors: Mapping[str, Any], num_heads: int, *, grid: int = 16, dtype: str = "float32") -> Target:
    """Return a LlamaGen model. Its prompt is one class token, or a caption's placeholders (`captions`).

        tensors = torch.load("c2i_B_256.pt", map_location="cpu", weights_only=True)["model"]
        target = read_llamagen(tensors, num_heads=12)

    Args:
      tensors: arrays of the checkpoint by name; tensors of PyTorch on a CPU too.
      num_heads: 12 (B), 16 (L), 20 (XL), 24 (XXL), 32 (1B, 3B).
      grid: rows and columns of the image, 16 for 256 pixels and 24 for 384.

    Raises: UsageError for tensors of another model.
    """
    check_integer("num_heads", num_heads)
    check_integer("grid", grid)
    get = lambda name: _array(tensors, name)
    codes, width = get("tok_embeddings.weight").shape
    has_captions = UNCONDITIONAL in tensors
    extra_rows = np.zeros((1, width), np.float32) if has_captions else get("cls_embedding.embedding_table.weight")
    layers = sum(name.endswith(".attention.wo.weight") for name in tensors)
    if width % num_heads or (width // num_heads) % 4:
        raise UsageError(f"num_heads must divide the width {width} into heads of a multiple of 4, not {num_heads}")
    head_dim = width // num_heads
    fused = get("layers.0.attention.wqkv.weight").shape[0]
    unconditional = get(UNCONDITIONAL) if has_captions else extra_rows[:1]
    condition: dict[str, Any] = {"condition_tokens": len(unconditional), "caption_width": unconditional.shape[1]}
    config = (CaptionConfig if has_captions else LlamaGenConfig)(
        vocab_size=codes + len(extra_rows), width=width, num_layers=layers, num_heads=num_heads,
        num_kv_heads=(fused // head_dim - num_heads) // 2, head_dim=head_dim,
        mlp_width=get("layers.0.feed_forward.w1.weight").shape[0], tied=False, grid=grid, codes=codes,
        max_positions=len(unconditional) + grid * grid, dtype=dtype, **condition if has_captions else {},
    )  # fmt: skip
    cast = lambda x: {"weight": jnp.asarray(x, dtype)}
    params = {
        "embed": cast(np.concatenate([get("tok_embeddings.weight"), extra_rows])), "norm": cast(get("norm.weight")),
        "head": cast(np.pad(get("output.weight"), ((0, len(extra_rows)), (0, 0)))),
        "layers": {layer: _layer(config, tensors, layer, cast) for layer in range(layers)},
    }  # fmt: skip
    if has_captions:
        params["unconditional"] = cast(unconditional)
        params["caption_mlp"] = {
            part: cast(get(f"cls_embedding.cap_proj.{name}.weight")) for part, name in (("up", "fc1"), ("down", "fc2"))
        }
    return Target(make_model(config), params)


def _layer(config: LlamaGenConfig, tensors: Mapping[str, Any], layer: int, cast) -> dict[str, Any]:
    """Return the parameters of a layer."""
    get = lambda name: _array(tensors, f"layers.{layer}.{name}.weight")
    part = {name: cast(get(stored)) for name, stored in PARTS.items()}
    ends = np.cumsum([config.num_heads, config.num_kv_heads]) * config.head_dim
    queries, keys, values = np.split(get("attention.wqkv"), ends)
    return {
        "attention_norm": part["attention_norm"], "mlp_norm": part["mlp_norm"],
        "attention": {
            "q": cast(_halves(queries, config.head_dim)), "k": cast(_halves(keys, config.head_dim)),
            "v": cast(values), "o": part["o"],
        },
        "mlp": {name: part[name] for name in ("gate", "up", "down")},
    }  # fmt: skip


def _halves(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Return the rows of heads in which the first numbers of all rotated pairs come first."""
    pairs = rows.reshape(-1, head_dim // 2, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _array(tensors: Mapping[str, Any], name: str) -> np.ndarray:
    if name not in tensors:
        raise UsageError(f"{name} is not in the checkpoint; give the tensors of a LlamaGen model")
    tensor = tensors[name]
    # NumPy has no bfloat16 of PyTorch, and reads no parameter that has a gradient.
    return np.asarray(tensor.detach().float() if hasattr(tensor, "detach") else tensor, np.float32)
