"""The picture of a run. matplotlib is imported when it is drawn."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from specjax.errors import needing


def plot(history: Sequence[Mapping[str, Any]], title: str = "") -> bytes:
    """A PNG: how often drafts are right by depth, and tokens per pass on texts held out, by tokens trained on."""
    with needing("plots", "drawing needs"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    tokens = [entry["tokens"] for entry in history]
    for depth in range(len(history[0]["accuracy"])):
        smooth = _smoothed([entry["accuracy"][depth] for entry in history])
        left.plot(tokens, smooth, linewidth=1.3, label=f"draft {depth + 1}")
    left.set_ylabel("likeliest draft is the text's token")
    left.legend(frameon=False, fontsize=8)
    measured = [entry for entry in history if entry["served"]]
    right.plot(
        [entry["tokens"] for entry in measured], [entry["served"]["tokens_per_pass"] for entry in measured],
        marker="o", markersize=4, linewidth=1.3,
    )  # fmt: skip
    right.set_ylabel("tokens per pass, held out")
    for axes in (left, right):
        axes.set_xlabel("places trained on")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.suptitle(title, fontsize=9)
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer)
    return buffer.getvalue()


def _smoothed(values: Sequence[float], keep: float = 0.9) -> list[float]:
    """Running means, so that single steps do not hide the way."""
    smooth: list[float] = []
    for value in values:
        smooth.append(value if not smooth else keep * smooth[-1] + (1 - keep) * value)
    return smooth
