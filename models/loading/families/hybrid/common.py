"""Tensor names and fields that several hybrid families share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.loading.families import llama
from specjax.models.loading.families.config_fields import HEADS, LAYERS, ROWS, WIDTH, ConfigFields, check_heads
from specjax.models.loading.tensors.assembly import StoredTensor, WeightNames

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


def negative_exponential(x: np.ndarray) -> np.ndarray:
    """Return -exp(x), the rate of decay of a stored logarithm."""
    return -np.exp(x)


def head_rows(heads: int, size: int, stride: int, first: int = 0) -> np.ndarray:
    """Return the rows `first` to `first + size` of each of `heads` groups of `stride` rows."""
    return (np.arange(heads)[:, None] * stride + first + np.arange(size)).reshape(-1)


def convolution(name: str) -> StoredTensor:
    """Return the kernel of a depthwise convolution, which PyTorch stores as [C, 1, taps]."""
    return StoredTensor(name, unit_axis=True)


def decay_rate(name: str) -> StoredTensor:
    """Return the rates of decay, of which files of transformers store the logarithm."""
    return StoredTensor(name, change=negative_exponential)


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


def layer_names(hf: ConfigFields, layers: int, default: Callable[[], list[str]], supported: Iterable[str]) -> list[str]:
    """Return the names of the kinds of layers, one per layer. `default` gives those of a config without the list.

    Raises: UsageError for another number of names, or for a name outside of `supported`.
    """
    names = hf.array("layer_types", str) or default()
    if len(names) != layers:
        raise UsageError(f"{hf.where} has {len(names)} layer_types, but num_hidden_layers is {layers}; make them equal")
    unsupported = [name for name in names if name not in supported]
    if unsupported:
        raise UsageError(
            f"{hf.where} has {quote(unsupported[0])} among its layer_types, which specjax does not support "
            f"(only {', '.join(supported)})"
        )
    return names


def check_activation(hf: ConfigFields, field: str = "hidden_act") -> None:
    """Check that the activation of the MLP is silu. Raises: UsageError for another one."""
    if hf.text(field, "silu") != "silu":
        raise UsageError(f"{hf.where} has {field} {quote(hf.text(field))}; specjax supports silu only")
