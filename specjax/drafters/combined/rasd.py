"""RASD: a drafted tree and retrieved paths are fused into one tree by their longest common prefixes.

Quan et al.: RASD: Retrieval-Augmented Speculative Decoding (ACL Findings 2025), arXiv 2503.03434.

Rule: a draft model, a draft head or any drafter grows a tree. Retrieved paths stay if the drafter finds their first
token likely too. Nodes of these paths that the tree lacks are attached at the point where the path leaves the tree
(`keep_likely`, `fuse` of `specjax.trees.operations`).
Guarantee: distribution (a point-mass tree).
Deviations: the authors did not publish their details. A retrieved path is kept if its first token is a child of the
root in the draft tree; `prune=False` keeps all paths. The default is one retrieved chain. Any deterministic drafter
without a model can replace it.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.catalog import Method, Option
from specjax.drafters.composed import longest_of_each, read_each, remember_each, taps_of_each
from specjax.drafters.heads.head_drafter import tree_drafter
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


class State(NamedTuple):
    model: PyTree
    retrieval: PyTree
    # Within a step, for a model that follows its own trees only: int32[B, N], the node of its tree for each node of the
    # fused tree; 0 for the other nodes.
    origin: Any = ()


def rasd(
    draft: Target | DraftHead | Drafter,
    retrieval: Drafter | None = None,
    tree: Builder | str = "top:8x2x1x1",
    *,
    prune: bool = True,
) -> Drafter:
    """Fuse the tree of `draft` with that of `retrieval`.

    Args:
      draft: a draft model or a draft head, which grows `tree` (a deterministic builder, or its spec). It can also be a
        deterministic drafter that follows any tree, such as `early_exit(target, tree=parse("top:4x2"))` or
        `token_recycling`; `tree` is not used then.
      retrieval: a deterministic drafter that follows any tree; default: `suffix(7)`.
      prune: keep only paths with a first token that `draft` proposes too.

    State: the states of both. After each step a draft model reads again as many tokens as the retrieval can add,
      because it has not read them yet.
    Raises: UsageError for a tree or a drafter with randomness, a drafter that follows its own trees only, or the same
      drafter twice.
    """
    retrieval = suffix(7) if retrieval is None else retrieval
    if retrieval.traits.draws != "point_mass" or not retrieval.traits.follows_any_tree:
        raise UsageError("retrieval must be a drafter without randomness that follows any tree, such as suffix")
    base = draft if isinstance(draft, Drafter) else _tree_drafter(draft, tree, retrieval.max_depth)
    if isinstance(draft, Drafter) and (draft.traits.draws != "point_mass" or not draft.traits.follows_any_tree):
        raise UsageError("draft must be a model, or a drafter without randomness that follows any tree")
    if base.propose is retrieval.propose:
        raise UsageError("rasd got the same drafter twice; fuse two that differ, such as token_recycling and suffix")
    drafter = _functions(base.replace(params=()), retrieval.replace(params=()), prune)
    return drafter.replace(params=(base.params, retrieval.params))


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


def _tree_drafter(draft: Target | DraftHead, tree: Builder | str, retrieved: int) -> Drafter:
    """Return a drafter that grows `tree` with a draft model or head.

    Args:
      retrieved: the maximum number of retrieved tokens that a step may accept.
    """
    builder = parse(tree) if isinstance(tree, str) else tree
    if builder.draws != "point_mass":
        raise UsageError(f"tree must be grown without randomness, such as top:8x2x1x1, but it draws {builder.draws}")
    if isinstance(draft, DraftHead):
        return tree_drafter(draft, builder, 1 + max(builder.max_depth, retrieved))
    return two_model(draft, tree=builder, lag=2 + retrieved)


@functools.cache
def _functions(model: Drafter, retrieval: Drafter, prune: bool) -> Drafter:
    nodes = model.num_nodes + retrieval.num_nodes - 1

    def init(params, context: Context) -> State:
        return State(model.init(params[0], context), retrieval.init(params[1], context))

    def propose(params, keys, state: State, context: Context, limit: Array):
        drafted, model_state = model.propose(params[0], keys, state.model, context, limit)
        retrieved, retrieval_state = retrieval.propose(params[1], keys, state.retrieval, context, limit)
        if prune:
            retrieved = operations.keep_likely(drafted, retrieved)
        fused, order = operations.fuse(drafted, retrieved)
        origin = () if model.traits.follows_any_tree else jnp.where(order < model.num_nodes, order, 0)
        return fused, State(model_state, retrieval_state, origin)

    def of_model(state: State, verdict: Verdict) -> Verdict:
        """Translate the verdict to the nodes of the model's own tree."""
        if model.traits.follows_any_tree:
            return verdict
        # On every path the nodes of the retrieval alone follow those of the draft model, which reads them again later.
        path = take_along(state.origin, jnp.clip(verdict.path, 0, nodes - 1), 1)
        return verdict._replace(path=jnp.where(verdict.path < 0, -1, path))

    def observe(params, state: State, context: Context, tree, verdict, output):
        first = model.observe(params[0], state.model, context, tree, of_model(state, verdict), output)
        return first, retrieval.observe(params[1], state.retrieval, context, tree, verdict, output)

    def update(params, state: State, observations, verdict):
        drafted = model.update(params[0], state.model, observations[0], of_model(state, verdict))
        return State(drafted, retrieval.update(params[1], state.retrieval, observations[1], verdict), ())

    def axes(state: State) -> State:
        return State(model.hooks.axes(state.model), retrieval.hooks.axes(state.retrieval), ())

    def read(params, state: State, *chunk):
        return State(*read_each((model, retrieval), params, state[:2], *chunk))

    def remember(params, state: State):
        return remember_each((model, retrieval), params, state[:2])

    max_depth = max(model.max_depth, retrieval.max_depth)
    return Drafter(
        propose=propose,
        size=TreeSize(nodes, max_depth),
        init=init,
        observe=observe,
        update=update,
        traits=Traits(
            rewinds=model.traits.rewinds and retrieval.traits.rewinds,
            follows_any_tree=model.traits.follows_any_tree,
            taps=taps_of_each((model, retrieval)),
            max_accepted=longest_of_each((model, retrieval), max_depth),
            widths=tuple(sorted({w for w in (1, *model.traits.widths, model.num_nodes) if w < nodes})),
            lag=max(model.traits.lag, retrieval.traits.lag),
        ),
        hooks=Hooks(
            axes=axes,
            prefill=read if model.hooks.prefill or retrieval.hooks.prefill else None,
            export=remember if model.hooks.export or retrieval.hooks.export else None,
        ),
    )
