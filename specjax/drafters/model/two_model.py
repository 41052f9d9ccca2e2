"""Two-model speculative decoding: a smaller model of the same tokenizer drafts a chain or a tree.

Leviathan, Kalman, Matias: Fast Inference from Transformers via Speculative Decoding (2023), arXiv 2211.17192;
Chen et al.: Accelerating Large Language Model Decoding with Speculative Sampling (2023), arXiv 2302.01318.

Rule: x_i ~ q(. | text, x_<i) with the target's own temperature, top-k and top-p; a `specjax.trees` builder says how
many of them, and where. One pass of the draft model per level; the nodes share one key/value cache. Where no row drafts
on, at its limit or by a `stop` rule, the remaining passes do not run. In a round in which no row drafts none does; what
the cache lacks then is fed before the next draft.
With an acceptance head (SpecDec++, `specjax.models.heads.acceptance`) the draft model's features of the drafted tokens
say when to stop.
Guarantee: distribution (verified with the q that was sampled).
Where the models' outputs differ in size, q has no mass on ids that one of them lacks (`specjax.models.vocabulary`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax import trees
from specjax.arrays import batch_axes
from specjax.arrays.indexing import take_along
from specjax.catalog import Method, Option, shared
from specjax.engine.prefill import catch_up, prefill
from specjax.errors import UsageError
from specjax.models.heads.acceptance import AcceptanceHead
from specjax.models.vocabulary import match_vocabulary
from specjax.trees import Builder, Stop, operations
from specjax.trees.contracts import Frontier
from specjax.types import (
    Array,
    Context,
    Drafter,
    DraftOutput,
    Hooks,
    Model,
    PyTree,
    Target,
    TokenTree,
    Traits,
    TreeSize,
)

METHOD = Method(
    name="two_model",
    kind="drafter",
    guarantee="distribution",
    summary="drafts a chain with a smaller model and verifies it with the exact draft probabilities",
    paper="Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318",
    needs=frozenset({"draft"}),
    options=(
        shared.num_tokens(4),
        shared.TREE,
        shared.STOP,
        Option("lag", "int", 2, "last tokens of the text that the draft model reads again in each step"),
        shared.KEEP_LOGITS,
        Option(
            "acceptance",
            "acceptance_head",
            None,
            "acceptance head of the draft model (SpecDec++), for the stop condition trained:T",
        ),
    ),
    arguments=("draft",),
)


CATCH_UP = 16
"""Tokens per pass of those that were decoded while nothing was drafted."""


class State(NamedTuple):
    """The draft model's memory between two rounds."""

    cache: PyTree  # of all but the last `lag` tokens of the text; of fewer while nothing is drafted
    held: Array  # int32[B], how many these are
    dropped: Array  # int32[B], tokens of the prompt that it does not see


class _Drafted(NamedTuple):
    """Within a round: what the draft model was fed, until it is known what of it to keep."""

    state: State
    is_fed: Array  # bool[], whether anything was
    pending: PyTree  # of the last `lag` tokens of the text, then of the tree's inner nodes
    places: Array  # int32[B, N], of the tree's nodes, from `trees.Grown`
    length: Array  # int32[B], of the text as the draft model sees it


def two_model(
    draft: Target,
    num_tokens: int = 4,
    tree: Builder | None = None,
    *,
    stop: Stop | None = None,
    lag: int = 2,
    keep_logits: bool = False,
    acceptance: AcceptanceHead | None = None,
) -> Drafter:
    """A chain of `num_tokens` tokens of `draft`, or a `tree` from `specjax.trees` (greedy decoding: the likeliest).

    Args:
      stop: when to draft no further, one of `trees.stops`.
      lag: how many of the last tokens are fed anew in each round. After full acceptance the cache lacks 2; where it
        lacks more, as within `hierarchical` (4, or 3 without `own_token`), those are fed in a pass of its own.
      keep_logits: hand the draft's distributions on in greedy and coupled decoding too, to a controller that reads
        them.
      acceptance: of the draft model, for the rule `trees.stops.trained`, which is the default with one; its authors
        draft up to 20 tokens.

    State: the draft's own memory. Raises: UsageError for a setting below 1.
    """
    if lag < 2:
        raise UsageError(f"lag must be at least 2, not {lag}")
    if acceptance is not None and stop is None and (tree is None or tree.stop is None):
        stop = trees.stops.trained()
    builder = trees.builder_of(num_tokens, tree, stop, keep_logits)
    params = draft.params if acceptance is None else (draft.params, acceptance)
    return functions(draft.model, builder, lag, group=1, judges=acceptance is not None).replace(params=params)


