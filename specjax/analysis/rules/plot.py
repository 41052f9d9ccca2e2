"""A plot of compared acceptance rules."""

from __future__ import annotations

from specjax.analysis.rules.acceptance import Comparison
from specjax.files import plotting

LINES = {"with_replacement": "--", "without_replacement": ":"}


def plot(comparison: Comparison, title: str = "") -> bytes:
    """Return a PNG of the mean acceptance of each rule by the number of drafts, with the two optimal bounds.

    It has no error bars: all rules use the same rows, so differences are much more certain than levels.
    """
    figure = plotting.new_figure(7.0, 4.6)
    axes = figure.subplots()
    for draws, bound in comparison.bounds.items():
        name = f"best possible, {draws.replace('_', ' ')}"
        axes.plot(list(bound), list(bound.values()), LINES[draws], color="0.25", linewidth=1.3, label=name)
    for rule in dict.fromkeys(entry.rule for entry in comparison.entries):
        of_rule = [entry for entry in comparison.entries if entry.rule == rule]
        sizes, values = [entry.n for entry in of_rule], [entry.acceptance for entry in of_rule]
        axes.plot(sizes, values, marker="o", markersize=4, linewidth=1.3, label=rule)
    axes.set_xticks(sorted({n for bound in comparison.bounds.values() for n in bound}))
    axes.set_xlabel("drafts per node")
    axes.set_ylabel("acceptance of a node")
    figure.suptitle(title, fontsize=9)
    plotting.hide_top_right_spines(axes)
    figure.legend(loc="outside right center", frameon=False, fontsize=8)
    return plotting.to_png(figure)
