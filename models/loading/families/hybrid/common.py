"""Tensor names and fields that several hybrid families share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.hybrid.config import HybridConfig, LayerKind
from specjax.models.loading.families import llama
from specjax.models.loading.families.config_fields import HEADS, LAYERS, ROWS, WIDTH, ConfigFields, check_heads
from specjax.models.loading.tensors.assembly import Change, StoredTensor, WeightNames

_NORMS = {
    "layers.*.attention_norm.weight": "layers.*.mixer_norm.weight",
}

WEIGHTS = tuple(
    names._replace(path=_NORMS.get(names.path, names.path))
    for names in llama.WEIGHTS
    if not names.path.endswith("bias")
)
"""Names of the Llama family, with those of the attention layers and of the MLP."""


def by_path(names: Iterable[WeightNames], **changes: Mapping[str, str]) -> dict[str, WeightNames]:
    """Return the rows by parameter path, with the names in `hf` and `gguf` replaced by those of the family."""
    rows = {row.path: row for row in names}
    for form, replaced in changes.items():
        for path, name in replaced.items():
            rows[path] = rows.get(path, WeightNames(path, "", ""))._replace(**{form: name})
    return rows


RATE_OF_LOGARITHM = Change(lambda x: -np.exp(x), lambda rate: np.log(-rate))
"""The rate of decay -exp(x) of a stored logarithm x."""


def head_rows(heads: int, size: int, stride: int, first: int = 0) -> np.ndarray:
    """Return the rows `first` to `first + size` of each of `heads` groups of `stride` rows."""
    return (np.arange(heads)[:, None] * stride + first + np.arange(size)).reshape(-1)


def joined_rows(name: str, rows: Mapping[str, int]) -> dict[str, StoredTensor]:
    """Return the parts of a tensor that joins them, by the keys of `rows`, which has the number of rows of each."""
    firsts = itertools.accumulate(rows.values(), initial=0)
    total = sum(rows.values())
    return {part: StoredTensor(name, first=first, rows=total) for part, first in zip(rows, firsts, strict=False)}


def convolution(name: str) -> StoredTensor:
    """Return the kernel of a depthwise convolution, which PyTorch stores as [C, 1, taps]."""
    return StoredTensor(name, unit_axis=True)


def decay_rate(name: str) -> StoredTensor:
    """Return the rates of decay, of which files of transformers store the logarithm."""
    return StoredTensor(name, change=RATE_OF_LOGARITHM)


def sizes_of_hf(hf: ConfigFields, *, head_dim: int | None = None) -> dict[str, Any]:
    """Return the fields of a config that all families have.

    Args:
      head_dim: width of a head, for a config without it; None: the width divided by the heads.
    """
    width, heads = hf.size("hidden_size", maximum=WIDTH), hf.size("num_attention_heads", maximum=HEADS)
    kv_heads = hf.size("num_key_value_heads", heads, maximum=HEADS)
    head_dim = hf.size("head_dim", head_dim or width // heads, maximum=HEADS)
    check_heads(hf, llama.HF_HEADS, heads, kv_heads, head_dim)
    return {
        "vocab_size": hf.size("vocab_size", maximum=ROWS),
        "width": width,
        "num_layers": hf.size("num_hidden_layers", maximum=LAYERS),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
    }


def layer_names(
    hf: ConfigFields, layers: int, default: Callable[[], list[str]], supported: Iterable[str],
    field: str = "layer_types",
) -> list[str]:  # fmt: skip
    """Return the names of the kinds of layers, one per layer. `default` gives those of a config without the list.

    Raises: UsageError for another number of names, or for a name outside of `supported`.
    """
    names = hf.array(field, str) or default()
    if len(names) != layers:
        raise UsageError(f"{hf.where} has {len(names)} {field}, but num_hidden_layers is {layers}; make them equal")
    unsupported = [name for name in names if name not in supported]
    if unsupported:
        raise UsageError(
            f"{hf.where} has {quote(unsupported[0])} among its {field}, which specjax does not support "
            f"(only {', '.join(supported)})"
        )
    return names


def check_activation(hf: ConfigFields, field: str = "hidden_act") -> None:
    """Check that the activation of the MLP is silu. Raises: UsageError for another one."""
    if hf.text(field, "silu") != "silu":
        raise UsageError(f"{hf.where} has {field} {quote(hf.text(field))}; specjax supports silu only")


def refuse_flags(hf: ConfigFields, *names: str) -> None:
    """Check that flags that specjax does not support are not set. Raises: UsageError with the first one that is."""
    for name in names:
        if hf.flag(name):
            raise UsageError(f"{hf.where} sets {name}, which specjax does not support")


def check_only(hf: ConfigFields, values: Mapping[str, Any]) -> None:
    """Check that fields have the only values that specjax supports, if the config has them.

    Raises: UsageError with the first one that has another value.
    """
    for name, supported in values.items():
        value = hf.value(name)
        if value is not None and (type(value), value) != (type(supported), supported):
            stated, only = (str(x).lower() if isinstance(x, bool) else quote(x) for x in (value, supported))
            raise UsageError(f"{hf.where} has {hf.prefix}{name} {stated}, which specjax does not support (only {only})")


def refuse_experts(hf: ConfigFields, name: str) -> None:
    """Check that a field that counts experts is 0 or absent. Raises: UsageError for a mixture of experts."""
    experts = hf.size(name, 0, minimum=0)
    if experts:
        raise UsageError(
            f"{hf.where} is a mixture of {experts} experts ({hf.prefix}{name}), which specjax does not support; use a "
            "dense model"
        )


def reciprocal(x: float) -> float:
    """Return the number whose reciprocal is x, a whole one if there is one."""
    return float(round(1 / x)) if 1 / max(round(1 / x), 1) == x else 1 / x


def gguf_rows(shapes: Mapping[str, tuple[int, ...]], name: str, where: str) -> int:
    """Return the number of rows of a matrix of a GGUF file. Raises: UsageError if the file has no such matrix."""
    shape = shapes.get(name, ())
    if len(shape) != 2 or not 1 <= shape[0] <= ROWS:
        raise UsageError(f"{where} has no {name} with two dimensions, so the shape of the model is unknown")
    return shape[0]


def gguf_attention(meta: ConfigFields, width: int) -> dict[str, Any]:
    """Return the fields of attention layers. The number of key/value heads is an array, with 0 for other layers.

    Raises: UsageError for layers with different numbers, or for none.
    """
    heads, name = meta.size("attention.head_count", maximum=HEADS), "attention.head_count_kv"
    if isinstance(meta.value(name), list):
        counts = sorted({count for count in meta.array(name, int) if count})
        if len(counts) != 1 or not 1 <= counts[0] <= HEADS:
            raise UsageError(
                f"{meta.where} has {meta.prefix}{name} {quote(meta.value(name))}, which must be one number in all "
                "layers with attention, and 0 in the others"
            )
        kv_heads = counts[0]
    else:
        kv_heads = meta.size(name, heads, maximum=HEADS)
    head_dim = meta.size("attention.key_length", width // heads, maximum=HEADS)
    check_heads(meta, llama.GGUF_HEADS, heads, kv_heads, head_dim)
    return {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim}


def attention_to_hf(c: HybridConfig) -> dict[str, Any]:
    """Return the fields that `sizes_of_hf` reads, and those of the embedding and the length of texts."""
    return {
        "vocab_size": c.vocab_size,
        "hidden_size": c.width,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "max_position_embeddings": c.max_positions,
        "tie_word_embeddings": c.tied,
        "torch_dtype": c.dtype,
    }


def gguf_mlp_width(shapes: Mapping[str, tuple[int, ...]], kinds: tuple[LayerKind, ...], where: str) -> int:
    """Return the number of hidden units of the MLPs, by the first of them; 0 if no layer has one."""
    layer = next((i for i, kind in enumerate(kinds) if kind.feed != "none"), None)
    return 0 if layer is None else gguf_rows(shapes, f"blk.{layer}.ffn_up.weight", where)


def gguf_permuted(config: HybridConfig) -> dict[str, StoredTensor]:
    """Map queries and keys to tensors whose rows llama.cpp permutes to rotate neighbouring ones."""
    heads = {"q": config.num_heads, "k": config.num_kv_heads}
    return {
        f"layers.*.attention.{part}.weight": StoredTensor(f"blk.*.attn_{part}.weight", heads=count)
        for part, count in heads.items()
    }


def gguf_rotary_dim(meta: ConfigFields, head_dim: int) -> int | None:
    """Return the number of rotated numbers of a head; None: all. Raises: UsageError for an impossible number."""
    rotary_dim = meta.size("rope.dimension_count", head_dim, maximum=HEADS)
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise UsageError(
            f"{meta.where} has {meta.prefix}rope.dimension_count {rotary_dim}, which must be even and at most "
            f"{head_dim}, the size of a head"
        )
    return None if rotary_dim == head_dim else rotary_dim


def gguf_kinds(
    shapes: Mapping[str, tuple[int, ...]], layers: int, kinds: Mapping[str, LayerKind], where: str
) -> tuple[LayerKind, ...]:
    """Return the kind of each layer by its tensors.

    Args:
      kinds: kinds by a part of the name of a tensor that only they have, such as "ssm_out".

    Raises: UsageError for a layer that has no such tensor, or several.
    """

    def of_layer(layer: int) -> LayerKind:
        matches = [kind for part, kind in kinds.items() if f"blk.{layer}.{part}.weight" in shapes]
        if len(matches) != 1:
            raise UsageError(
                f"{where} must have one of {', '.join(kinds)} in its layer {layer}, but has {len(matches)}"
            )
        return matches[0]

    return tuple(of_layer(layer) for layer in range(layers))


def gguf_sizes_of_model(meta: ConfigFields, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return the fields of a config that all families have, from the metadata of a GGUF file."""
    meta.skip("feed_forward_length", "vocab_size", "attention.value_length")  # the tensors show them
    return {
        "vocab_size": gguf_rows(shapes, "token_embd.weight", meta.where),
        "width": meta.size("embedding_length", maximum=WIDTH),
        "num_layers": meta.size("block_count", maximum=LAYERS),
        "norm_eps": meta.number("attention.layer_norm_rms_epsilon", maximum=1.0),
        "tied": "output.weight" not in shapes,
        "max_positions": meta.size("context_length"),
    }
