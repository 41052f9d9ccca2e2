"""Parsing of trees from short texts, for command lines and configurations."""

from __future__ import annotations

import functools
import itertools
import json
import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

from specjax.errors import UsageError
from specjax.files.homes import in_home
from specjax.files.untrusted import QUOTED, quote, read_json, shorten
from specjax.numerics.validation import MAX_NODES
from specjax.trees.builders.beam import beam
from specjax.trees.builders.bild import bild
from specjax.trees.builders.chain_with_siblings import LIKELIEST, chain_with_siblings
from specjax.trees.builders.ddtree import ddtree, ddtree_auto, drawn_ddtree
from specjax.trees.builders.dyspec import dyspec, dyspec_fixed
from specjax.trees.builders.eagle2 import eagle2
from specjax.trees.builders.static import How, independent_paths, static
from specjax.trees.builders.taps import CHILDREN, path_ddtree
from specjax.trees.contracts import Builder
from specjax.trees.shape_search.best_shapes import Paths, medusa, sequoia
from specjax.trees.templates import branching_paths

SHAPES = {
    "AxBxC": "branching: A children of the root, B children of each of these, ...",
    "sequoia:A,B,...:NxD": "the best N nodes, root included, on D levels (:N alone: any depth), if the first, second, "
    "... child of a node is accepted with probability A, B, ...",
    "medusa:A,B,.../C,D,...:N": "the N likeliest nodes, if the token of rank 1, 2, ... is right with probability A, "
    "B, ... at depth 1, C, D, ... at depth 2, ...",
    "FILE.json": "the output of `specjax plan --json` (its choice by the schedule; FILE.json:roofline selects the "
    "choice by the roofline), or rank paths such as [[0], [1], [0, 0]]",
}
"""Forms of static trees, which become rank paths."""

FORMS = {
    **{shape: f"{text}; drawn without replacement" for shape, text in SHAPES.items()},
    "top:SHAPE": "any of these shapes, with the likeliest tokens",
    "mixed:SHAPE": "any of these shapes, with the likeliest tokens and one sampled sibling",
    "uniform:SHAPE": "any of these shapes, drawn without replacement, then uniformly once no likely token remains",
    "paths:KxL": "K independent chains of L tokens",
    "beam:WxL": "stochastic beam search, W nodes on each of L levels",
    "siblings:N": "a chain of N tokens, each with more siblings where the drafter is less confident",
    "dyspec:WxL": "a tree that grows where the drafter is confident, at most W nodes on each of L levels; optionally "
    "followed by `,threshold=P,children=C`",
    "dyspec:N": "the N likeliest draws, one draft pass each; optionally followed by `,children=C`",
    "eagle2:KxLxN": "the N likeliest nodes among L levels of K x K candidates",
    "ddtree:N": "the N best prefixes of the distributions of a dflash, jetspec, medusa or p_eagle head (:NxL: on L "
    "levels); optionally followed by `,children=K,gap=G`, or by `,values=path` for values fitted to past drafts",
    "ddtree:auto": "the same in the size with the most tokens per second, by the costs of passes and past acceptance",
    "drawn:N": "N nodes in the best shape for the same heads, drawn without replacement, for rules that read q (:NxL: "
    "on L levels)",
    "bild:N": "a chain of up to N likeliest tokens that ends where the probability is below 0.6; optionally followed "
    "by `,fallback=P`",
}

DIGITS = 18  # digits of the largest number that an error message prints

_WAYS: dict[str, How] = {
    "": "without_replacement", "top": "point_mass", "mixed": "top_and_sampled",
    "uniform": "without_replacement_then_uniform",
}  # fmt: skip