@functools.cache
def functions(
    model: Model,
    builder: Builder,
    lag: int,
    shorten: Callable[[Context], Context] | None = None,
    group: int = 1,
    judges: bool = False,
) -> Drafter:
    """The drafter, without its parameters; `judges`: these are the draft model's and an acceptance head's.

    `shorten`: the prompts that the draft model reads in place of the target's, equal in their last `lag` tokens. Its
    buffer is that of the cache, so the shortened text must end within it.

    `group`: of the passes below the root (`Model.forward`); the text is always fed exactly. A `lag` above the deepest
    level keeps what they leave out of the cache.
    """
    approximately = {} if group == 1 else {"group": group}
    # All rows feed the same number of tokens, whatever each lacks, so that they stay in step; on accelerators that
    # costs what one token does.
    slots = lag - 1 + builder.places
    longest = builder.max_depth + lag

    weights_of = lambda params: params[0] if judges else params

    def start(length):
        """How many tokens of a text the cache holds when a round begins."""
        return jnp.maximum(length - lag, 0)

    def init(params, context: Context):
        seen = context if shorten is None else shorten(context)
        weights, buffer = weights_of(params), seen.tokens.shape[1]
        cache = model.start_cache(weights, model.reads(seen.inputs), seen.length, buffer + slots)
        cache = prefill(match_vocabulary(model, context.target), weights, cache, seen.tokens, start(seen.length))
        return State(cache, start(seen.length), context.length - seen.length)

    def propose(params, keys, state: State, context: Context, limit):
        length, is_drafting = context.length - state.dropped, jnp.any(limit > 0)
        cache, held = state.cache, jnp.minimum(state.held, start(length))
        if model.rewind is not None:  # as inner drafter of `hierarchical` it has seen drafts that were taken back
            cache = model.rewind(cache, held)
        wanted = jnp.where(is_drafting, start(length), held)
        cache = caught_up(
            match_vocabulary(model, context.target), weights_of(params), cache, context, state.dropped, held, wanted
        )
        draft = jax.jit(functools.partial(grown_tree, params, keys, cache, length, context, limit))  # traced once
        shapes = draft.eval_shape()

        def nothing():
            tree, *fed = shapes
            return operations.root_alone(context.root, tree), *jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), fed)

        tree, pending, places = jax.lax.cond(is_drafting, draft, nothing)
        drafted = _Drafted(State(cache, wanted, state.dropped), is_drafting, pending, places, length)
        return tree, drafted

    def grown_tree(params, keys, cache, length, context: Context, limit) -> tuple[TokenTree, PyTree, Array]:
        """The tree, what is pending and the `places` of the nodes."""
        same_ids, weights = match_vocabulary(model, context.target), weights_of(params)
        logits, pending = feed_last(same_ids, weights, cache, context, length, lag)
        said = DraftOutput(logits, accepted=jnp.ones(len(logits))) if judges else logits
        before_root = _real(length, lag)[:, None, :-1]

        def feed(pending, frontier: Frontier):
            text = jnp.broadcast_to(before_root, (*frontier.tokens.shape, lag - 1))
            output, new = same_ids.forward(
                weights, frontier.tokens, cache, positions=length[:, None] - 1 + frontier.depth,
                mask=jnp.concatenate([text, frontier.mask], 2), earlier=pending, **approximately,
            )  # fmt: skip
            said = DraftOutput(output.logits, accepted=params[1].acceptance(output.hidden)) if judges else output.logits
            return model.insert(pending, new, lag - 1 + frontier.place), said

        pending = model.widen(pending, slots)
        grown, pending = trees.grow(builder, feed, pending, context.root[:, 0], said, keys, context, limit)
        return grown.tree, pending, grown.places

    def update(params, drafted: _Drafted, seen, verdict) -> State:
        """Commit what was accepted."""
        nodes = jnp.pad(verdict.path, ((0, 0), (0, longest)))[:, :longest]
        place = lag - 1 + take_along(drafted.places, jnp.maximum(nodes, 0), 1)  # the root stands at lag - 1
        text = jnp.broadcast_to(jnp.arange(lag - 1), (place.shape[0], lag - 1))
        fed = jnp.concatenate([text, place], 1)
        skip = jnp.maximum(lag - drafted.length, 0)[:, None]  # tokens that a short text does not have
        path = take_along(fed, jnp.minimum(skip + jnp.arange(longest), fed.shape[1] - 1), 1)
        # What the next round does not feed anew; the deepest node may never have been fed, and is behind that.
        accepted = start(drafted.length + verdict.num_nodes) - start(drafted.length)
        accepted = jnp.where(drafted.is_fed, accepted, 0)
        cache, held, dropped = drafted.state
        cache = model.commit(cache, drafted.pending, jnp.clip(path, 0, slots - 1), accepted)
        return State(cache, held + accepted, dropped)

    def resume(params, state: State, kept: Array) -> State:
        """What it holds of a text of which others rewrote all but `kept` tokens; `propose` reads the rest."""
        held = jnp.minimum(state.held, jnp.maximum(kept - state.dropped, 0))
        return state._replace(cache=model.rewind_cache(state.cache, held), held=held)

    return Drafter(
        propose=propose,
        size=TreeSize(builder.num_nodes, builder.max_depth),
        init=init,
        update=update,
        traits=Traits(draws=builder.draws, rewinds=model.rewind is not None, widths=builder.widths),
        hooks=Hooks(
            resume=None if model.rewind is None else resume,
            axes=lambda state: batch_axes.rows_first(state)._replace(cache=model.axes(state.cache)),
        ),
    )


