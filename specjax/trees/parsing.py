"""Trees from a short text, for command lines and configs."""

from __future__ import annotations

from specjax.errors import UsageError
from specjax.trees.builders.beam import beam
from specjax.trees.builders.dyspec import dyspec, dyspec_fixed
from specjax.trees.builders.eagle2 import eagle2
from specjax.trees.builders.static import branching, independent_paths
from specjax.trees.contracts import Builder

FORMS = {
    "AxBxC": "branching: A children of the root, B of each of these, ..., drawn without replacement",
    "top:AxBxC": "the same shape from the likeliest tokens",
    "mixed:AxBxC": "the same shape, one sibling sampled beside the likeliest",
    "paths:KxL": "K independent chains of L tokens",
    "beam:WxL": "stochastic beam search, W nodes on each of L levels",
    "dyspec:WxL": "grown where the drafter is sure, at most W nodes on each of L levels",
    "dyspec:N": "the N likeliest draws, one draft pass each",
    "eagle2:KxLxN": "the N likeliest of L levels of K x K candidates",
}


def parse(spec: str) -> Builder:
    """A builder from one of `FORMS`. Raises: UsageError for any other text."""
    kind, _, numbers = spec.rpartition(":")
    try:
        sizes = tuple(int(x) for x in numbers.split("x"))
    except ValueError:
        sizes = ()
    makers = {
        ("", None): lambda: branching(sizes),
        ("top", None): lambda: branching(sizes, "point_mass"),
        ("mixed", None): lambda: branching(sizes, "top_and_sampled"),
        ("paths", 2): lambda: independent_paths(*sizes),
        ("beam", 2): lambda: beam(*sizes),
        ("dyspec", 1): lambda: dyspec_fixed(*sizes),
        ("dyspec", 2): lambda: dyspec(threshold=1 / (1 + sizes[0] * sizes[1]), width=sizes[0], depth=sizes[1]),
        ("eagle2", 3): lambda: eagle2(top_k=sizes[0], depth=sizes[1], total=sizes[2]),
    }
    make = makers.get((kind, len(sizes))) or makers.get((kind, None))
    if not sizes or min(sizes) < 1 or make is None:
        raise UsageError(f'"{spec}" is not a tree; the forms are {", ".join(FORMS)}')
    return make()
