"""Two-model speculative decoding: a smaller model of the same tokenizer drafts a chain or a tree.

Leviathan, Kalman, Matias: Fast Inference from Transformers via Speculative Decoding (2023), arXiv 2211.17192;
Chen et al.: Accelerating Large Language Model Decoding with Speculative Sampling (2023), arXiv 2302.01318.

Rule: x_i ~ q(. | text, x_<i) with the target's own temperature, top-k and top-p. A builder of `specjax.trees` sets the
number and the positions of the drafted tokens. The draft model runs one pass per level, and all nodes share one
key/value cache. The remaining passes do not run once every row has reached its limit or a `stop` condition. In a step
without drafts the draft model does not run; it reads the tokens that its cache lacks before the next draft.
With an acceptance head (SpecDec++, `specjax.models.heads.acceptance`) the draft model's hidden states of the drafted
tokens decide when to stop.
Guarantee: distribution (verified with the q that was sampled).
If the models' outputs differ in size, q has no mass on ids that one of them lacks (`specjax.models.vocabulary`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax import trees
from specjax.adaptive.parsing import parse_depth
from specjax.arrays import batch_axes
from specjax.arrays.indexing import take_along
from specjax.arrays.logit_rows import are_large
from specjax.catalog import Method, Option, TypicalAcceptance, shared
from specjax.engine.prefill import catch_up, prefill
from specjax.errors import UsageError
from specjax.models.heads.acceptance import AcceptanceHead
from specjax.models.skipping.policy import DepthPolicy
from specjax.models.variants.skipping_model import skip_layers
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
    Output,
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
    acceptance=TypicalAcceptance(
        (0.683, 0.103, 0.046, 0.029, 0.013, 0.013, 0.013, 0.012),
        "Qwen2.5-Coder 1.5B with 0.5B at temperature 1, recursive_rejection (docs/verifiers.md)",
    ),
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
        Option("depth", "depth", None, "method of adaptive depth of the draft model, such as s2d:0.7"),
    ),
    arguments=("draft",),
)


CATCH_UP = 16
"""Tokens per pass that reads the tokens decoded while the drafter was idle."""


class State(NamedTuple):
    """State of the draft model between two steps."""

    cache: PyTree  # of all but the last `lag` tokens of the text; of fewer while the drafter is idle
    num_cached: Array  # int32[B], the number of cached tokens
    dropped: Array  # int32[B], prompt tokens that the draft model does not read


class _Drafted(NamedTuple):
    """State within a step: the tokens that the draft model has read, before some of them are committed."""

    state: State
    has_run: Array  # bool[], true if the draft model ran
    pending: PyTree  # cache entries of the last `lag` tokens of the text, then of the tree's inner nodes
    places: Array  # int32[B, N], positions of the tree's nodes in `pending`, from `trees.growing.GrownTree`
    length: Array  # int32[B], length of the text that the draft model reads


def two_model(
    draft: Target,
    num_tokens: int = 4,
    tree: Builder | None = None,
    *,
    stop: Stop | None = None,
    lag: int = 2,
    keep_logits: bool = False,
    acceptance: AcceptanceHead | None = None,
    depth: DepthPolicy | str | None = None,
) -> Drafter:
    """Draft a chain of `num_tokens` tokens of `draft`, or a `tree` from `specjax.trees`.

    Greedy decoding drafts the most likely tokens.

    Args:
      stop: the condition that ends a draft early, one of `trees.stops`.
      lag: number of last tokens that are fed again in each step. After full acceptance the cache lacks 2 tokens. If it
        lacks more, as within `hierarchical` (4, or 3 without `own_token`), an extra pass reads them.
      keep_logits: return the draft's distributions in greedy and coupled decoding too, for controllers that read them.
      acceptance: an acceptance head of the draft model. The stop condition is then `trees.stops.acceptance_head` by
        default. Its authors draft up to 20 tokens.
      depth: a depth policy of `specjax.adaptive`, or its name and options as text. It selects the layers that the draft
        model runs, for example the exits of S2D.

    State: the cache of the draft model. Raises: UsageError if lag < 2 or another setting is below 1.
    """
    if lag < 2:
        raise UsageError(f"lag must be at least 2, not {lag}")
    if acceptance is not None and stop is None and (tree is None or tree.stop is None):
        stop = trees.stops.acceptance_head()
    if depth is not None:
        draft = skip_layers(draft, parse_depth(depth) if isinstance(depth, str) else depth)
    builder = trees.make_builder(num_tokens, tree, stop, keep_logits)
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
    """Return the drafter without its parameters.

    Args:
      shorten: returns the prompts that the draft model reads instead of the target's; the last `lag` tokens are equal.
        Its buffer is that of the cache, so the shortened text must end within it.
      group: group size of the passes below the root (`Model.forward`); the text is always fed exactly. A `lag` above
        the deepest level keeps the approximate entries out of the cache.
      judges: the parameters are those of the draft model and of an acceptance head.
    """
    approximately = {} if group == 1 else {"group": group}
    # All rows feed the same number of tokens, which keeps shapes static. On accelerators they cost one token.
    slots = lag - 1 + builder.places
    longest = builder.max_depth + lag

    weights_of = lambda params: params[0] if judges else params

    def start(length):
        """Return the number of cached tokens of a text at the start of a step."""
        return jnp.maximum(length - lag, 0)

    def init(params, context: Context):
        prompts = context if shorten is None else shorten(context)
        weights, buffer = weights_of(params), prompts.tokens.shape[1]
        cache = model.start_cache(weights, model.select_inputs(prompts.inputs), prompts.length, buffer + slots)
        if shorten is None:  # `read` reads the prompt together with the target
            return State(cache, jnp.zeros_like(prompts.length), jnp.zeros_like(prompts.length))
        cache = prefill(match_vocabulary(model, context.target), weights, cache, prompts.tokens, start(prompts.length))
        return State(cache, start(prompts.length), context.length - prompts.length)

    def read(params, state: State, context: Context, tokens: Array, count: Array, output: Output) -> State:
        """Commit a chunk of the prompt, except its last `lag` tokens."""
        del output
        path = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool)), (*tokens.shape, tokens.shape[1]))
        _, pending = match_vocabulary(model, context.target).forward(
            weights_of(params), tokens, state.cache, positions=state.num_cached[:, None] + path, mask=mask
        )
        num_new = jnp.clip(start(context.length) - state.num_cached, 0, count)
        cache = model.commit(state.cache, pending, path, num_new)
        return state._replace(cache=cache, num_cached=state.num_cached + num_new)

    def propose(params, keys, state: State, context: Context, limit):
        length, is_drafting = context.length - state.dropped, jnp.any(limit > 0)
        cache, num_cached = state.cache, jnp.minimum(state.num_cached, start(length))
        if model.rewind is not None:  # within `hierarchical` it may have read drafts that were rejected later
            cache = model.rewind(cache, num_cached)
        num_target = jnp.where(is_drafting, start(length), num_cached)
        cache = caught_up(
            match_vocabulary(model, context.target),
            weights_of(params),
            cache,
            context,
            state.dropped,
            num_cached,
            num_target,
        )
        draft = jax.jit(functools.partial(grown_tree, params, keys, cache, length, context, limit))  # traced once
        shapes = draft.eval_shape()

        def no_draft():
            tree, *fed = shapes
            return operations.root_only(context.root, tree), *jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), fed)

        tree, pending, places = jax.lax.cond(is_drafting, draft, no_draft)
        same_ids = match_vocabulary(model, context.target)
        if same_ids.unembed is not None:
            output_layer = functools.partial(same_ids.unembed, weights_of(params))
            tree = trees.read_states(builder, tree, output_layer, context.sampling)
        drafted = _Drafted(State(cache, num_target, state.dropped), is_drafting, pending, places, length)
        return tree, drafted

    def grown_tree(params, keys, cache, length, context: Context, limit) -> tuple[TokenTree, PyTree, Array]:
        """Return the tree, the pending cache entries and the `places` of the nodes."""
        same_ids, weights = match_vocabulary(model, context.target), weights_of(params)
        logits_of, is_large = None, are_large(len(length), builder.places, same_ids.vocab_size)
        if is_large and same_ids.best is not None and same_ids.unembed is not None:
            logits_of = functools.partial(same_ids.unembed, weights)
        rows_of = lambda output: output.logits if logits_of is None else output.hidden  # the input of the output layer
        last, pending = feed_last(same_ids, weights, cache, context, length, lag)
        root_output = DraftOutput(rows_of(last), accepted=jnp.ones(len(length))) if judges else rows_of(last)
        before_root = _real(length, lag)[:, None, :-1]

        def feed(pending, frontier: Frontier):
            text = jnp.broadcast_to(before_root, (*frontier.tokens.shape, lag - 1))
            output, new = same_ids.forward(
                weights, frontier.tokens, cache, positions=length[:, None] - 1 + frontier.depth,
                mask=jnp.concatenate([text, frontier.mask], 2), earlier=pending, **approximately,
            )  # fmt: skip
            rows = rows_of(output)
            output_of_node = DraftOutput(rows, accepted=params[1].acceptance(output.hidden)) if judges else rows
            return model.insert(pending, new, lag - 1 + frontier.place), output_of_node

        pending = model.widen(pending, slots)
        grown, pending = trees.grow(
            builder, feed, pending, context.root[:, 0], root_output, keys, context, limit, logits_of
        )
        return grown.tree, pending, grown.places

    def update(params, drafted: _Drafted, observation, verdict) -> State:
        """Commit the accepted tokens to the draft model's cache."""
        nodes = jnp.pad(verdict.path, ((0, 0), (0, longest)))[:, :longest]
        place = lag - 1 + take_along(drafted.places, jnp.maximum(nodes, 0), 1)  # the root is at lag - 1
        text = jnp.broadcast_to(jnp.arange(lag - 1), (place.shape[0], lag - 1))
        fed = jnp.concatenate([text, place], 1)
        skip = jnp.maximum(lag - drafted.length, 0)[:, None]  # tokens that a short text lacks
        path = take_along(fed, jnp.minimum(skip + jnp.arange(longest), fed.shape[1] - 1), 1)
        # Count the tokens that the next step does not feed again. The deepest node may never have been fed; it is after
        # these.
        accepted = start(drafted.length + verdict.num_nodes) - start(drafted.length)
        accepted = jnp.where(drafted.has_run, accepted, 0)
        cache, num_cached, dropped = drafted.state
        cache = model.commit(cache, drafted.pending, jnp.clip(path, 0, slots - 1), accepted)
        return State(cache, num_cached + accepted, dropped)

    def resume(params, state: State, num_kept: Array) -> State:
        """Return the state for a text that was rewritten after the first `num_kept` int32[B] tokens.

        `propose` reads the new tokens.
        """
        num_cached = jnp.minimum(state.num_cached, jnp.maximum(num_kept - state.dropped, 0))
        return state._replace(cache=model.rewind_cache(state.cache, num_cached), num_cached=num_cached)

    return Drafter(
        propose=propose,
        size=TreeSize(builder.num_nodes, builder.max_depth),
        init=init,
        update=update,
        traits=Traits(draws=builder.draws, rewinds=model.rewind is not None, widths=builder.widths, lag=lag),
        hooks=Hooks(
            prefill=read if shorten is None else None,
            resume=None if model.rewind is None else resume,
            axes=lambda state: batch_axes.rows_first(state)._replace(cache=model.axes(state.cache)),
        ),
    )