def parse(spec: str) -> Builder:
    """Return a builder for one of `FORMS`. Raises: UsageError for any other text, or more than `MAX_NODES` nodes."""
    if spec == "ddtree:auto":
        return ddtree_auto()
    kind, _, arguments = spec.partition(":")
    numbers, *options = arguments.split(",")
    sizes, named = _sizes(numbers), _parse_options(options, kind)
    makers: dict[tuple[str, int], Callable[..., Builder]] = {
        ("paths", 2): independent_paths,
        ("beam", 2): beam,
        ("siblings", 1): chain_with_siblings,
        ("dyspec", 1): functools.partial(dyspec_fixed, **named),
        ("dyspec", 2): lambda width, depth: dyspec(
            **{"threshold": 1 / (1 + width * depth), "width": width, "depth": depth} | named
        ),
        ("eagle2", 3): lambda top_k, depth, total: eagle2(top_k=top_k, depth=depth, total=total),
        ("ddtree", 1): functools.partial(_ddtree, **named),
        ("ddtree", 2): functools.partial(_ddtree, **named),
        ("drawn", 1): drawn_ddtree,
        ("drawn", 2): drawn_ddtree,
        ("bild", 1): functools.partial(bild, **named),
    }
    if (kind, len(sizes)) in makers and len(named) == len(options) and (len(sizes) == 2 or "threshold" not in named):
        _check_size(spec, _count_nodes(kind, sizes))
        return makers[kind, len(sizes)](*sizes)
    way, shape = _split(spec)
    return static(_paths(shape, FORMS), _WAYS[way])


def parse_paths(spec: str) -> Paths:
    """Return rank paths for one of `SHAPES`. Raises: UsageError for any other text, or a file without a tree."""
    return _paths(spec, SHAPES)


def _paths(spec: str, forms: Iterable[str]) -> Paths:
    """Return rank paths. The error message for an invalid text lists `forms`."""
    kind, _, arguments = spec.partition(":")
    if sizes := _sizes(spec):
        _check_size(spec, _count_nodes("", sizes))
        return branching_paths(sizes)
    if spec.startswith("["):
        return _parse_json(spec, "the tree")
    if ".json" in spec:
        return _from_file(spec)
    chances, _, numbers = arguments.rpartition(":")
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


def static_paths(spec: str) -> Paths | None:
    """Return the rank paths of a tree of `FORMS`, or None if its shape depends on the drafted distributions."""
    kind, _, arguments = spec.partition(":")
    if kind in ("beam", "dyspec", "ddtree", "drawn", "eagle2", "siblings", "bild"):
        return None
    if kind == "paths":
        first, depth = _sizes(arguments)
        return branching_paths((first, *(1,) * (depth - 1)))
    return parse_paths(_split(spec)[1])


def inline(spec: str) -> str:
    """Return an equivalent text that does not refer to a file, for callers that store results by this text."""
    way, shape = _split(spec)
    return f"{way}:{json.dumps(parse_paths(shape))}".removeprefix(":") if ".json" in shape else spec


def _split(spec: str) -> tuple[str, str]:
    """Split a text into the way to draw siblings, one of `_WAYS`, and the shape."""
    kind, colon, shape = spec.partition(":")
    return (kind, shape) if colon and kind in _WAYS else ("", spec)


def _sizes(text: str) -> tuple[int, ...]:
    """Return the numbers of AxBxC, or () for any other text."""
    parts = text.split("x")
    # Python does not convert numbers of thousands of digits. Their first digits are enough to exceed the limit.
    sizes = tuple(int(f"0{part.lstrip('0')[:DIGITS]}") for part in parts if part.isdecimal())
    return sizes if len(sizes) == len(parts) and all(sizes) else ()


def _count_nodes(kind: str, sizes: tuple[int, ...]) -> int:
    """Return the number of nodes that a builder allocates, root excluded.

    For eagle2 it is the number of candidates, and for branching trees that of the nodes of all levels.
    """
    if kind == "eagle2":
        top_k, depth, total = sizes
        candidates = top_k + (depth - 1) * top_k**2
        if total > candidates:
            raise UsageError(
                f'"eagle2:{top_k}x{depth}x{total}" has only {candidates} candidates for {total} nodes; use fewer nodes'
            )
        return candidates
    if kind == "siblings":
        return sizes[0] * max(LIKELIEST)
    if kind:
        return math.prod(sizes)
    return sum(itertools.accumulate(sizes, operator.mul))


