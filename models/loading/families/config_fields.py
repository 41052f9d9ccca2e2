"""Typed access to the fields of a configuration file, which are checked when they are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from specjax.errors import UsageError
from specjax.files.untrusted import quote

T = TypeVar("T")

LAYERS, WIDTH, HEADS, ROWS, POSITIONS = 1 << 10, 1 << 20, 1 << 14, 1 << 24, (1 << 31) - 1
"""Upper bounds of any model: number of layers, width of the stream, size and number of heads, rows of a matrix, length
of a text."""

_REQUIRED: Any = object()


@dataclass(frozen=True)
class ConfigFields:
    """Fields of a configuration file, with its path for errors and a record of the fields that were read.

    Methods take names without `prefix`. A null value counts as absent. `subfields` and copies with other values share
    the record, so `unread` of the first object covers the whole file.
    """

    values: Mapping[str, Any]
    where: str
    prefix: str = ""
    record: set[str] = field(default_factory=set, repr=False, compare=False)  # full names; objects end with a dot

    def has(self, name: str) -> bool:
        """Return True if the field has a value. It does not count as read."""
        return self.values.get(self.prefix + name) is not None

    def is_stated(self, name: str) -> bool:
        """Return True if the field is present, even as null. A family's default then does not apply."""
        return self.prefix + name in self.values

    def value(self, name: str) -> Any:
        """Return the value of a field, of any type; None if it is absent."""
        self.skip(name)
        return self.values.get(self.prefix + name)

    def skip(self, *names: str) -> None:
        """Record fields as read that change nothing beside the others."""
        self.record.update(self.prefix + name for name in names)

    def unread(self) -> Iterator[tuple[str, str, Any]]:
        """Yield each field that was not read: its name with the prefix, without the prefix, and its value.

        An object is yielded as a whole, unless `subfields` has returned it.
        """
        for full_name, value in self.values.items():
            name = full_name.removeprefix(self.prefix)
            if value is None or not full_name.startswith(self.prefix):
                continue
            if isinstance(value, dict) and full_name + "." in self.record:
                yield from self._nested(name, value).unread()
            elif isinstance(value, dict) or full_name not in self.record:
                yield full_name, name, value

    def with_defaults(self, defaults: Mapping[str, Any]) -> ConfigFields:
        """Return the fields with values for those that are absent. A null value stays."""
        return replace(self, values={**{self.prefix + name: value for name, value in defaults.items()}, **self.values})

    def unrecorded(self) -> ConfigFields:
        """Return the same fields with an empty record."""
        return replace(self, record=set())

    def size(self, name: str, default: T = _REQUIRED, *, minimum: int = 1, maximum: int = POSITIONS) -> int | T:
        """Read a whole number."""
        description = f"a whole number from {minimum} to {maximum}"
        return self._checked(name, default, description, lambda x: type(x) is int and minimum <= x <= maximum)

    def number(self, name: str, default: T = _REQUIRED, *, minimum: float = 1e-30, maximum: float = 1e30) -> float | T:
        """Read a finite number."""
        is_valid = lambda x: type(x) in (int, float) and minimum <= x <= maximum  # False for NaN
        value = self._checked(name, default, f"a number from {minimum:g} to {maximum:g}", is_valid)
        return float(value) if self.has(name) else value

    def flag(self, name: str, default: bool = False) -> bool:
        return self._checked(name, default, "true or false", lambda x: type(x) is bool)

    def text(self, name: str, default: T = _REQUIRED) -> str | T:
        return self._checked(name, default, "a text", lambda x: isinstance(x, str))

    def array(self, name: str, kind: type | tuple[type, ...], length: int | None = None) -> list:
        """Read a list with entries of one type, [] if it is absent. `length` is the required number of entries."""
        description = f"a list{'' if length is None else f' of {length}'} with entries of one kind"
        is_valid = lambda x: (
            isinstance(x, list) and length in (None, len(x)) and all(isinstance(entry, kind) for entry in x)
        )
        return self._checked(name, [], description, is_valid)

    def subfields(self, name: str) -> ConfigFields:
        """Return the fields of a nested object; none if it is absent."""
        values = self._checked(name, {}, "an object", lambda x: isinstance(x, dict))
        self.skip(name + ".")
        return self._nested(name, values)

    def _nested(self, name: str, values: dict) -> ConfigFields:
        prefix = f"{self.prefix}{name}."
        return replace(self, values={prefix + str(key): value for key, value in values.items()}, prefix=prefix)

    def _checked(self, name: str, default: Any, description: str, is_valid) -> Any:
        value, name = self.value(name), self.prefix + name
        if value is None:
            if default is _REQUIRED:
                raise UsageError(f"{self.where} lacks the field {name}, so the shape of the model is unknown; add it")
            return default
        if not is_valid(value):
            raise UsageError(f"{self.where} has {name} {quote(value)}, which must be {description}")
        return value


def check_heads(fields: ConfigFields, names: tuple[str, str, str], heads: int, kv_heads: int, head_dim: int) -> None:
    """Check that heads share keys and values evenly, and can be rotated in pairs.

    Args:
      names: the fields of heads, key/value heads and their width.

    Raises: UsageError if they do not.
    """
    of_heads, of_kv, of_width = (fields.prefix + name for name in names)
    if heads % kv_heads:
        raise UsageError(f"{fields.where} has {of_heads} {heads}, which must be a multiple of {of_kv}, {kv_heads}")
    if head_dim % 2:
        raise UsageError(f"{fields.where} has {of_width} {head_dim}, which must be even for rotary embeddings")
