"""A picture of a decoding run: drafted and accepted tokens per step, and the draft tree of one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from specjax.analysis.explain import Round
from specjax.files import plotting

ACCEPTED, REJECTED, OWN = "#2a9d5c", "#c9ccd1", "#3b6fb6"
MOST_LEAVES = 24
"""Largest number of leaves of a drawn tree."""


def draw(rounds: Sequence[Round], shown: Callable[[int], str], number: int | None = None, title: str = "") -> bytes:
    """Return a PNG with the drafted, accepted and bonus tokens of every step, and the draft tree of one step.

    Args:
      shown: returns the text of a token.
      number: step whose tree is drawn, from 0. None: the step that accepted most drafted tokens.
    """
    number = best(rounds) if number is None else number
    one = rounds[number]
    drawn = _select_nodes(one)
    heights, leaves = _heights(one.parents, drawn)
    figure = plotting.new_figure(9.0, 3.2 + max(2.0, 0.34 * leaves))
    above, below = figure.subplots(2, 1, height_ratios=(2.4, max(2.0, 0.34 * leaves)))
    _bars(above, rounds, number)
    _tree(below, one, shown, drawn, heights, leaves)
    figure.suptitle(title, fontsize=9, parse_math=False)
    return plotting.to_png(figure)


def best(rounds: Sequence[Round]) -> int:
    """Return the step that accepted most drafted tokens. Ties go to the larger draft, then to the earlier step."""
    return max(range(len(rounds)), key=lambda i: (rounds[i].drafted, len(rounds[i].tokens), -i))


def _bars(axes, rounds: Sequence[Round], number: int) -> None:
    x = np.arange(1, len(rounds) + 1)
    drafted = np.array([len(r.tokens) - 1 for r in rounds])
    accepted = np.array([r.drafted for r in rounds])
    bonus = np.array([len(r.added) - r.drafted for r in rounds])
    axes.bar(x, -drafted, color=REJECTED, label="drafted")
    axes.bar(x, accepted, color=ACCEPTED, label="accepted")
    axes.bar(x, bonus, bottom=accepted, color=OWN, label="the target's own")
    axes.plot(x, [r.cost for r in rounds], "k_", markersize=7, label="cost of the pass")
    axes.axhline(0, color="0.2", linewidth=0.8)
    axes.axvspan(number + 0.5, number + 1.5, color="0.93", zorder=0)
    axes.set_xlim(0.4, len(rounds) + 0.6)
    axes.set_xlabel("round")
    axes.set_ylabel("tokens, plain passes")
    axes.yaxis.set_major_formatter(lambda value, _: f"{abs(value):g}")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    plotting.hide_top_right_spines(axes)


def _tree(
    axes, one: Round, shown: Callable[[int], str], drawn: Sequence[int], heights: dict[int, float], leaves: int
) -> None:
    depth = depths(one.parents)
    for node in drawn:
        color = ACCEPTED if one.accepted[node] else "0.45"
        if node:
            parent = int(one.parents[node])
            axes.plot(
                [depth[parent], depth[node]], [heights[parent], heights[node]], color=color,
                linewidth=2.2 if one.accepted[node] else 0.9, zorder=1,
            )  # fmt: skip
        label = shown(int(one.tokens[node])) + (f"\n{one.chances[node]:.2f}" if node else "")
        box = {"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": color}
        axes.text(
            depth[node],
            heights[node],
            label,
            ha="center",
            va="center",
            fontsize=7,
            bbox=box,
            zorder=2,
            parse_math=False,
        )
    for token in one.added[one.drafted :]:
        last = int(np.flatnonzero(one.accepted)[-1])
        x, y = depth[last] + 0.5, heights[last] - 0.5
        axes.plot([depth[last], x], [heights[last], y], color=OWN, linewidth=2.2, zorder=1)
        box = {"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": OWN}
        axes.text(x, y, shown(token), ha="center", va="center", fontsize=7, bbox=box, zorder=2, parse_math=False)
    num_omitted = len(one.tokens) - len(drawn)
    axes.set_xlim(-0.5, max(depth[drawn]) + 1.0)
    axes.set_ylim(-leaves - 0.1, 0.9)
    axes.axis("off")
    caption = f"target probability below each token; {one.why or 'green: accepted'}"
    axes.set_title(caption + (f"; {num_omitted} nodes are not drawn" if num_omitted else ""), fontsize=8, loc="left")


def depths(parents: np.ndarray) -> np.ndarray:
    """Return int[n], the depth of each node. Parents come before their children."""
    depth = np.zeros(len(parents), int)
    for node in range(1, len(parents)):
        depth[node] = depth[parents[node]] + 1
    return depth


def _select_nodes(one: Round) -> list[int]:
    """Return the accepted path and the most probable other nodes with their ancestors, up to MOST_LEAVES leaves."""
    path_probability = np.ones(len(one.tokens))  # under the target
    for node in range(1, len(one.tokens)):
        path_probability[node] = path_probability[one.parents[node]] * one.chances[node]
    selected = set(np.flatnonzero(one.accepted).tolist())
    for node in np.argsort(-path_probability, kind="stable").tolist():
        path, at = set(), node
        while at not in selected:
            path.add(at)
            at = int(one.parents[at])
        if _heights(one.parents, sorted(selected | path))[1] <= MOST_LEAVES:
            selected |= path
    return sorted(selected)


def _heights(parents: np.ndarray, drawn: Sequence[int]) -> tuple[dict[int, float], int]:
    """Return the height of each node, 0 and falling by 1 from leaf to leaf, and the number of leaves."""
    children: dict[int, list[int]] = {}
    for node in drawn:
        if node:
            children.setdefault(int(parents[node]), []).append(node)
    heights: dict[int, float] = {}
    leaves = 0
    todo = [(0, False)]
    while todo:
        node, is_done = todo.pop()
        below = children.get(node, [])
        if is_done:
            heights[node] = sum(heights[child] for child in below) / len(below)
        elif below:
            todo += [(node, True), *((child, False) for child in reversed(below))]
        else:
            heights[node] = -float(leaves)
            leaves += 1
    return heights, leaves
