"""Sampling options of a workload: they change what a program computes per vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import processors
from specjax.errors import UsageError
from specjax.types import Processor, Sampling

PENALTIES = ("repetition", "presence", "frequency")


class Warping(NamedTuple):
    """Options of the sampled distribution, as numbers. None: not part of the program."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    def check(self, prefix: str = "") -> Warping:
        """Check the ranges of all options, and return them. Raises: UsageError that names the flag."""
        ranges: dict[str, tuple[Callable[[Any], bool], str]] = {
            "temperature": (lambda x: x >= 0 and math.isfinite(x), "at least 0; 0 is greedy"),
            "top_k": (lambda x: x >= 1 and x % 1 == 0, "a whole number of at least 1"),
            "top_p": (lambda x: 0 < x <= 1, "above 0 and at most 1"),
            "min_p": (lambda x: 0 <= x <= 1, "from 0 to 1"),
            "repetition_penalty": (lambda x: 0 < x < math.inf, "above 0; 1 changes nothing"),
            "presence_penalty": (math.isfinite, "a number; 0 changes nothing"),
            "frequency_penalty": (math.isfinite, "a number; 0 changes nothing"),
        }
        for name, (holds, expected) in ranges.items():
            value = getattr(self, name)
            if value is not None and not holds(value):
                raise UsageError(f"--{name.replace('_', '-')} must be {expected}, not {value:g}")
        return self

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    def sampling(self, place: Callable[[jax.ShapeDtypeStruct], Any]) -> Sampling:
        """Return the traced options as shapes that `place` puts on the devices. Greedy programs have none."""
        if self.is_greedy:
            return Sampling()
        values = (jnp.float32, jnp.int32, jnp.float32, jnp.float32)
        shape = lambda value, dtype: None if value is None else place(jax.ShapeDtypeStruct((), dtype))
        return Sampling(*map(shape, self[:4], values))

    def processors(self, place: Callable[[jax.ShapeDtypeStruct], Any]) -> tuple[Processor, ...]:
        """Return the penalties, with settings as shapes that `place` puts on the devices."""
        options = ((name, getattr(self, f"{name}_penalty")) for name in PENALTIES)
        built = (getattr(processors, name)(value) for name, value in options if value is not None)
        shape = lambda x: place(jax.ShapeDtypeStruct(np.shape(x), x.dtype))
        return tuple(processor.replace(settings=jax.tree.map(shape, processor.settings)) for processor in built)

    def describe(self) -> dict[str, float | None]:
        """Return the options as JSON."""
        return self._asdict()


GREEDY = Warping()