def _check_size(spec: str, nodes: int) -> None:
    if nodes > MAX_NODES:
        count = str(nodes) if nodes < 10**DIGITS else f"over 10**{DIGITS}"
        raise UsageError(f'"{shorten(spec, QUOTED)}" has {count} nodes; a tree may have at most {MAX_NODES}')


def _parse_options(parts: list[str], kind: str) -> dict[str, Any]:
    """Return the options NAME=VALUE of a builder. Parts with an unknown name are omitted."""
    option_types: dict[str, dict[str, Any]] = {
        "dyspec": {"threshold": float, "children": int},
        "bild": {"fallback": float},
        "ddtree": {"children": int, "gap": float, "values": str},
    }
    types = option_types.get(kind, {})
    pairs = [part.partition("=") for part in parts]
    try:
        return {name: types[name](value) for name, _, value in pairs if name in types}
    except ValueError:
        return {}


def _ddtree(total: int, depth: int | None = None, *, values: str = "marginal", **options: Any) -> Builder:
    """Return the builder of `ddtree:...`. Raises: UsageError for unknown values, or a gap with values by path."""
    if values == "marginal":
        return ddtree(total, depth, **options)
    if values != "path":
        raise UsageError(f'the values of ddtree are "marginal" or "path", not "{shorten(values, QUOTED)}"')
    if "gap" in options:
        raise UsageError("ddtree with values=path learns what a gap is worth; leave gap out")
    return path_ddtree(total, depth, children=options.get("children", CHILDREN))


def _from_file(spec: str) -> Paths:
    name, _, side = spec.partition(".json")
    name, side = f"{name}.json", side.removeprefix(":")
    try:
        document: Any = read_json(in_home(name), "write it with `specjax plan --json`")
    except (OSError, RuntimeError) as error:
        raise UsageError(f"cannot read {name} ({getattr(error, 'strerror', None) or error}); check the path") from None
    if isinstance(document, list) and not side:
        return _parse_json(json.dumps(document), name)
    try:
        by_side = {str(choice["side"]): choice["paths"] for choice in document["choices"]}
    except (TypeError, KeyError):
        by_side = {}
    if not by_side:
        raise UsageError(f"{name} contains neither rank paths nor a plan; write it with `specjax plan --json`")
    side = side or next(iter(by_side))
    if side not in by_side:
        raise UsageError(f'{name} has no choice "{side}"; write {name}:{shorten(" or ".join(by_side), QUOTED)}')
    if not by_side[side]:
        raise UsageError(f"{name}: the {side} choice drafts no tokens; leave the tree out")
    return _parse_json(json.dumps(by_side[side]), name)


def _parse_json(text: str, where: str) -> Paths:
    """Return the rank paths of a JSON text.

    Raises: UsageError unless every node has its parent and the sibling of the previous rank.
    """
    try:
        paths = tuple(tuple(path) for path in json.loads(text))
    except (ValueError, TypeError, RecursionError):
        paths = ()
    if not paths or not all(path and all(type(rank) is int and rank >= 0 for rank in path) for path in paths):
        raise UsageError(f"{where} must be rank paths such as [[0], [1], [0, 0]]")
    nodes = {(), *paths}
    if len(paths) > MAX_NODES:
        raise UsageError(f"{where} has {len(paths)} paths; give at most {MAX_NODES}")
    if len(nodes) <= len(paths):
        raise UsageError(f"{where} has a path twice; remove one of them")
    for path in paths:
        elder = (*path[:-1], path[-1] - 1) if path[-1] else path
        missing = {path[:-1], elder} - nodes
        if missing:
            raise UsageError(f"{where} has the path {quote(list(path))} without {quote(list(min(missing)))}; add it")
    return paths
