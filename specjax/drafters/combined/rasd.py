"""RASD: a drafted tree and retrieved text in one tree, fused by their longest common prefixes.

Quan et al.: RASD: Retrieval-Augmented Speculative Decoding (ACL Findings 2025), arXiv 2503.03434.

Rule: a draft model, a learned head, or any drafter, grows its tree; the retrieved paths that start with a token which
it finds likely too are kept, and what of them is not in the tree already is attached where they leave it
(`keep_likely`, `fuse` of `specjax.trees.operations`).
Guarantee: distribution (a point-mass tree).
Deviations: the authors' details are not published. A retrieved path is kept if its first token is among the children of
the root in the draft tree, which are the draft model's likeliest (`prune=False` keeps all). One retrieved chain is the
default; any drafter without randomness and without a model may stand in for it.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.catalog import Method, Option
from specjax.drafters.composed import longest_of_each, read_each, remember_each, taps_of_each
from specjax.drafters.heads.learned import learned
from specjax.drafters.lookup.suffix import suffix
from specjax.drafters.making import make_inner_drafter
from specjax.drafters.model.two_model import two_model
from specjax.errors import UsageError
from specjax.models.heads.contract import DraftHead
from specjax.retrieval.datastore import Datastore
from specjax.trees import Builder, operations, parse
from specjax.types import Array, Context, Drafter, Hooks, PyTree, Target, Traits, TreeSize, Verdict

METHOD = Method(
    name="rasd",
    kind="drafter",
    guarantee="distribution",
    summary="fuses the tree of a draft model or head with tokens retrieved from the text or a datastore",
    paper="Quan et al. 2025, arXiv 2503.03434",
    needs=frozenset({"draft"}),
    takes=frozenset({"datastore", "head"}),
    options=(
        Option("retrieval", "drafter", None, "retrieval drafter, such as rest:16; default: suffix:7"),
        Option("tree", "tree", "top:8x2x1x1", "tree of the draft model, grown without randomness"),
        Option("prune", "yes_or_no", True, "keep only retrieved paths whose first token the draft model proposes too"),
    ),
    factory="make_rasd",
    arguments=("target", "draft"),
)


class _State(NamedTuple):
    model: PyTree
    retrieval: PyTree
    # Within a round, for a model that follows its own trees only: int32[B, N], which node of its tree each node of the
    # fused one is; 0 for the others.
    origin: Any = ()


def rasd(
    draft: Target | DraftHead | Drafter,
    retrieval: Drafter | None = None,
    tree: Builder | str = "top:8x2x1x1",
    *,
    prune: bool = True,
) -> Drafter:
    """The tree of `draft` fused with that of `retrieval`.

    Args:
      draft: a draft model or a learned head, which grows `tree` (a builder without randomness, or its spec), or a
        drafter whose trees have no randomness and which follows any tree, such as
        `early_exit(target, tree=parse("top:4x2"))` or `token_recycling`; `tree` is not used then.
      retrieval: a drafter of the same kind; default: `suffix(7)`. prune: keep only paths that start as `draft` would.

    State: that of the two. A draft model reads after each round as many tokens anew as the retrieval may add, for it
    has not seen those.
    Raises: UsageError for a tree or a drafter with randomness, one that follows its own trees only, or twice the same.
    """
    retrieval = suffix(7) if retrieval is None else retrieval
    if retrieval.traits.draws != "point_mass" or not retrieval.traits.follows_any_tree:
        raise UsageError("retrieval must be a drafter without randomness that follows any tree, such as suffix")
    base = draft if isinstance(draft, Drafter) else _grown_by(draft, tree, retrieval.max_depth)
    if isinstance(draft, Drafter) and (draft.traits.draws != "point_mass" or not draft.traits.follows_any_tree):
        raise UsageError("draft must be a model, or a drafter without randomness that follows any tree")
    if base.propose is retrieval.propose:
        raise UsageError("rasd was given the same drafter twice; fuse two that differ, such as token_recycling, suffix")
    made = _functions(base.replace(params=()), retrieval.replace(params=()), prune)
    return made.replace(params=(base.params, retrieval.params))


def make_rasd(
    target: Target,
    draft: Target | DraftHead,
    *,
    retrieval: str | Drafter | None = None,
    datastore: Datastore | None = None,
    **options,
) -> Drafter:
    """Return `rasd` with a retrieval drafter by name; default: `suffix:7`, which searches the datastore if given."""
    if retrieval is None and datastore is not None:
        retrieval = "suffix:7"
    if retrieval is not None:
        retrieval = make_inner_drafter(retrieval, target, datastore)
    return rasd(draft, retrieval, **options)


def _grown_by(draft: Target | DraftHead, tree: Builder | str, retrieved: int) -> Drafter:
    """retrieved: tokens that a round may accept beside the tree's own."""
    builder = parse(tree) if isinstance(tree, str) else tree
    if builder.draws != "point_mass":
        raise UsageError(f"tree must be grown without randomness, such as top:8x2x1x1, but it draws {builder.draws}")
    if isinstance(draft, DraftHead):
        return learned(draft, builder, 1 + max(builder.max_depth, retrieved))
    return two_model(draft, tree=builder, lag=2 + retrieved)


