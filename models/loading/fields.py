"""Fields of a configuration that must be there."""

from __future__ import annotations

from typing import Any

from specjax.errors import UsageError


def require(fields: dict, where: str, name: str, *, prefix: str = "") -> Any:
    """`fields[prefix + name]`, or an error that names the file `where` it should have been."""
    name = prefix + name
    if fields.get(name) is None:
        raise UsageError(f"{where} lacks the field {name}, so the shape of the model is unknown")
    return fields[name]


def width_of_heads(hf: dict, where: str) -> int:
    """Head width where a Hugging Face config leaves it to be derived."""
    return require(hf, where, "hidden_size") // require(hf, where, "num_attention_heads")
