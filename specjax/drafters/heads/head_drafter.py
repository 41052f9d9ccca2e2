"""The drafter of draft heads: a head reads the target's features of committed tokens and grows a tree level by level.

Before each draft, the head reads the pairs of the last step (`specjax.drafters.heads.pending_pairs`). The alignment of
features, tokens and positions is defined in `specjax.models.heads.contract`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import costs as costs_of
from specjax import trees
from specjax.arrays.logit_rows import are_large
from specjax.drafters.heads import path_values, pending_pairs, sized_trees
from specjax.drafters.heads.path_values import PathRecord
from specjax.drafters.heads.pending_pairs import State
from specjax.drafters.heads.sized_trees import SIZING, SizeRecord, Sizing
from specjax.errors import UsageError
from specjax.models.heads.blocks import get_target
from specjax.models.heads.candidates import with_candidates
from specjax.models.heads.contract import DraftedNodes, DraftHead, FeaturePairs, Head, StateDraft
from specjax.models.heads.kinds import KINDS
from specjax.trees import Builder, Stop, operations, stops
from specjax.trees.builders.taps import with_weights
from specjax.trees.contracts import Frontier
from specjax.trees.growing import GrownTree, LogitsFn
from specjax.types import Array, Context, Drafter, Hooks, Output, PyTree, TokenTree, Traits, TreeSize, Verdict

PATH_FREE = ("dflash", "flash", "jetspec", "medusa", "p_eagle")
"""Kinds of heads whose slots do not see each other's tokens."""


def head_drafter(
    head: DraftHead,
    num_tokens: int | None = None,
    *,
    tree: Builder | None = None,
    stop: Stop | None = None,
    keep_logits: bool = False,
    keep_confidence: bool = False,
    candidates: int | None = None,
    candidate_rank: int | None = None,
    max_accepted: int | None = None,
    costs: costs_of.Costs = None,
    platform: str | None = None,
) -> Drafter:
    """Draft a chain of `num_tokens` tokens, or a `tree` from `specjax.trees`, with a head of any kind but PPD.

    The rule, guarantee and deviations of each kind are in its file of `specjax.models.heads`, and so is the row with
    the defaults of the options.

    Args:
      num_tokens: length of the chain; default: that of the row, and at most as many tokens as the head drafts.
      tree: for example `trees.eagle2()`, the tree of EAGLE-2 and 3, or `trees.medusa()`.
      stop: a stop condition from `trees.stops`; default: that of the row, if any. `trees.stops.confidence(0)` and
        `trees.stops.drafter_confidence(0)` never stop.
      keep_logits: store the head's distributions in greedy and coupled decoding too, for a controller that reads them.
      keep_confidence: return the head's trained confidence, for the controller `budget`.
      candidates: number of tokens that a low-rank output layer selects and whose exact logits are computed; default:
        all. The head needs an output layer of its own. See `specjax.models.heads.candidates`.
      candidate_rank: rank of this layer; default: a quarter of the head's width.
      max_accepted: tokens that a step may accept, root included, if this drafter is part of another one; default: the
        depth of the tree + 1.
      costs: costs of target passes for the tree `ddtree:auto` and the stop condition `budget`, from `specjax.costs`;
        default: the rule of thumb. Numbers are those of the widths of the tree, or of the lengths of the chain from 0.
      platform: platform or chip of the program, for the same purpose; default: this device.

    State: the head's memory of the text (keys and values of its layers, or its last feature) and the features of one
      accepted path.
    Raises: UsageError for a tree deeper than the head drafts, a head of PPD, or candidates that the head cannot have.
    """
    if candidates is not None:
        head = with_candidates(head, candidates, candidate_rank)
    elif candidate_rank is not None:
        raise UsageError("candidate_rank needs the number of candidates; set candidates too")
    kind = KINDS.get(head.head.kind)
    defaults = {option.name: option.default for option in kind.method.options} if kind else {}
    if stop is None and defaults.get("stop") is not None:
        stop = stops.parse(defaults["stop"])
    if num_tokens is None:
        num_tokens = min(filter(None, (defaults.get("num_tokens"), head.head.max_depth)), default=1)
    builder = trees.make_builder(num_tokens, tree, stop, keep_logits, keep_confidence)
    return tree_drafter(head, builder, max_accepted, Sizing(costs, platform))


