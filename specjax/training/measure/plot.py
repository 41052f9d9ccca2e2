"""Plots of training runs. matplotlib is only imported when a plot is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specjax.files import plotting


def plot(history: Sequence[Mapping[str, Any]], title: str = "") -> bytes:
    """Plot the accuracy of drafts by depth, and the tokens per pass on held-out texts. Return a PNG."""
    figure = plotting.new_figure(8.4, 3.4)
    left, right = figure.subplots(1, 2)
    steps = [entry for entry in history if entry["accuracy"]]  # skips the evaluation before the first step
    tokens = [entry["tokens"] for entry in steps]
    for depth in range(len(steps[0]["accuracy"]) if steps else 0):
        smooth = _running_mean([entry["accuracy"][depth] for entry in steps])
        left.plot(tokens, smooth, linewidth=1.3, label=f"draft {depth + 1}")
    left.set_ylabel("accuracy of drafts")
    left.legend(frameon=False, fontsize=8)
    measured = [entry for entry in history if entry["served"]]
    right.plot(
        [entry["tokens"] for entry in measured], [entry["served"]["tokens_per_pass"] for entry in measured],
        marker="o", markersize=4, linewidth=1.3,
    )  # fmt: skip
    right.set_ylabel("tokens per pass (held out)")
    for axes in (left, right):
        axes.set_xlabel("trained positions")
        plotting.hide_top_right_spines(axes)
    figure.suptitle(title, fontsize=9)
    return plotting.to_png(figure)


def _running_mean(values: Sequence[float], decay: float = 0.9) -> list[float]:
    """Return running means, which show the trend without the noise of single steps."""
    smooth: list[float] = []
    for value in values:
        smooth.append(value if not smooth else decay * smooth[-1] + (1 - decay) * value)
    return smooth
