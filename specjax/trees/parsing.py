"""Trees from a short text, for command lines and configs."""

from __future__ import annotations

import functools
import itertools
import json
import math
import operator
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from specjax.errors import UsageError
from specjax.files.untrusted import QUOTED, quote, read_json, shorten
from specjax.trees.builders.beam import beam
from specjax.trees.builders.bild import bild
from specjax.trees.builders.chain_with_siblings import LIKELIEST, chain_with_siblings
from specjax.trees.builders.dyspec import dyspec, dyspec_fixed
from specjax.trees.builders.eagle2 import eagle2
from specjax.trees.builders.static import How, independent_paths, static
from specjax.trees.contracts import Builder
from specjax.trees.shape_search.best_shapes import Paths, medusa, sequoia
from specjax.trees.templates import branching_paths

SHAPES = {
    "AxBxC": "branching: A children of the root, B of each of these, ...",
    "sequoia:A,B,...:NxD": "the best N nodes, root included, on D levels (:N alone: on any), if the first, second, ... "
    "child of a node is accepted with chance A, B, ...",
    "medusa:A,B,.../C,D,...:N": "the N likeliest nodes, if the token of rank 1, 2, ... is right with chance A, B, ... "
    "at depth 1, C, D, ... at depth 2, ...",
    "FILE.json": "what `specjax plan --json` printed (its choice by the schedule; FILE.json:roofline is the other), or "
    "rank paths, [[0], [1], [0, 0]]",
}
"""Trees of fixed shape, as rank paths."""

FORMS = {
    **{shape: f"{what}; drawn without replacement" for shape, what in SHAPES.items()},
    "top:SHAPE": "any of these shapes from the likeliest tokens",
    "mixed:SHAPE": "any of these, one sibling sampled beside the likeliest",
    "uniform:SHAPE": "any of these, drawn without replacement, then uniformly where the distribution has no token left",
    "paths:KxL": "K independent chains of L tokens",
    "beam:WxL": "stochastic beam search, W nodes on each of L levels",
    "siblings:N": "a chain of N tokens, each beside the more others the less sure the drafter is",
    "dyspec:WxL": "grown where the drafter is sure, at most W nodes on each of L levels; `,threshold=P,children=C` may "
    "follow",
    "dyspec:N": "the N likeliest draws, one draft pass each; `,children=C` may follow",
    "eagle2:KxLxN": "the N likeliest of L levels of K x K candidates",
    "bild:N": "the likeliest token N times, none where its probability is below 0.6; `,fallback=P` may follow",
}

MOST_NODES = 4096
"""Of the largest tree that a text may ask for, below its root: a tree is laid out before it is drafted."""
DIGITS = 18  # of a number that an error writes out

_WAYS: dict[str, How] = {
    "": "without_replacement", "top": "point_mass", "mixed": "top_and_sampled",
    "uniform": "without_replacement_then_uniform",
}  # fmt: skip


def parse(spec: str) -> Builder:
    """A builder from one of `FORMS`. Raises: UsageError for any other text, or more than `MOST_NODES` nodes."""
    kind, _, rest = spec.partition(":")
    numbers, *more = rest.split(",")
    sizes, named = _sizes(numbers), _named(more, kind)
    makers: dict[tuple[str, int], Callable[..., Builder]] = {
        ("paths", 2): independent_paths,
        ("beam", 2): beam,
        ("siblings", 1): chain_with_siblings,
        ("dyspec", 1): functools.partial(dyspec_fixed, **named),
        ("dyspec", 2): lambda width, depth: dyspec(
            **{"threshold": 1 / (1 + width * depth), "width": width, "depth": depth} | named
        ),
        ("eagle2", 3): lambda top_k, depth, total: eagle2(top_k=top_k, depth=depth, total=total),
        ("bild", 1): functools.partial(bild, **named),
    }
    if (kind, len(sizes)) in makers and len(named) == len(more) and (len(sizes) == 2 or "threshold" not in named):
        _check_size(spec, _nodes_of(kind, sizes))
        return makers[kind, len(sizes)](*sizes)
    way, shape = _split(spec)
    return static(_paths(shape, FORMS), _WAYS[way])


def parse_paths(spec: str) -> Paths:
    """Rank paths from one of `SHAPES`. Raises: UsageError for any other text, or a file that holds no tree."""
    return _paths(spec, SHAPES)


def _paths(spec: str, forms: Iterable[str]) -> Paths:
    """As `parse_paths`; the error of a text that is none names `forms`."""
    kind, _, rest = spec.partition(":")
    if sizes := _sizes(spec):
        _check_size(spec, _nodes_of("", sizes))
        return branching_paths(sizes)
    if spec.startswith("["):
        return _checked(spec, "the tree")
    if ".json" in spec:
        return _from_file(spec)
    chances, _, numbers = rest.rpartition(":")
    sizes = _sizes(numbers)
    try:
        rows = [[float(x) for x in row.split(",")] for row in chances.split("/")]
    except ValueError:
        rows = []
    if kind in ("sequoia", "medusa") and sizes:
        _check_size(spec, sizes[0])
    if kind == "sequoia" and len(rows) == 1 and len(sizes) in (1, 2):
        paths = sequoia(rows[0], *sizes)[1]
        if not paths:
            raise UsageError(f'"{spec}": no tree with so few ranks has {sizes[0]} nodes on {sizes[-1]} levels')
        return paths
    if kind == "medusa" and rows and len(sizes) == 1:
        return medusa(rows, *sizes)[1]
    raise UsageError(f'"{spec}" is not a tree; the forms are {", ".join(forms)}')