@functools.cache
def _functions(model: Drafter, retrieval: Drafter, prune: bool) -> Drafter:
    nodes = model.num_nodes + retrieval.num_nodes - 1

    def init(params, context: Context) -> _State:
        return _State(model.init(params[0], context), retrieval.init(params[1], context))

    def propose(params, keys, state: _State, context: Context, limit: Array):
        drafted, model_state = model.propose(params[0], keys, state.model, context, limit)
        retrieved, retrieval_state = retrieval.propose(params[1], keys, state.retrieval, context, limit)
        if prune:
            retrieved = operations.keep_likely(drafted, retrieved)
        fused, order = operations.fuse(drafted, retrieved)
        origin = () if model.traits.follows_any_tree else jnp.where(order < model.num_nodes, order, 0)
        return fused, _State(model_state, retrieval_state, origin)

    def of_model(state: _State, verdict: Verdict) -> Verdict:
        """The verdict as if the model's own tree had been judged."""
        if model.traits.follows_any_tree:
            return verdict
        # Nodes that only the retrieval had are behind those of the draft model on every path, and are read anew.
        path = take_along(state.origin, jnp.clip(verdict.path, 0, nodes - 1), 1)
        return verdict._replace(path=jnp.where(verdict.path < 0, -1, path))

    def observe(params, state: _State, context: Context, tree, verdict, output):
        first = model.observe(params[0], state.model, context, tree, of_model(state, verdict), output)
        return first, retrieval.observe(params[1], state.retrieval, context, tree, verdict, output)

    def update(params, state: _State, seen, verdict):
        drafted = model.update(params[0], state.model, seen[0], of_model(state, verdict))
        return _State(drafted, retrieval.update(params[1], state.retrieval, seen[1], verdict), ())

    def axes(state: _State) -> _State:
        return _State(model.hooks.axes(state.model), retrieval.hooks.axes(state.retrieval), ())

    def read(params, state: _State, *chunk):
        return _State(*read_each((model, retrieval), params, state[:2], *chunk))

    def remember(params, state: _State):
        return remember_each((model, retrieval), params, state[:2])

    deepest = max(model.max_depth, retrieval.max_depth)
    return Drafter(
        propose=propose,
        size=TreeSize(nodes, deepest),
        init=init,
        observe=observe,
        update=update,
        traits=Traits(
            rewinds=model.traits.rewinds and retrieval.traits.rewinds,
            follows_any_tree=model.traits.follows_any_tree,
            taps=taps_of_each((model, retrieval)),
            max_accepted=longest_of_each((model, retrieval), deepest),
            widths=tuple(sorted({w for w in (1, *model.traits.widths, model.num_nodes) if w < nodes})),
        ),
        hooks=Hooks(
            axes=axes,
            prefill=read if model.hooks.prefill or retrieval.hooks.prefill else None,
            export=remember if model.hooks.export or retrieval.hooks.export else None,
        ),
    )
