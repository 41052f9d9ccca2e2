"""Settings of a head: fields of its config that no tensor shows, which a user overrides where its files are wrong.

A head with other settings has the same parameters. `HeadVariant` is such a head with the error that it would fix.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.heads.contract import DraftHead
from specjax.models.heads.kinds import KINDS, abstract_head, format_changes
from specjax.models.loading.families.config_fields import HEADS, POSITIONS, ROWS
from specjax.types import PyTree

LAYER = "rope_base", "norm_eps", "window", "query_scale"
"""Fields of the layers' config that are settings, as `layer.NAME`."""
BOUNDS = {
    "taps": (0, None), "behind": (0, None), "exit_layer": (1, None), "block_size": (0, HEADS), "depths": (0, HEADS),
    "windows": (1, POSITIONS), "layer.window": (1, POSITIONS),
}  # fmt: skip
"""The first and the last value of whole numbers; None: the number of the target's layers."""
FITTED = "vocabulary", "temperatures"
"""Parameters that are not read from tensors. Their shapes may follow the settings."""
YES_NO = {"yes": True, "true": True, "no": False, "false": False}


class HeadVariant(NamedTuple):
    """A head with another interpretation of the same tensors."""

    reason: str  # the error of the files, as a sentence without a full stop
    head: DraftHead
    setting: str = ""  # the setting that has the same effect, as --head-set takes it; "": there is none


def change_config(head: DraftHead, changes: Mapping[str, Any], reason: str) -> HeadVariant:
    """Return a head with other settings. Temperatures of a changed number of slots are 1."""
    kind, config = head.head.kind, _replaced(head.head.config, changes)
    shapes = abstract_head(kind, config).params
    fit = lambda shape, x: x if x.shape == shape.shape else jnp.ones(shape.shape, shape.dtype)
    return HeadVariant(
        reason, DraftHead(KINDS[kind].head(config), jax.tree.map(fit, shapes, head.params)),
        " ".join(format_changes(changes)),
    )  # fmt: skip


def tap_variants(head: DraftHead, num_layers: int) -> list[HeadVariant]:
    """Return the head with taps that number streams in place of outputs of layers, and the reverse."""
    config, heads = head.head.config, []
    for step, meaning in ((1, "outputs of layers"), (-1, "streams, and were read as outputs of layers")):
        taps = tuple(tap + step for tap in config.taps)
        if all(0 <= tap <= num_layers for tap in taps):
            reason = f"its layer ids count {meaning}; as streams, 0 the embedding, they are {list(taps)}"
            heads.append(change_config(head, {"taps": taps}, reason))
    return heads


def names_of(config: Any, flags: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the settings of a head: its flags that are fields of its config, and those of its layers."""
    fields = {field.name for field in dataclasses.fields(config)}
    layer = LAYER if getattr(config, "layer", None) is not None else ()
    return (*(name for name in flags if name in fields), *(f"layer.{name}" for name in layer))


def by_own_names(settings: Mapping[str, Any], spellings: Mapping[str, str]) -> dict[str, Any]:
    """Return settings by the names of a head's config. Raises: UsageError for a setting with two names."""
    names: dict[str, str] = {}
    for name in settings:
        first = names.setdefault(spellings.get(name, name), name)
        if first != name:
            raise UsageError(f"{quote(first)} and {quote(name)} are one setting of the head; remove one")
    return {setting: settings[name] for setting, name in names.items()}


def override(kind: str, config: Any, changes: Mapping[str, Any], names: tuple[str, ...], num_layers: int) -> Any:
    """Return a config with other settings. changes: values, or texts such as "yes", "2+15+27" or "none".

    Raises: UsageError for an unknown setting, a value of another type, or one that needs other tensors.
    """
    values = {}
    for name, value in changes.items():
        if name not in names:
            raise UsageError(f"a {kind} head has no setting {quote(name)}; it has {', '.join(names)}")
        owner, _, field = name.rpartition(".")
        try:
            values[name] = _parse(typing.get_type_hints(type(config.layer if owner else config))[field], value)
        except ValueError as error:
            raise UsageError(f"the setting {name} of the head must be {error}, not {quote(value)}") from None
        first, last = BOUNDS.get(name, (0, ROWS))
        last = num_layers if last is None else last
        numbers = [number for number in jax.tree.leaves(values[name]) if type(number) is int]
        if not all(first <= number <= last for number in numbers):
            raise UsageError(f"the setting {name} must be from {first} to {last}, not {quote(value)}")
    new = _replaced(config, values)
    if _shapes(kind, new) != _shapes(kind, config):
        text = " ".join(format_changes(values))
        raise UsageError(f"{text} does not fit the tensors of the {kind} head; leave it out")
    return new


def _replaced(config: Any, changes: Mapping[str, Any]) -> Any:
    layer = {name.removeprefix("layer."): value for name, value in changes.items() if name.startswith("layer.")}
    fields = {name: value for name, value in changes.items() if not name.startswith("layer.")}
    if layer:
        fields["layer"] = dataclasses.replace(config.layer, **layer)
    return dataclasses.replace(config, **fields)


def _shapes(kind: str, config: Any) -> PyTree:
    """Return the shapes of the parameters that are read from tensors, by their path."""
    flat = jax.tree_util.tree_flatten_with_path(abstract_head(kind, config).params)[0]
    name = lambda path: ".".join(str(entry.key) for entry in path)
    return {name(path): x.shape for path, x in flat if not any(part in name(path) for part in FITTED)}


def _parse(hint: Any, value: Any) -> Any:
    """Return a value of the type that a field has. Raises: ValueError with a description of that type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return None if value in (None, "none") else _parse(next(x for x in args if x is not types.NoneType), value)
    if origin is Literal:
        if value in args:
            return value
        raise ValueError(" or ".join(map(str, args)))
    if origin is tuple:
        parts = ([] if value == "none" else value.split("+")) if isinstance(value, str) else value
        if isinstance(parts, list | tuple):
            return tuple(_parse(args[0], part) for part in parts)
        raise ValueError("a list, such as 2+15+27")
    if hint is bool:
        if isinstance(value, bool) or (isinstance(value, str) and value in YES_NO):
            return value if isinstance(value, bool) else YES_NO[value]
        raise ValueError("yes or no")
    return _parse_number(hint, value)


def _parse_number(hint: Any, value: Any) -> int | float:
    if hint is int:
        if isinstance(value, str) and value.isdecimal():
            return int(value)
        if type(value) is int and value >= 0:
            return value
        raise ValueError("a whole number, at least 0")
    try:
        number = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError):
        number = math.nan
    if math.isfinite(number) and number > 0:
        return number
    raise ValueError("a number above 0")
