"""Measures of parallel decoding with diffusion language models: AR-ness, and accuracy against parallelism."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence


def local_ar_ness(order: Sequence[int], k: int = 1) -> float:
    """Return the share of columns that were decided right after the k columns before them, one after another.

    The first k columns do not count. 1.0 means left to right. Columns that one pass decides are not one after another.

    Args:
      order: the pass that decided each column, such as a row of `Denoised.decided_at`.

    Returns: a share, or nan if there are at most k columns.
    Source: Gong et al.: DiffuCoder (2025), arXiv 2506.20639.
    """
    by_time = sorted(range(len(order)), key=lambda column: (order[column], column))
    runs = [
        all(b == a + 1 and order[b] > order[a] for a, b in itertools.pairwise(part))
        for part in (by_time[t - k : t + 1] for t in range(k, len(by_time)))
    ]
    return sum(runs) / len(runs) if runs else math.nan


def global_ar_ness(order: Sequence[int], k: int = 1) -> float:
    """Return the share of columns that were among the k leftmost masked columns when their pass began.

    Args:
      order: the pass that decided each column, such as a row of `Denoised.decided_at`.

    Returns: a share, or nan without columns.
    Source: Gong et al.: DiffuCoder (2025), arXiv 2506.20639.
    """
    leading = [sum(order[previous] >= when for previous in range(column)) < k for column, when in enumerate(order)]
    return sum(leading) / len(leading) if leading else math.nan


def aup(points: Sequence[tuple[float, float]], *, alpha: float = 3.0, loss: float = 5.0) -> float:
    """Return the area under accuracy y over tokens per pass rho (AUP; d3LLM, 2026):

        rho_1 y_1 + sum of (rho_i - rho_{i-1}) (y_i W_i + y_{i-1} W_{i-1}) / 2,  W = min(exp(-alpha (1 - y / y_max)), 1)

    Args:
      points: (rho, y), y in percent.
      loss: points whose y is more than `loss` below that of the smallest rho are left out.
    """
    points = sorted(points)
    eligible = [(rho, y) for rho, y in points if y >= points[0][1] - loss]
    y_max = max(y for _, y in eligible)
    weighted = [(rho, y * min(math.exp(-alpha * (1 - y / y_max)), 1.0) if y_max else 0.0) for rho, y in eligible]
    area = eligible[0][0] * eligible[0][1]
    for (rho_before, y_before), (rho, y) in itertools.pairwise(weighted):
        area += (rho - rho_before) * (y + y_before) / 2
    return area


def wilson_interval(right: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """Return Wilson's confidence interval of a share. The default z gives 95 %."""
    share, factor = right / total, 1 + z * z / total
    middle = (share + z * z / (2 * total)) / factor
    half = z / factor * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return max(middle - half, 0.0), min(middle + half, 1.0)