def caught_up(
    model: Model, params: PyTree, cache: PyTree, context: Context, dropped: Array, num_cached: Array, num_target: Array
) -> PyTree:
    """Extend a cache of `num_cached` int32[B] tokens to `num_target` int32[B]; no pass runs if it already has them.

    Args:
      dropped: int32[B], number of tokens of the text before the first one that this model reads.
    """
    return catch_up(model, params, cache, context.tokens, num_cached, num_target, dropped, CATCH_UP)


def feed_last(
    model: Model, params: PyTree, cache: PyTree, context: Context, length: Array, lag: int
) -> tuple[Output, PyTree]:
    """Feed the last `lag` tokens of the text; return the output [B, ...] for the last one and the pending entries.

    Args:
      length: int32[B], length of the text that this model reads. If a text has fewer than `lag` tokens, the missing
        positions are fed too, but masked.
    """
    back = jnp.arange(lag) - lag
    tokens = take_along(context.tokens, jnp.maximum(context.length[:, None] + back, 0), 1)
    positions = jnp.maximum(length[:, None] + back, 0)
    mask = jnp.tril(jnp.ones((lag, lag), bool)) & (_real(length, lag)[:, None, :] | jnp.eye(lag, dtype=bool))
    output, pending = model.forward(params, tokens, cache, positions=positions, mask=mask)
    return jax.tree.map(lambda x: x[:, -1], output._replace(experts=None)), pending


def _real(length: Array, lag: int) -> Array:
    """Return bool[B, lag], true for those of the last `lag` tokens that a text has."""
    return jnp.arange(lag) >= lag - length[:, None]
