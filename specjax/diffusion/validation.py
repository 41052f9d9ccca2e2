"""Conversion and checks of method settings by the type annotations of the factory."""

from __future__ import annotations

import functools
import inspect
import math
import operator
import types
import typing
from collections.abc import Callable
from typing import Any, Concatenate, Literal, ParamSpec

import jax
import numpy as np

from specjax.diffusion.types import Denoiser, Procedure
from specjax.errors import UsageError

Settings = ParamSpec("Settings")
Make = Callable[Concatenate[Denoiser, Settings], Procedure]


def checked(make: Make[Settings]) -> Make[Settings]:
    """Wrap a factory so that its settings are converted to the annotated types.

    A block-causal model has fixed blocks, so a `block` of another size is refused in every factory.

    Supported annotations are int, float, bool, tuple[int, ...], Literal, and unions of these with None. Numbers of
    NumPy and JAX become Python numbers, so that equal settings share parts and compiled programs.

    Raises: UsageError for another type, a word outside the choices, NaN, which never equals a cached key, or a block
    that differs from the model's.
    """
    hints: dict[str, Any] = {}

    @functools.wraps(make)
    def method(denoiser: Denoiser, *more: Settings.args, **settings: Settings.kwargs) -> Procedure:
        if not hints:
            hints.update(typing.get_type_hints(make))
        converted = {
            name: _read(name, value, hints[name]) if name in hints else value for name, value in settings.items()
        }
        procedure = make(denoiser, *more, **converted)  # type: ignore[arg-type]
        if denoiser.is_causal and converted.get("block", denoiser.block) != denoiser.block:
            raise UsageError(
                f"block={converted['block']} differs from the model's blocks of {denoiser.block} columns, which its "
                "attention fixes; leave block out"
            )
        return procedure

    return method


def only_with(option: str, **choices: tuple[Any, ...]) -> Callable[[Make[Settings]], Make[Settings]]:
    """Return a decorator for factories with settings that only apply to some values of another one.

    Args:
      option: the other setting. choices: for each setting, the values of `option` with which it has an effect.

    The factory raises a UsageError if such a setting is given with another value of `option`.
    """

    def decorate(make: Make[Settings]) -> Make[Settings]:
        default = inspect.unwrap(make).__kwdefaults__[option]

        @functools.wraps(make)
        def method(denoiser: Denoiser, *more: Settings.args, **settings: Settings.kwargs) -> Procedure:
            procedure, value = make(denoiser, *more, **settings), settings.get(option, default)
            for name, values in choices.items():
                if name in settings and value not in values:
                    alternatives = " or ".join(f"{option}={choice}" for choice in values)
                    raise UsageError(
                        f"{name} has no effect with {option}={value}; leave {name} out, or set {alternatives}"
                    )
            return procedure

        return method

    return decorate


def _read(name: str, value: Any, hint: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        if value is None and type(None) in typing.get_args(hint):
            return None
        (hint,) = (kind for kind in typing.get_args(hint) if kind is not type(None))
    if isinstance(value, jax.core.Tracer):
        raise UsageError(f"{name} is a traced value, but it is part of the compiled program; make it static in `jit`")
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        if not isinstance(value, str) or value not in choices:
            raise UsageError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
        return value
    if hint in _READERS:
        reader, expectation = _READERS[hint]
        try:
            return reader(value)
        except (TypeError, ValueError):
            raise UsageError(f"{name} must be {expectation}, not {value!r}") from None
    return value


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool | np.bool_)


def _bool(value: Any) -> bool:
    if not _is_bool(value):
        raise TypeError
    return bool(value)


def _int(value: Any) -> int:
    if _is_bool(value):
        raise TypeError
    return operator.index(value)


def _float(value: Any) -> float:
    if _is_bool(value) or isinstance(value, str | bytes):
        raise TypeError
    number = float(value)
    if math.isnan(number):
        raise ValueError
    return number


_READERS: dict[Any, tuple[Callable[[Any], Any], str]] = {
    bool: (_bool, "True or False"),
    int: (_int, "a whole number"),
    float: (_float, "a number"),
    tuple[int, ...]: (lambda value: tuple(map(_int, value)), "whole numbers, as a tuple"),
}
