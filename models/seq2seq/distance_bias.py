"""Biases of attention by the distance of two tokens, in buckets that grow with it (T5, arXiv 1910.10683).

Half of the buckets of a direction are single distances. The others divide the distances up to `furthest` into equal
parts of their logarithm, and the last one takes all that are further.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax.types import Array


class DistanceBuckets(NamedTuple):
    """Number of buckets of a table, and the distance from which on all keys share the last one."""

    num_buckets: int = 32
    furthest: int = 128

    def of_earlier(self, distance: np.ndarray, count: int | None = None) -> np.ndarray:
        """Return the bucket of keys that lie `distance` int[...] tokens before the query, at least 0."""
        count = self.num_buckets if count is None else count
        exact = count // 2
        # float32, as in the published model: at a bound between two buckets, float64 could choose the other one.
        ratio = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact)) / np.float32(
            np.log(self.furthest / exact)
        )
        wide = exact + (ratio * np.float32(count - exact)).astype(np.int32)
        return np.where(distance < exact, distance, np.minimum(wide, count - 1))

    def of_both(self, offset: np.ndarray) -> np.ndarray:
        """Return the bucket of keys at `offset` int[...] from the query; later keys have the upper half."""
        half = self.num_buckets // 2
        return self.of_earlier(np.abs(offset), half) + np.where(offset > 0, half, 0)


STANDARD = DistanceBuckets()


def by_distance(table: Array, buckets: DistanceBuckets) -> Array:
    """Return the bias float[H, D] of each distance of earlier keys, from a table [buckets, H]."""
    return table[buckets.of_earlier(np.arange(buckets.furthest + 1))].T


def between(table: Array, buckets: DistanceBuckets, length: int) -> Array:
    """Return the bias float[H, S, S] of all pairs of `length` tokens that see both directions."""
    index = np.arange(length)
    return jnp.moveaxis(table[buckets.of_both(index[None] - index[:, None])], -1, 0)