def paths_of(spec: str) -> Paths | None:
    """The rank paths of a tree of `FORMS`; None: its shape is not known before it is drafted."""
    kind, _, rest = spec.partition(":")
    if kind in ("beam", "dyspec", "eagle2", "siblings", "bild"):
        return None
    if kind == "paths":
        first, depth = _sizes(rest)
        return branching_paths((first, *(1,) * (depth - 1)))
    return parse_paths(_split(spec)[1])


def inline(spec: str) -> str:
    """The same tree without a file: for whoever keeps results by this text."""
    way, shape = _split(spec)
    return f"{way}:{json.dumps(parse_paths(shape))}".removeprefix(":") if ".json" in shape else spec


def _split(spec: str) -> tuple[str, str]:
    """How siblings are drawn, one of `_WAYS`, and the shape."""
    kind, colon, rest = spec.partition(":")
    return (kind, rest) if colon and kind in _WAYS else ("", spec)


def _sizes(text: str) -> tuple[int, ...]:
    """The numbers of AxBxC, () for any other text."""
    parts = text.split("x")
    # the first digits of a number of thousands, which Python does not convert, are too many nodes already
    sizes = tuple(int(f"0{part.lstrip('0')[:DIGITS]}") for part in parts if part.isdecimal())
    return sizes if len(sizes) == len(parts) and all(sizes) else ()


def _nodes_of(kind: str, sizes: tuple[int, ...]) -> int:
    """Nodes that a builder lays out, the root left out: of eagle2 its candidates, of branching its levels' products."""
    if kind == "eagle2":
        top_k, depth, total = sizes
        candidates = top_k + (depth - 1) * top_k**2
        if total > candidates:
            raise UsageError(f'"eagle2:{top_k}x{depth}x{total}" has {candidates} candidates, fewer than {total}')
        return candidates
    if kind == "siblings":
        return sizes[0] * max(LIKELIEST)
    if kind:
        return math.prod(sizes)
    return sum(itertools.accumulate(sizes, operator.mul))


def _check_size(spec: str, nodes: int) -> None:
    if nodes > MOST_NODES:
        count = str(nodes) if nodes < 10**DIGITS else f"over 10**{DIGITS}"
        raise UsageError(f'"{shorten(spec, QUOTED)}" has {count} nodes; a tree may have at most {MOST_NODES}')


def _named(parts: list[str], kind: str) -> dict[str, Any]:
    """The options of a builder that are no size: those of the parts that name one."""
    known: dict[str, dict[str, Any]] = {"dyspec": {"threshold": float, "children": int}, "bild": {"fallback": float}}
    types = known.get(kind, {})
    pairs = [part.partition("=") for part in parts]
    try:
        return {name: types[name](value) for name, _, value in pairs if name in types}
    except ValueError:
        return {}


def _from_file(spec: str) -> Paths:
    name, _, side = spec.partition(".json")
    name, side = f"{name}.json", side.removeprefix(":")
    try:
        document: Any = read_json(Path(name).expanduser(), "write it with `specjax plan --json`")
    except (OSError, RuntimeError) as error:
        raise UsageError(f"cannot read {name} ({getattr(error, 'strerror', None) or error}); check the path") from None
    if isinstance(document, list) and not side:
        return _checked(json.dumps(document), name)
    try:
        by_side = {str(choice["side"]): choice["paths"] for choice in document["choices"]}
    except (TypeError, KeyError):
        by_side = {}
    if not by_side:
        raise UsageError(f"{name} holds neither rank paths nor a plan; write it with `specjax plan --json`")
    side = side or next(iter(by_side))
    if side not in by_side:
        raise UsageError(f'{name} has no choice by "{side}"; write {name}:{shorten(" or ".join(by_side), QUOTED)}')
    if not by_side[side]:
        raise UsageError(f"{name}: by the {side} nothing should be drafted; leave the tree out")
    return _checked(json.dumps(by_side[side]), name)


def _checked(text: str, where: str) -> Paths:
    """Rank paths of a JSON text. Raises: UsageError unless every node has its parent and its elder sibling."""
    try:
        paths = tuple(tuple(path) for path in json.loads(text))
    except (ValueError, TypeError, RecursionError):
        paths = ()
    if not paths or not all(path and all(type(rank) is int and rank >= 0 for rank in path) for path in paths):
        raise UsageError(f"{where} must be rank paths such as [[0], [1], [0, 0]]")
    known = {(), *paths}
    if len(paths) > MOST_NODES:
        raise UsageError(f"{where} has {len(paths)} paths; give at most {MOST_NODES}")
    if len(known) <= len(paths):
        raise UsageError(f"{where} has a path twice; leave one out")
    for path in paths:
        elder = (*path[:-1], path[-1] - 1) if path[-1] else path
        lacking = {path[:-1], elder} - known
        if lacking:
            raise UsageError(f"{where} has the path {quote(list(path))} without {quote(list(min(lacking)))}; add it")
    return paths