def caught_up(
    model: Model, params: PyTree, cache: PyTree, context: Context, dropped: Array, held: Array, wanted: Array
) -> PyTree:
    """The cache of `held` int32[B] tokens with those up to `wanted` int32[B]; no pass runs where it holds them all.

    dropped: int32[B], how many tokens of the text are before the first that this model counts.
    """
    return catch_up(model, params, cache, context.tokens, held, wanted, dropped, CATCH_UP)


def feed_last(
    model: Model, params: PyTree, cache: PyTree, context: Context, length: Array, lag: int
) -> tuple[Array, PyTree]:
    """Feed the last `lag` tokens of the text, the root last: its logits [B, V], and what is pending.

    `length` int32[B]: of the text as this model counts it. Tokens that a shorter text does not have are fed too, and
    seen by nobody.
    """
    back = jnp.arange(lag) - lag
    tokens = take_along(context.tokens, jnp.maximum(context.length[:, None] + back, 0), 1)
    positions = jnp.maximum(length[:, None] + back, 0)
    mask = jnp.tril(jnp.ones((lag, lag), bool)) & (_real(length, lag)[:, None, :] | jnp.eye(lag, dtype=bool))
    output, pending = model.forward(params, tokens, cache, positions=positions, mask=mask)
    return output.logits[:, -1], pending


def _real(length: Array, lag: int) -> Array:
    """bool[B, lag]: which of the last `lag` tokens a text has."""
    return jnp.arange(lag) >= lag - length[:, None]
