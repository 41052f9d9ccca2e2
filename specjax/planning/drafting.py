"""The drafter of a workload: its cost in passes and its value in tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from specjax import trees
from specjax.catalog import find_drafter
from specjax.costs.tokens import expected_tokens, rank_acceptance
from specjax.drafters.heads.ppd import plan_trees
from specjax.drafters.making import make_drafter
from specjax.drafters.tables.token_recycling import best_paths
from specjax.errors import UsageError
from specjax.models import abstract_params, make_model
from specjax.models.heads.contract import DraftHead
from specjax.models.heads.kinds import abstract_head
from specjax.models.heads.ppd import ppd_head
from specjax.planning.workload import Workload
from specjax.trees.autoregressive import autoregressive
from specjax.trees.operations import chain
from specjax.trees.shape_search.best_shapes import Paths
from specjax.trees.shape_search.dynamic_sparse import evaluate
from specjax.types import Array, Drafter, PyTree, Target, TokenTree, Traits, TreeSize


def drafter_of(work: Workload, target: Target, draft: Target | DraftHead | None) -> Drafter:
    """Return the drafter of the workload's method. The parameters of both models may be shapes."""
    takes_draft = find_drafter(work.method).needs & {"draft", "head"}
    return make_drafter(work.method, target, draft if takes_draft else None, **_options(work))


def _options(work: Workload) -> dict[str, Any]:
    """Return the options of the workload's method for its factory."""
    method = find_drafter(work.method)
    options: dict[str, Any] = {"platform": work.topology.chip.name} if method.uses("costs") else {}
    written = dict(work.options)
    options |= {option.name: option.parse(written[option.name]) for option in method.options if option.name in written}
    if work.tree is not None:
        option = method.option("tree")
        assert option is not None, "make_workload checks this"
        options["tree"] = option.parse(work.tree)
    elif work.num_draft_tokens is not None:
        if method.size is None:
            raise UsageError(f"--num-draft-tokens does not apply to method {work.method}; leave it out")
        options[method.size] = work.num_draft_tokens
    return options


@functools.cache
def drafter_shape(work: Workload) -> Drafter:
    """Return the workload's drafter for its static fields."""
    abstract_target = lambda config: Target(make_model(config), abstract_params(config))
    if work.head is not None:
        return drafter_of(work, abstract_target(work.target), abstract_head(work.method, work.head))
    return drafter_of(work, abstract_target(work.target), None if work.draft is None else abstract_target(work.draft))


def draft_passes(work: Workload) -> int:
    """Return the passes of the draft model or head per step: at most one per tree level, or 0 for other methods."""
    if not find_drafter(work.method).needs & {"draft", "head"}:
        return 0
    return trees.parse(work.tree).levels if work.tree else drafter_shape(work).max_depth


def share_of_layers(work: Workload) -> float:
    """Return the share of the target's layers that a drafting pass runs; 1 if it skips none."""
    layers, options, method = work.target.num_layers, _options(work), find_drafter(work.method)
    if work.head is not None:
        stretches = abstract_head(work.method, work.head).head.target_layers(layers)
        return sum(last - first for first, last in stretches) / (layers * len(stretches)) if stretches else 1.0
    if options.get("exit_layer") is not None:
        return options["exit_layer"] / layers
    return 1 - options["ratio"] if "ratio" in options else method.draft_cost or 1.0


def tokens_of(work: Workload) -> Callable[[float], float]:
    """Return a function from acceptance rate to expected tokens per pass of the workload's drafter.

    It is exact for chains, branching specs, independent paths and static trees. For trees that grow by confidence, it
    is the value of the best static tree of their size and depth (Sequoia's dynamic program). Trees with soft prompts
    use the probability of each state, with the same rate at every distance.
    """
    if work.method == "ppd":
        shapes = plan_trees(ppd_head(work.head), **_options(work))[1]
        every = lambda rate: (rank_acceptance(rate),) * (len(shapes) - 1)
        return lambda rate: evaluate(shapes, every(rate), [1.0] * len(shapes)).rate
    shape = drafter_shape(work)
    return _tokens_of_shape(work, shape.num_nodes, shape.max_depth)


def _tokens_of_shape(work: Workload, num_nodes: int, max_depth: int) -> Callable[[float], float]:
    paths = _static_paths(work, num_nodes, max_depth)
    if paths is not None:
        return lambda rate: expected_tokens(paths, rank_acceptance(rate))
    return lambda rate: trees.sequoia(rank_acceptance(rate, min(16, num_nodes - 1)), num_nodes, max_depth)[0]


def _static_paths(work: Workload, num_nodes: int, max_depth: int) -> Paths | None:
    if work.tree:
        return trees.static_paths(work.tree)
    if num_nodes == max_depth + 1:
        return tuple((0,) * depth for depth in range(1, max_depth + 1))
    if work.method == "token_recycling":
        return tuple(best_paths(num_nodes - 1))
    return None


def probe(num_nodes: int) -> Drafter:
    """Return a drafter without cost: a chain of `num_nodes` nodes of token 0, root included.

    A step with it is one target pass over that many nodes. The cost of a pass does not depend on the draft's
    distribution.
    """
    if num_nodes == 1:
        return autoregressive()

    def propose(params, keys, state, context, limit) -> tuple[TokenTree, PyTree]:
        tokens = jnp.pad(context.root, ((0, 0), (0, num_nodes - 1)))
        depth: Array = jnp.arange(num_nodes)
        return chain(tokens, jnp.broadcast_to(depth <= limit[:, None], tokens.shape)), state

    return Drafter(propose=propose, size=TreeSize(num_nodes, num_nodes - 1), traits=Traits(widths=()))
