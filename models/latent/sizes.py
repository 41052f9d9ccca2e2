"""Sizes of multi-head latent attention, a part of a config."""

from __future__ import annotations

import math
from typing import NamedTuple

from specjax.models.rotary import RopeScaling


class LatentSizes(NamedTuple):
    """Sizes of multi-head latent attention. The cache has `rank + rotary_dim` numbers per token."""

    rank: int  # numbers of the vector from which all heads have their keys and values
    rotary_dim: int  # rotated numbers of a query, and of the key that all heads share
    plain_dim: int  # other numbers of a query
    value_dim: int
    query_rank: int | None = None  # queries are projections of a vector of this size; None: of the stream
    mscale: float = 0.0  # `mscale_all_dim` of YaRN: longer texts have sharper scores
    interleaved: bool = True  # files have the numbers that are rotated together as neighbours

    @property
    def cached(self) -> int:
        """Return the number of cached numbers per token."""
        return self.rank + self.rotary_dim

    def scale(self, scaling: RopeScaling | None) -> float:
        """Return the factor on the scores."""
        is_longer = scaling is not None and scaling.factor > 1 and self.mscale
        sharper = 0.1 * self.mscale * math.log(scaling.factor) + 1.0 if scaling and is_longer else 1.0
        return (self.plain_dim + self.rotary_dim) ** -0.5 * sharper**2
