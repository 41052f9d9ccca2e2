"""The picture of a run. matplotlib is imported when it is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specjax.files import plotting


def plot(history: Sequence[Mapping[str, Any]], title: str = "") -> bytes:
    """A PNG: how often drafts are right by depth, and tokens per pass on texts held out, by tokens trained on."""
    figure = plotting.new_figure(8.4, 3.4)
    left, right = figure.subplots(1, 2)
    steps = [entry for entry in history if entry["accuracy"]]  # but what was measured before the first
    tokens = [entry["tokens"] for entry in steps]
    for depth in range(len(steps[0]["accuracy"]) if steps else 0):
        smooth = _smoothed([entry["accuracy"][depth] for entry in steps])
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
        plotting.hide_top_right_spines(axes)
    figure.suptitle(title, fontsize=9)
    return plotting.to_png(figure)


def _smoothed(values: Sequence[float], keep: float = 0.9) -> list[float]:
    """Running means, so that single steps do not hide the way."""
    smooth: list[float] = []
    for value in values:
        smooth.append(value if not smooth else keep * smooth[-1] + (1 - keep) * value)
    return smooth