def tree_drafter(
    head: DraftHead, builder: Builder, max_accepted: int | None = None, sizing: Sizing = SIZING
) -> Drafter:
    """Return the drafter of a head that grows trees with `builder`. Args and errors: see `head_drafter`."""
    if head.head.soft_prompts is not None:
        kind = head.head.kind
        raise UsageError(f"a {kind} head drafts in the target pass, with trees of its own; choose method {kind}")
    max_depth = head.head.max_depth
    if builder.shorten is not None:
        if head.head.kind not in PATH_FREE:
            raise UsageError(
                f"a slot of a {head.head.kind} head sees the tokens before it, and ddtree and drawn trees need one of "
                f"{', '.join(PATH_FREE)}; choose eagle2:KxLxN instead"
            )
        if builder.stop is not None:
            raise UsageError(
                "a ddtree or drawn tree comes from one pass of the head, which a stop condition does not shorten; "
                "leave the stop condition out"
            )
        builder = dataclasses.replace(
            builder.shorten(max_depth or builder.max_depth), keep_logits=builder.keep_logits,
            keep_confidence=builder.keep_confidence,
        )  # fmt: skip
    if max_depth is not None and builder.max_depth > max_depth:
        raise UsageError(
            f"the tree is {builder.max_depth} tokens deep, but the head drafts only {max_depth}; choose a shorter tree"
        )
    if builder.sized:
        builder = trees.ddtree_auto(builder.max_depth, max(sizing.widths) - 1)
    accepted = max_accepted or builder.max_depth + 1
    functions = _sized if builder.sized else _functions if builder.details is None else _valued
    return functions(head.head, builder, accepted, sizing).replace(params=head.params)


@functools.cache
def _functions(head: Head, builder: Builder, max_accepted: int, sizing: Sizing) -> Drafter:
    """Return the drafter without its parameters."""

    def propose(params, keys, state: State, context: Context, limit) -> tuple[TokenTree, State]:
        state = pending_pairs.read_pending(head, params, state, context)
        reads_costs = builder.stop is not None and builder.stop.reads_costs
        costs = sizing.pass_costs(len(limit), context.target, builder) if reads_costs else None
        grow = lambda: grow_tree(head, builder, params, state.memory, keys, context, limit, costs).tree
        shapes = jax.eval_shape(grow)
        empty_draft = lambda: operations.root_only(context.root, shapes)
        tree = jax.lax.cond(jnp.any(limit > 0), grow, empty_draft)
        if head.in_states is not None:
            tree = trees.read_states(builder, tree, _output_layer(head.in_states, params, context), context.sampling)
        return tree, state

    def observe(params, state, context: Context, tree: TokenTree, verdict: Verdict, output: Output) -> FeaturePairs:
        return pending_pairs.accepted_pairs(head, max_accepted, tree, verdict, output)

    return Drafter(
        propose=propose,
        size=TreeSize(builder.num_nodes, builder.max_depth),
        init=lambda params, context: pending_pairs.init_state(head, params, context, max_accepted),
        observe=observe,
        update=lambda params, state, pairs, verdict: pending_pairs.append(state, pairs),
        traits=Traits(
            draws=builder.draws,
            widths=builder.widths,
            taps=head.taps,
            max_accepted=max_accepted,
            rewinds=False,
            follows_any_tree=True,
            reads_best=0,
        ),
        hooks=Hooks(
            prefill=functools.partial(pending_pairs.read_prompt, head),
            axes=functools.partial(pending_pairs.state_axes, head),
        ),
    )


class RecordedState(NamedTuple):
    """The state of a head whose trees depend on a record of earlier drafts."""

    read: State
    record: Any


@functools.cache
def _sized(head: Head, builder: Builder, max_accepted: int, sizing: Sizing) -> Drafter:
    """Return the drafter of `ddtree:auto`, without its parameters."""

    def propose(params, keys, state: RecordedState, context: Context, limit) -> tuple[TokenTree, RecordedState]:
        read = pending_pairs.read_pending(head, params, state.read, context)
        passes = sizing.passes(len(limit), context.target)
        cost = sizing.draft_cost(context, head, params, builder.levels)

        def draft(record: SizeRecord) -> tuple[TokenTree, SizeRecord]:
            grown = grow_tree(head, builder, params, read.memory, keys, context, limit)
            return sized_trees.choose_size(passes, cost, record, grown, context, limit)

        def skip(record: SizeRecord) -> tuple[TokenTree, SizeRecord]:
            root = operations.chain(context.root, jnp.ones_like(context.root, bool))
            return operations.pad_nodes(root, builder.num_nodes), sized_trees.pause(record)

        if passes.is_plain:
            return skip(state.record)[0], RecordedState(read, state.record)
        is_due = jnp.any(limit > 0) & (state.record.rest == 0)
        tree, record = jax.lax.cond(is_due, draft, skip, state.record)
        return tree, RecordedState(read, record)

    drafter = _recorded(head, builder, max_accepted, sizing, sized_trees, sized_trees.count).replace(propose=propose)
    return drafter.replace(
        traits=drafter.traits._replace(widths=sizing.widths[:-1]),
        hooks=drafter.hooks._replace(widths=lambda batch, target: sizing.passes(batch, target).widths),
    )


