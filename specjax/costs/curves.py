"""What a pass over several tokens costs, in passes over one: what every decision to speculate rests on.

Three sources: the device itself (`measured`), the compiler (`planned`), or a rule of thumb (`estimated`). What decides
by costs takes a `Curve`, its own numbers, or None for the rule of thumb, and asks `at`.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays.indexing import first_largest
from specjax.errors import UsageError
from specjax.types import Target


class Curve(NamedTuple):
    """Costs that were measured or planned; between its widths by interpolation, beyond the last by the last slope."""

    widths: tuple[int, ...]  # tokens per row, rising from 1
    costs: tuple[float, ...]  # the first is 1

    def __call__(self, widths: Sequence[int]) -> np.ndarray:
        """float32[W], in passes over the first of `widths`."""
        x, y = np.asarray(self.widths, float), np.asarray(self.costs, float)
        asked = np.asarray(widths, float)
        slope = (y[-1] - y[-2]) / (x[-1] - x[-2]) if len(x) > 1 else 0.0
        found = np.interp(asked, x, y) + np.maximum(asked - x[-1], 0) * max(slope, 0.0)
        return (found / found[0]).astype(np.float32)


Costs = Curve | tuple[float, ...] | None


def check(costs: Costs, count: int, of: str) -> None:
    """Raises: UsageError unless `costs` are a curve, None, or one positive number for each `of` these."""
    if costs is None or isinstance(costs, Curve):
        return
    if len(costs) != count or not all(0 < cost < float("inf") for cost in costs):
        raise UsageError(f"costs must be one positive number per {of} ({count}), not {list(costs)}")


def at(costs: Costs, widths: Sequence[int], batch: int, dtype: Any = jnp.float32, platform: str | None = None):
    """float32[W]: passes over `widths` tokens of each of `batch` rows, in passes over the first of these widths."""
    if isinstance(costs, Curve):
        return costs(widths)
    return np.asarray(costs, np.float32) if costs else estimated(widths, batch, dtype, platform)


def estimated(widths: Sequence[int], batch: int, dtype: Any = jnp.float32, platform: str | None = None) -> np.ndarray:
    """float32[W]: passes over `widths` tokens of `batch` rows, by a rule of thumb for the platform (default: this one).

    CPU, measured with SmolLM2 on two cores: in float32 a pass over n >= 2 tokens costs 1 + n / 16 passes over one (the
    product with a single vector has a kernel of its own; measured 2: 1.18, 4: 1.22, 8: 1.45, 16: 1.95, 32: 3.16), in
    bfloat16 1 + 0.035 (n - 1), between cores with AVX-512 (8: 1.12, 16: 1.22, 32: 1.8) and those with AMX (1.33, 1.7,
    2.6). Elsewhere the weights are read once for up to some 240 tokens; the rest grows by 0.002 per token (Llama 3 8B
    on v5e by its compiler).
    """
    platform = platform or jax.default_backend()

    def cost(n: float) -> float:
        if platform != "cpu":
            return max(1 + 0.002 * n, n / 240)
        if jnp.dtype(dtype) == jnp.bfloat16:
            return 1 + 0.035 * (n - 1)
        return 1.0 if n == 1 else 1 + n / 16

    return np.asarray([cost(batch * width) / cost(batch) for width in widths], np.float32)


def dtype_of(target: Target) -> str:
    """That of its first floating parameter; of a model without any float32."""
    dtypes = (jnp.result_type(leaf) for leaf in jax.tree.leaves(target.params))
    return next((dtype.name for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)), "float32")


def measured(
    target: Target, widths: Sequence[int] | None = None, batch: int = 1, context: int | None = None, repeats: int = 9
) -> Curve:
    """Passes over `widths` tokens of `batch` rows, timed on this device: medians of `repeats` passes, taken in turns.

    Default: widths to 16 on CPU and to 64 elsewhere, a context of 512 tokens if the model has so many. Compiles one
    program per width. Raises: UsageError if the context leaves no room.
    """
    widths = tuple(widths or ((1, 2, 4, 8, 16) if jax.default_backend() == "cpu" else (1, 8, 16, 32, 64)))
    medians = timed(target, widths, batch, context, repeats)
    return Curve(widths, tuple(median / medians[0] for median in medians))


def timed(
    target: Target, widths: Sequence[int], batch: int = 1, context: int | None = None, repeats: int = 9
) -> list[float]:
    """Seconds of the passes of `measured`, which has the arguments."""
    longest = max(widths)
    context = min(512, target.model.max_positions - longest) if context is None else context
    if context + longest > target.model.max_positions:
        raise UsageError(f"context {context} with {longest} tokens is over the model's {target.model.max_positions}")
    cache = _filled(target, batch, context, context + max(longest, CHUNK))
    seconds: dict[int, list[float]] = {width: [] for width in widths}
    for turn in range(repeats + 1):
        for width in widths:
            tokens = jnp.zeros((batch, width), jnp.int32)
            start = time.perf_counter()
            jax.block_until_ready(_pass(target, cache, jnp.int32(context), tokens))
            if turn:  # the first compiles
                seconds[width].append(time.perf_counter() - start)
    return [statistics.median(seconds[width]) for width in widths]


def of_draft(target: Target, draft: Target) -> float:
    """A pass of the draft model in passes of the target, by a rule of thumb: both read their parameters once."""
    read = [sum(leaf.nbytes for leaf in jax.tree.leaves(of.params)) for of in (draft, target)]
    return read[0] / read[1]


CHUNK = 128
"""Tokens per pass, of those that are not timed."""


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _filled(target: Target, batch: int, context: int, capacity: int):
    """A cache of `context` tokens."""
    model, tokens = target.model, jnp.zeros((batch, CHUNK), jnp.int32)
    path = jnp.broadcast_to(jnp.arange(CHUNK), tokens.shape)

    def body(i, cache):
        _, pending = _pass(target, cache, i * CHUNK, tokens)
        return model.commit(cache, pending, path, jnp.full((batch,), jnp.minimum(context - i * CHUNK, CHUNK)))

    empty = model.opened(target.params, None, jnp.full((batch,), context), capacity)
    return jax.lax.fori_loop(0, -(-context // CHUNK), body, empty)


@jax.jit
def _pass(target: Target, cache, start, tokens):
    batch, width = tokens.shape
    positions = jnp.broadcast_to(start + jnp.arange(width), tokens.shape)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((width, width), bool)), (batch, width, width))
    output, pending = target.model.forward(target.params, tokens, cache, positions=positions, mask=mask)
    return first_largest(output.logits), pending


def planned(plan: Any, side: str = "schedule") -> Curve:
    """From a `specjax.plan`, or its `to_json()`: by the compiler's schedule, or `side="roofline"`.

    Raises: UsageError if it is no plan.
    """
    try:
        reports = (plan if isinstance(plan, dict) else plan.to_json())["widths"]
        known = sorted((int(r["name"].split()[1]), r["seconds"][side]) for r in reports if r["compiles"])  # "verify 8"
        widths, seconds = zip(*known, strict=True)
        if widths[0] != 1 or len(set(widths)) < len(widths) or not all(0 < x < math.inf for x in seconds):
            raise ValueError
        return Curve(widths, tuple(x / seconds[0] for x in seconds))
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError):
        raise UsageError(
            "the costs of a plan are in the JSON of `specjax plan --json`; this is something else"
        ) from None
