"""What a pass over several tokens costs, in passes over one: what every decision to speculate rests on.

Three sources: the device itself (`measured`), the compiler (`planned`), or a rule of thumb (`estimated`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.errors import UsageError
from specjax.types import Target


def estimated(widths: Sequence[int], batch: int, dtype: Any = jnp.float32, platform: str | None = None) -> np.ndarray:
    """float32[W]: passes over `widths` tokens of `batch` rows, by a rule of thumb for the platform (default: this one).

    CPU, measured with SmolLM2 on two cores: in float32 a pass over n >= 2 tokens costs 1.15 + 0.064 n passes over one
    (the product with a single vector has a kernel of its own), in bfloat16 0.9 + 0.0525 n. Elsewhere the weights are
    read once for up to some 240 tokens; the rest grows by 0.002 per token (Llama 3 8B on v5e by its compiler).
    """
    platform = platform or jax.default_backend()

    def cost(n: float) -> float:
        if platform != "cpu":
            return max(1 + 0.002 * n, n / 240)
        if jnp.dtype(dtype) == jnp.bfloat16:
            return max(1.0, 0.9 + 0.0525 * n)
        return 1.0 if n == 1 else 1.15 + 0.064 * n

    return np.asarray([cost(batch * width) / cost(batch) for width in widths], np.float32)


def measured(target: Target, widths: Sequence[int], batch: int = 1, context: int = 512, repeats: int = 9) -> np.ndarray:
    """float32[W]: as above, timed on this device: medians of `repeats` passes, taken in turns.

    Compiles one program per width. Raises: UsageError if the context leaves no room.
    """
    longest = max(widths)
    if context + longest > target.model.max_positions:
        raise UsageError(f"context {context} with {longest} tokens is over the model's {target.model.max_positions}")
    cache = target.model.init_cache(batch, context + longest)
    cache = cache._replace(length=jnp.full((batch,), context, jnp.int32))
    seconds: dict[int, list[float]] = {width: [] for width in widths}
    for turn in range(repeats + 1):
        for width in widths:
            tokens = jnp.zeros((batch, width), jnp.int32)
            start = time.perf_counter()
            jax.block_until_ready(_pass(target, cache, tokens))
            if turn:  # the first compiles
                seconds[width].append(time.perf_counter() - start)
    medians = [statistics.median(seconds[width]) for width in widths]
    return np.asarray([median / medians[0] for median in medians], np.float32)


@jax.jit
def _pass(target: Target, cache, tokens):
    batch, width = tokens.shape
    positions = cache.length[:, None] + jnp.arange(width)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((width, width), bool)), (batch, width, width))
    output, pending = target.model.forward(target.params, tokens, cache, positions=positions, mask=mask)
    return jnp.argmax(output.logits, -1), pending


def planned(plan: Any, widths: Sequence[int], side: str = "schedule") -> np.ndarray:
    """float32[W]: as above, from a `specjax.plan`, between its widths by interpolation."""
    known = [(int(r.name.split()[1]), r.seconds[side]) for r in plan.widths if r.compiles]  # named "verify 8"
    nodes, seconds = map(np.asarray, zip(*sorted(known), strict=True))
    costs = np.interp(widths, nodes, seconds)
    return (costs / costs[0]).astype(np.float32)
