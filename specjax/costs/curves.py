"""Cost curves: the cost of a pass over several tokens, relative to a pass over one token.

Every decision about speculation uses them. A curve has one of three sources: the device (`measured`), the compiler
(`planned`), or a rule of thumb (`estimated`). Functions that decide by cost take a `Curve`, a tuple of numbers, or None
for the rule of thumb, and evaluate it with `evaluate`.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays.indexing import first_largest
from specjax.arrays.modes import jit
from specjax.costs.accelerators import current_chip, equivalent_bytes, pass_cost
from specjax.costs.experts import ExpertShare, active_bytes, expert_share, launched_layers
from specjax.costs.row_bytes import row_bytes
from specjax.errors import UsageError
from specjax.models.experts.blocks import BLOCK_ROWS, BLOCK_ROWS_TPU
from specjax.models.storage import num_bytes
from specjax.numerics.filtered_draws import draw_warped
from specjax.numerics.quantized_array import is_quantized
from specjax.numerics.sampling import row_keys
from specjax.types import Array, PyTree, Sampling, Target

GREEDY = Sampling()


class Curve(NamedTuple):
    """A measured or planned cost curve. It interpolates between its widths and extrapolates with the last slope."""

    widths: tuple[int, ...]  # tokens per row, rising from 1
    costs: tuple[float, ...]  # the first is 1

    def __call__(self, widths: Sequence[int]) -> np.ndarray:
        """Return the costs float32[W] of `widths`, relative to the first of them."""
        x, y = np.asarray(self.widths, float), np.asarray(self.costs, float)
        wanted_widths = np.asarray(widths, float)
        slope = (y[-1] - y[-2]) / (x[-1] - x[-2]) if len(x) > 1 else 0.0
        costs = np.interp(wanted_widths, x, y) + np.maximum(wanted_widths - x[-1], 0) * max(slope, 0.0)
        return (costs / costs[0]).astype(np.float32)


class Shares(NamedTuple):
    """Bytes that a pass moves besides the weights, as shares of the bytes of the weights."""

    logits: float = 0.0  # of a token
    states: float = 0.0  # of the recurrent layers of a row
    updates: float = 0.0  # of the recurrent layers, of a token
    experts: ExpertShare = ExpertShare()  # of more tokens than one


NO_SHARES = Shares()
Costs = Curve | tuple[float, ...] | None


class RoundedWeights(NamedTuple):
    """Weights in few bits that products expand to floats. Costs accept it in place of a dtype."""

    dtype: str  # of the products
    bytes: float  # per weight, scales included


WeightDtype = str | RoundedWeights


def check(costs: Costs, count: int, item: str) -> None:
    """Check that `costs` are a curve, None, or one positive number per item. Raises: UsageError."""
    if costs is None or isinstance(costs, Curve):
        return
    if len(costs) != count or not all(0 < cost < float("inf") for cost in costs):
        raise UsageError(f"costs must be one positive number per {item} ({count}), not {list(costs)}")


def evaluate(
    costs: Costs, widths: Sequence[int], batch: int, dtype: Any = jnp.float32, platform: str | None = None,
    shares: Shares = NO_SHARES,
) -> np.ndarray:  # fmt: skip
    """Return the relative costs float32[W] of passes over `widths` tokens in each of `batch` rows; the first is 1."""
    if isinstance(costs, Curve):
        return costs(widths)
    if not costs:
        return estimated(widths, batch, dtype, platform, shares)
    return np.asarray(costs, np.float32) / np.float32(costs[0])


def shares_of(target: Target, platform: str | None = None) -> Shares:
    """Return the bytes of one row of float32 logits and of recurrent states, as shares of the bytes of the weights.

    On a GPU they are shares of the bytes that it reads in the time of a pass over one token
    (`accelerators.equivalent_bytes`). Without parameters all shares are 0.

    Args:
      platform: as in `estimated`.
    """
    size = active_bytes(target)
    if not size:
        return NO_SHARES
    read = equivalent_bytes(platform or current_chip(), size, launched_layers(target))
    recurrent, experts = row_bytes(target), expert_share(target, platform)
    return Shares(4 * target.model.vocab_size / read, recurrent.states / read, recurrent.updates / read, experts)


LOGITS_PASSES = 4
"""Reads of the parameters in the time of as many bytes of logits: they are written, read and compared several times."""


def estimated(
    widths: Sequence[int], batch: int, dtype: Any = jnp.float32, platform: str | None = None,
    shares: Shares = NO_SHARES,
) -> np.ndarray:  # fmt: skip
    """Estimate the costs float32[W] of passes over `widths` tokens of `batch` rows by a rule of thumb for the platform.

    The numbers for CPU were measured with SmolLM2 on two cores. In float32 a pass over n >= 2 tokens costs 1 + n / 16
    passes over one. A product with a single vector has a kernel of its own. Measured costs are 1.18 for 2 tokens, 1.22
    for 4, 1.45 for 8, 1.95 for 16 and 3.16 for 32. In bfloat16 a pass costs 1 + 0.035 (n - 1). This lies between cores
    with AVX-512 (1.12 for 8, 1.22 for 16, 1.8 for 32) and cores with AMX (1.33, 1.7, 2.6). With int8 weights and
    activations (`dtype_of`), products of one token are padded to 8 rows. Measured costs are 1.12 to 1.15 for 8 tokens,
    1.39 to 1.54 for 16 and 2.2 to 2.4 for 32 (two cores with AMX, float32 and bfloat16). Accelerators read the
    weights once for a few hundred tokens, and `accelerators.pass_cost` has the costs by chip and dtype. Each token
    adds LOGITS_PASSES times the share of its logits in the bytes of the parameters. For Gemma 3 270M on v5e, 16 rows of
    4 and 64 rows of 16 tokens are estimated at 1.41 and 6.7 passes; the schedule has 1.43 and 3.2. A pass of a model
    with recurrent layers also reads and writes a state per row, and writes updates per token that its commit reads.
    More tokens choose more experts of a mixture, which the pass then reads (`experts`). On a GPU wide passes read all
    of them.

    Args:
      dtype: of the weights, or the result of `dtype_of`.
      platform: a JAX backend, or a chip such as "h200" or "v5e"; the default is the current device.
      shares: of the bytes besides the weights (`shares_of`).
    """
    costs = np.asarray([_pass_parts(width, batch, dtype, platform, shares) for width in widths])
    return (np.sum(costs, 1) / np.sum(costs[0])).astype(np.float32)


def added_by_experts(
    costs: Costs, widths: Sequence[int], batch: int, dtype: Any = jnp.float32, platform: str | None = None,
    shares: Shares = NO_SHARES,
) -> np.ndarray:  # fmt: skip
    """Return the parts float32[W] of the costs of `evaluate` that experts beyond those of one row add.

    They are 0 in given costs, whose parts are unknown.
    """
    if costs:
        return np.zeros(len(widths), np.float32)
    parts = np.asarray([_pass_parts(width, batch, dtype, platform, shares) for width in widths])
    return (parts[:, 1] / np.sum(parts[0])).astype(np.float32)


def _pass_parts(
    width: int, batch: int, dtype: Any, platform: str | None, shares: Shares
) -> tuple[float, float]:  # fmt: skip
    """Return the cost of a pass by the rule of `estimated`: that of everything else, and that of further experts."""
    platform = platform or current_chip()
    products = jnp.dtype(dtype.dtype if isinstance(dtype, RoundedWeights) else dtype)
    size = dtype.bytes if isinstance(dtype, RoundedWeights) else None

    def cost(n: float) -> float:
        if platform != "cpu":
            return pass_cost(platform, n, products, size)
        if products == jnp.int8:
            return 1 + 0.017 * (min(n, 8) - 1) + 0.045 * max(n - 8, 0)
        if products == jnp.bfloat16:
            return 1 + 0.035 * (n - 1)
        return 1.0 if n == 1 else 1 + n / 16

    rows = batch * width
    states = 2 * batch * (shares.states + width * shares.updates)
    logits = 0.0 if platform == "cpu" else LOGITS_PASSES * shares.logits * rows
    # Each further expert is multiplied by all rows, or by blocks of the rows that chose it.
    turn = cost(min(rows, BLOCK_ROWS if platform == "cpu" else BLOCK_ROWS_TPU))
    return cost(rows) + logits + states, turn * shares.experts.added(rows)


def dtype_of(target: Target) -> WeightDtype:
    """Return the dtype name of the target's first floating-point parameter, or float32 if it has none.

    It is "int8" for a target with int8 weights whose activations are rounded to int8, and `RoundedWeights` for other
    weights in few bits.
    """
    leaves = jax.tree.leaves(target.pass_params, is_leaf=is_quantized)
    if any(is_quantized(leaf) and leaf.inputs == "int8" for leaf in leaves):
        return "int8"
    dtypes = (leaf.dtype if is_quantized(leaf) else jnp.result_type(leaf) for leaf in leaves)
    name = next((dtype.name for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)), "float32")
    if not any(map(is_quantized, leaves)):
        return name
    return RoundedWeights(name, num_bytes(target.pass_params) / sum(leaf.size for leaf in leaves))


def measured(
    target: Target, widths: Sequence[int] | None = None, batch: int = 1, context: int | None = None, repeats: int = 9,
    sampling: Sampling = GREEDY,
) -> Curve:  # fmt: skip
    """Measure a curve: time passes over `widths` tokens of `batch` rows on this device.

    Each pass reads random tokens, and includes the choice of one token per row with `sampling`. Random tokens choose
    more distinct experts of a mixture than the neighbours in a text, and equal ones would choose the same experts.

    The curve uses the medians of `repeats` interleaved passes. One program is compiled per width. The default widths go
    up to 16 on CPU and to 64 elsewhere. The default context is 512 tokens, or as many as the model allows.

    Raises: UsageError if the context leaves no room for the passes.
    """
    widths = tuple(widths or ((1, 2, 4, 8, 16) if jax.default_backend() == "cpu" else (1, 8, 16, 32, 64)))
    medians = timed(target, widths, batch, context, repeats, sampling)
    return Curve(widths, tuple(median / medians[0] for median in medians))


def timed(
    target: Target, widths: Sequence[int], batch: int = 1, context: int | None = None, repeats: int = 9,
    sampling: Sampling = GREEDY,
) -> list[float]:  # fmt: skip
    """Return the median seconds of the passes that `measured` times. The arguments are the same.

    Passes that take less than SHORT seconds run CHAINED times in a loop on the device, as they do in a decode. Alone, a
    pass of 0.17 ms took 0.46 ms on two cores, because the time to start a program was added. A pass over 8 tokens then
    seemed to cost 1.7 passes instead of 2.5.
    """
    if target.model.capabilities.requires_inputs:
        reason = f"passes of {target.model.name} read inputs beside tokens and cannot be timed"
        raise UsageError(f"{reason}; choose other costs than measured ones")
    max_width = max(widths)
    context = min(512, target.model.max_positions - max_width) if context is None else context
    if context + max_width > target.model.max_positions:
        raise UsageError(f"context {context} plus {max_width} tokens exceeds the model's {target.model.max_positions}")
    rng, vocab_size = np.random.default_rng(0), target.model.vocab_size
    text, drafts = (rng.integers(0, vocab_size, (batch, count), np.int32) for count in (CHUNK, max_width))
    cache = _filled(target, jnp.asarray(text), context, context + max(max_width, CHUNK))

    def seconds_of(width: int, count: int) -> float:
        tokens = jnp.asarray(drafts[:, :width])
        start = time.perf_counter()
        jax.block_until_ready(_timed_pass(target, cache, jnp.int32(context), tokens, sampling, count))
        return (time.perf_counter() - start) / count

    seconds: dict[int, list[float]] = {width: [] for width in widths}
    for width in widths:
        seconds_of(width, 1)  # compiles
    is_short = min(seconds_of(widths[0], 1) for _ in range(2)) < SHORT
    count = CHAINED if is_short else 1
    for turn in range(repeats + 1):
        for width in widths:
            one = seconds_of(width, count)
            if turn:  # the first turn may compile
                seconds[width].append(one)
    return [statistics.median(seconds[width]) for width in widths]


def of_draft(target: Target, draft: Target, platform: str | None = None) -> float:
    """Estimate the cost of a draft model's pass relative to a target pass.

    It is the ratio of the bytes that the passes of one row move, or on a GPU of those that it reads in their time.

    Args:
      platform: as in `estimated`.
    """

    def size(model: Target) -> float:
        weights = equivalent_bytes(platform or current_chip(), active_bytes(model), launched_layers(model))
        return weights + row_bytes(model).moved()

    return size(draft) / size(target)


CHUNK = 128
"""Tokens per pass in the untimed prefill."""
SHORT, CHAINED = 5e-3, 16


@jit(static_argnums=(2, 3))
def _filled(target: Target, tokens: Array, context: int, capacity: int):
    """Return a cache that holds `context` tokens, the tokens int32[B, CHUNK] again and again."""
    model, batch = target.model, len(tokens)
    path = jnp.broadcast_to(jnp.arange(CHUNK), tokens.shape)

    def body(i, cache):
        _, pending = _pass(target, cache, i * CHUNK, tokens)
        return model.commit(cache, pending, path, jnp.full((batch,), jnp.minimum(context - i * CHUNK, CHUNK)))

    empty = model.start_cache(target.params, None, jnp.full((batch,), context), capacity)
    return jax.lax.fori_loop(0, -(-context // CHUNK), body, empty)


@jit(static_argnums=5)
def _timed_pass(
    target: Target, cache: PyTree, start: Array, tokens: Array, sampling: Sampling, count: int = 1
) -> PyTree:
    """Run `count` equal passes, and choose a token after each node, or sample one token per row."""

    def run(tokens: Array) -> tuple[Array, PyTree]:
        logits, pending = _pass(target, cache, start, tokens)
        if sampling.temperature is None:
            return first_largest(logits), pending
        return draw_warped(row_keys(0, len(tokens)), logits[:, 0], sampling), pending

    if count == 1:
        return run(tokens)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(run, tokens))
    # Each pass reads the result of the previous one, so that none is left out. Tokens are never negative.
    return jax.lax.fori_loop(0, count, lambda _, carry: run(tokens + jnp.minimum(jnp.min(carry[0]), 0)), zeros)


def _pass(target: Target, cache: PyTree, start: Array, tokens: Array) -> tuple[Array, PyTree]:
    batch, width = tokens.shape
    positions = jnp.broadcast_to(start + jnp.arange(width), tokens.shape)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((width, width), bool)), (batch, width, width))
    output, pending = target.model.forward(target.params, tokens, cache, positions=positions, mask=mask)
    return output.logits, pending


def planned(plan: Any, side: str = "schedule") -> Curve:
    """Read a curve from a result of `specjax.plan`, or from its `to_json()`.

    Args: side: "schedule" for the compiler's cycles, or "roofline" for the lower bound.

    Raises: UsageError if it is not a plan.
    """
    try:
        reports = (plan if isinstance(plan, dict) else plan.to_json())["widths"]
        points = sorted((int(r["name"].split()[1]), r["seconds"][side]) for r in reports if r["compiles"])  # "verify 8"
        widths, seconds = zip(*points, strict=True)
        if widths[0] != 1 or len(set(widths)) < len(widths) or not all(0 < x < math.inf for x in seconds):
            raise ValueError
        return Curve(widths, tuple(x / seconds[0] for x in seconds))
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError):
        raise UsageError(
            "the costs are not a plan with a pass over one token; give the JSON of `specjax plan --json`"
        ) from None