@functools.cache
def _valued(head: Head, builder: Builder, max_accepted: int, sizing: Sizing) -> Drafter:
    """Return the drafter of `ddtree` with values by path, without its parameters."""

    def propose(params, keys, state: RecordedState, context: Context, limit) -> tuple[TokenTree, RecordedState]:
        read = pending_pairs.read_pending(head, params, state.read, context)
        learned = with_weights(builder, state.record.learned)

        def draft(record: PathRecord) -> tuple[TokenTree, PathRecord]:
            grown = grow_tree(head, learned, params, read.memory, keys, context, limit)
            return grown.tree, path_values.store(record, grown)

        def skip(record: PathRecord) -> tuple[TokenTree, PathRecord]:
            root = operations.chain(context.root, jnp.ones_like(context.root, bool))
            tree = operations.pad_nodes(root, builder.num_nodes)
            return tree, record._replace(drafted=jnp.zeros_like(record.drafted))

        tree, record = jax.lax.cond(jnp.any(limit > 0), draft, skip, state.record)
        return tree, RecordedState(read, record)

    return _recorded(head, builder, max_accepted, sizing, path_values, path_values.learn).replace(propose=propose)


def _recorded(
    head: Head, builder: Builder, max_accepted: int, sizing: Sizing, records: Any, learn: Callable[..., Any]
) -> Drafter:
    """Return a drafter with a record of its drafts, without `propose`.

    Args:
      records: the module with `init_record` and `record_axes`.
      learn: `(record, tokens, number) -> record` compares the drafted nodes with the text of the step.
    """
    base = _functions(head, builder, max_accepted, sizing)

    def init(params, context: Context) -> RecordedState:
        record = records.init_record(len(context.length), builder.num_nodes, builder.max_depth)
        return RecordedState(base.init(params, context), record)

    def update(params, state: RecordedState, pairs: FeaturePairs, verdict: Verdict) -> RecordedState:
        return RecordedState(pending_pairs.append(state.read, pairs), learn(state.record, pairs.tokens, pairs.count))

    def prefill(params, state: RecordedState, *chunk) -> RecordedState:
        return state._replace(read=pending_pairs.read_prompt(head, params, state.read, *chunk))

    def axes(state: RecordedState) -> RecordedState:
        return RecordedState(pending_pairs.state_axes(head, state.read), records.record_axes(state.record))

    return base.replace(
        init=init,
        update=update,
        traits=base.traits._replace(follows_any_tree=False),
        hooks=Hooks(prefill=prefill, axes=axes),
    )


def grow_tree(
    head: Head, builder: Builder, params: PyTree, memory: PyTree, keys: Array | None, context: Context, limit: Array,
    pass_costs: np.ndarray | None = None,
) -> GrownTree:  # fmt: skip
    """Draft a tree with a head. Its `memory` must contain all pairs."""
    vocab = get_target(context).model.vocab_size
    in_states = head.in_states if are_large(len(limit), builder.places, vocab) else None
    functions = in_states or head
    scratch, output = functions.start(params, memory, context, builder.places)

    def feed(scratch: PyTree, frontier: Frontier):
        return functions.follow(params, scratch, to_drafted_nodes(frontier), context)

    logits_of = None if in_states is None else _output_layer(in_states, params, context)
    return trees.grow(
        builder,
        feed,
        scratch,
        context.root[:, 0],
        output,
        keys,
        context,
        limit,
        logits_of,
        is_path_free=head.kind in PATH_FREE,
        pass_costs=pass_costs,
    )[0]


def _output_layer(in_states: StateDraft, params: PyTree, context: Context) -> LogitsFn:
    return lambda states: in_states.logits(params, states, context)


def to_drafted_nodes(frontier: Frontier) -> DraftedNodes:
    """Return a frontier as heads read it. The root is not among the seen nodes, since its pair is in the memory."""
    places = jnp.arange(frontier.visible.shape[2])
    parent = jnp.max(jnp.where(frontier.visible, places, 0), 2)  # nodes are fed after their ancestors
    return DraftedNodes(frontier.tokens, frontier.depth, frontier.place, parent, frontier.visible & (places > 0))
