"""Fields of a configuration: checked when they are asked for, as a file may say anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from specjax.errors import UsageError
from specjax.files.untrusted import quote

T = TypeVar("T")

LAYERS, WIDTH, HEADS, ROWS, POSITIONS = 1 << 10, 1 << 20, 1 << 14, 1 << 24, (1 << 31) - 1
"""Sizes that no model has: of a stack, a stream, a head and their number, a matrix, a text."""

_REQUIRED: Any = object()


@dataclass(frozen=True)
class ConfigFields:
    """What a file says, and which file it is. Names below are without `prefix`; null is as good as absent."""

    values: Mapping[str, Any]
    where: str
    prefix: str = ""

    def given(self, name: str) -> bool:
        return self.values.get(self.prefix + name) is not None

    def stated(self, name: str) -> bool:
        """Whether it is there, if only as null: then a family's default does not hold."""
        return self.prefix + name in self.values

    def size(self, name: str, default: T = _REQUIRED, *, least: int = 1, most: int = POSITIONS) -> int | T:
        """A whole number."""
        wanted = f"a whole number from {least} to {most}"
        return self._checked(name, default, wanted, lambda x: type(x) is int and least <= x <= most)

    def number(self, name: str, default: T = _REQUIRED, *, least: float = 1e-30, most: float = 1e30) -> float | T:
        """A finite number."""
        good = lambda x: type(x) in (int, float) and least <= x <= most  # not so NaN
        value = self._checked(name, default, f"a number from {least:g} to {most:g}", good)
        return float(value) if self.given(name) else value

    def flag(self, name: str, default: bool = False) -> bool:
        return self._checked(name, default, "true or false", lambda x: type(x) is bool)

    def text(self, name: str, default: T = _REQUIRED) -> str | T:
        return self._checked(name, default, "a text", lambda x: isinstance(x, str))

    def array(self, name: str, kind: type | tuple[type, ...], length: int | None = None) -> list:
        """A list whose entries are of a type, [] where there is none. `length`: how many these must be."""
        wanted = f"a list{'' if length is None else f' of {length}'} with entries of one kind"
        good = lambda x: (
            isinstance(x, list) and length in (None, len(x)) and all(isinstance(entry, kind) for entry in x)
        )
        return self._checked(name, [], wanted, good)

    def inside(self, name: str) -> ConfigFields:
        """The fields of an object within this one; none where it is absent."""
        values = self._checked(name, {}, "an object", lambda x: isinstance(x, dict))
        prefix = f"{self.prefix}{name}."
        return ConfigFields({prefix + str(key): value for key, value in values.items()}, self.where, prefix)

    def _checked(self, name: str, default: Any, wanted: str, good) -> Any:
        name = self.prefix + name
        value = self.values.get(name)
        if value is None:
            if default is _REQUIRED:
                raise UsageError(f"{self.where} lacks the field {name}, so the shape of the model is unknown")
            return default
        if not good(value):
            raise UsageError(f"{self.where} has {name} {quote(value)}, which must be {wanted}")
        return value


def check_heads(fields: ConfigFields, names: tuple[str, str, str], heads: int, kv_heads: int, head_dim: int) -> None:
    """Raises: UsageError for heads that cannot share keys and values evenly, or be rotated by pairs.

    Args: names: the fields of heads, key/value heads and their width.
    """
    of_heads, of_kv, of_width = (fields.prefix + name for name in names)
    if heads % kv_heads:
        raise UsageError(f"{fields.where} has {of_heads} {heads}, which must be a multiple of {of_kv}, {kv_heads}")
    if head_dim % 2:
        raise UsageError(f"{fields.where} has heads {head_dim} wide ({of_width}), which rotary embeddings need even")
