"""REST: retrieval-based speculative decoding drafts a tree of continuations from a corpus.

He, Zhong, Cai, Lee, He: REST: Retrieval-Based Speculative Decoding (NAACL 2024), arXiv 2311.08252.

Rule: let s be the longest end of the text, of at most max_span tokens, that occurs in the datastore. Read `depth`
tokens after each occurrence. Draft the num_nodes most frequent prefixes of these continuations.
Guarantee: distribution (a point-mass tree).
Deviations: at most `num_paths` occurrences are read, evenly spaced in sorted order, so counts are proportional but
rounded; the authors read the first 5,000. The draft is empty without a match; the authors draft one arbitrary token.
For equal counts the shorter prefix comes first, then the smaller id.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.catalog import Method, Option, shared
from specjax.errors import UsageError
from specjax.retrieval.datastore import Datastore
from specjax.retrieval.datastore.index import Index, continuations, search
from specjax.trees.token_trie import from_paths
from specjax.types import Drafter, Target, Traits, TreeSize

METHOD = Method(
    name="rest",
    kind="drafter",
    guarantee="distribution",
    summary="drafts a tree of the most frequent continuations of the current text in a datastore",
    paper="He et al. 2024, arXiv 2311.08252",
    needs=frozenset({"datastore"}),
    options=(
        shared.num_nodes(64),
        Option("depth", "int", 10, "maximum depth of the tree"),
        Option("max_span", "int", 16, "maximum length of the match"),
        Option("min_span", "int", 2, "minimum length of the match"),
        Option("num_paths", "int", 64, "continuations to read"),
    ),
    cpu_options={"num_nodes": 7},
    factory="make_rest",
    arguments=("target",),
)


def rest(
    index: Index,
    *,
    num_nodes: int = 64,
    depth: int = 10,
    max_span: int = 16,
    min_span: int = 2,
    num_paths: int = 64,
) -> Drafter:
    """Draft a tree of up to `num_nodes` tokens and depth `depth`, retrieved on the device. Params: the index.

    Args:
      index: `Datastore.to_device()`, on the mesh of the target if it has one. Its token ids must be those of the
        target; `open_datastore(folder, tokenizer)` checks this.

    Raises: UsageError for a budget below 1, or unless 1 <= min_span <= max_span.
    """
    if min(num_nodes, depth, num_paths) < 1:
        raise UsageError(f"num_nodes, depth and num_paths must be at least 1, not {num_nodes}, {depth} and {num_paths}")
    if not 1 <= min_span <= max_span:
        raise UsageError(f"min_span must be from 1 to max_span ({max_span}), not {min_span}")
    return _functions(num_nodes, depth, max_span, min_span, num_paths).replace(params=index)


def make_rest(target: Target, *, datastore: Datastore, **options) -> Drafter:
    """Return `rest` with the index of a datastore on the devices of the target."""
    return rest(datastore.to_device(target.model.mesh), **options)


@functools.cache
def _functions(num_nodes: int, depth: int, max_span: int, min_span: int, num_paths: int) -> Drafter:
    def propose(index: Index, keys, state, context, limit):
        positions = context.length[:, None] - max_span + jnp.arange(max_span)
        text = take_along(context.tokens, jnp.maximum(positions, 0), 1)
        matches = search(index, text, context.length, min_span)
        paths = continuations(index, matches, num_paths, depth)
        paths = jnp.where(jnp.arange(depth) < limit[:, None, None], paths, -1)
        return from_paths(text[:, -1], paths, jnp.ones(paths.shape[:2]), num_nodes + 1), state

    return Drafter(
        propose=propose,
        size=TreeSize(num_nodes + 1, depth),
        traits=Traits(widths=tuple(w for w in (1, 8, 16, 32) if w <= num_nodes), follows_any_tree=True),
    )
