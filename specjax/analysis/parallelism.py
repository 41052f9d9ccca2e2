"""Measures of parallel decoding and its cost, from papers on diffusion language models."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np


def local_ar_ness(order: Sequence[int], k: int = 1) -> float:
    """Share of the columns, but the first k, that were each decided right after the k columns before them were, one
    after another (Gong et al.: DiffuCoder, 2025, arXiv 2506.20639). 1: from left to right; nan: too few columns.

    order: the pass that decided each column. What one pass decides is not one after another.
    """
    steps = sorted(range(len(order)), key=lambda column: (order[column], column))
    runs = [
        all(b == a + 1 and order[b] > order[a] for a, b in itertools.pairwise(part))
        for part in (steps[t - k : t + 1] for t in range(k, len(steps)))
    ]
    return sum(runs) / len(runs) if runs else math.nan


def global_ar_ness(order: Sequence[int], k: int = 1) -> float:
    """Share of the columns that were among the k leftmost open ones when the pass began that decided them."""
    leading = [sum(order[previous] >= when for previous in range(column)) < k for column, when in enumerate(order)]
    return sum(leading) / len(leading) if leading else math.nan


def aup(points: Sequence[tuple[float, float]], *, alpha: float = 3.0, loss: float = 5.0) -> float:
    """Accuracy under parallelism (d3LLM, 2026): the area under accuracy y in percent over tokens per pass rho,

        rho_1 y_1 + sum of (rho_i - rho_{i-1}) (y_i W_i + y_{i-1} W_{i-1}) / 2,  W = min(exp(-alpha (1 - y / y_max)), 1)

    points: (rho, y); those whose y is more than `loss` below that of the smallest rho do not count.
    """
    points = sorted(points)
    retained = [(rho, y) for rho, y in points if y >= points[0][1] - loss]
    maximum = max(y for _, y in retained)
    weighed = [(rho, y * min(math.exp(-alpha * (1 - y / maximum)), 1.0) if maximum else 0.0) for rho, y in retained]
    area = retained[0][0] * retained[0][1]
    for (previous, last), (rho, y) in itertools.pairwise(weighed):
        area += (rho - previous) * (y + last) / 2
    return area


def wilson(right: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval of a share, 95 % by default."""
    share, factor = right / total, 1 + z * z / total
    middle = (share + z * z / (2 * total)) / factor
    half = z / factor * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return max(middle - half, 0.0), min(middle + half, 1.0)


def order_of(decided_at: np.ndarray, length: int) -> list[int]:
    """Return the order of a row of `Denoised.decided_at`."""
    return decided_at[:length].tolist()
