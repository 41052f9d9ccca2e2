"""Draft, verify, commit: the one step that almost every method is."""

from __future__ import annotations

import contextlib
import functools

import jax
import jax.numpy as jnp

from specjax.arrays import batch_axes
from specjax.arrays.indexing import take_along
from specjax.engine import contract_checks, logits_processing, value_checks
from specjax.engine.job import Loop, Parts
from specjax.engine.prefill import CHUNK, prefill_reading
from specjax.engine.target_pass import pass_over
from specjax.errors import UsageError
from specjax.numerics.sampling import DRAFT, entropy, fold_in
from specjax.types import Array, Context, DecodeState, Info, PyTree, Signals, TokenTree, Verdict

BUCKET = 128
"""Smallest size of a token buffer, and what all sizes are multiples of."""


def buffer_size(longest: int, max_new_tokens: int, num_nodes: int, capacity: int | None = None) -> int:
    """Slots of the token buffer and the cache for prompts of at most `longest` tokens and trees of `num_nodes`.

    Behind the text there is room for a whole tree, and for a whole prefill chunk: `dynamic_update_slice` clamps
    silently near capacity, and with this slack it never gets there. Sizes are 1 or 1.5 times a power of two, so that
    texts of all lengths share a handful of programs; none is larger than a text of `capacity` tokens needs.
    """
    needed = longest + max(max_new_tokens + num_nodes, CHUNK) + 1
    if capacity is not None:
        most = max(needed, capacity + max(num_nodes, CHUNK) + 1)
        return min(_bucket(needed), -(-most // BUCKET) * BUCKET)
    return _bucket(needed)


def _bucket(count: int) -> int:
    """The first of 1, 2, 3, 4, 6, 8, 12, 16, ... times BUCKET that is not below `count`."""
    units = max(-(-count // BUCKET), 1)
    power = 1 << (units - 1).bit_length()  # the first power of two not below
    return BUCKET * (power * 3 // 4 if units <= power * 3 // 4 else power)


def on_mesh(function):
    """`function(parts, ...)` traced with the mesh of the target in force, for kernels that must know it."""

    @functools.wraps(function)
    def traced(parts, *arguments, **static):
        mesh = parts.target.model.mesh
        with contextlib.nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(parts, *arguments, **static)

    return traced


@on_mesh
def init(
    parts: Parts, tokens: Array, length: Array, keys: Array, stop: Array, inputs: PyTree = None,
    beside: DecodeState | None = None,
) -> DecodeState:  # fmt: skip
    """The state after reading prompts: `tokens` int32[B, L] with `buffer_size` slots, the rest as in `Job`.

    beside: a batch that the rows are to join; what all of its rows share is theirs from the beginning.
    """
    batch, size = tokens.shape
    target, drafter = parts.target, parts.drafter
    noise = keys if parts.coupled else None
    context = Context(tokens, length, parts.sampling, noise, target=target, inputs=inputs)
    cache = target.model.start_cache(target.params, inputs, length, size)
    draft, control = drafter.init(drafter.params, context), parts.controller.init(batch)
    if beside is not None:
        cache = batch_axes.with_shared(cache, beside.cache, target.model.axes(cache))
        draft = batch_axes.with_shared(draft, beside.draft, drafter.hooks.axes(draft))
        control = batch_axes.with_shared(control, beside.control, parts.controller.axes(control))

    read = drafter.hooks.prefill
    see = lambda draft, *chunk: draft if read is None else read(drafter.params, draft, context, *chunk)
    count = jnp.maximum(length - 1, 0)
    cache, draft = prefill_reading(
        target.model, target.params, cache, tokens, count, see, draft, taps=drafter.traits.taps
    )
    return DecodeState(
        tokens=tokens,
        length=length,
        done=length >= stop,
        keys=keys,
        stop=stop,
        cache=cache,
        draft=draft,
        control=control,
        finite=jnp.ones((batch,), bool),
        processed=logits_processing.begin(parts.processors, tokens, length, target.model.vocab_size),
    )


@on_mesh
def step(parts: Parts, state: DecodeState) -> tuple[DecodeState, Info]:
    """Draft a tree, score it with one pass of the target, keep what the verifier accepts.

    Randomness is a function of the row's key and of positions only. The target's draws at a position use
    (key, position), so rules that sample the target directly give the same text whatever was drafted. The draft of a
    round uses (key, length of the text): drawn afresh each round, since discarded drafts may have taught the drafter.
    """
    drafter, controller = parts.drafter, parts.controller
    noise = state.keys if parts.coupled else None
    left = None if parts.serving else state.stop - state.length
    context = Context(state.tokens, state.length, parts.sampling, noise, state.cache, parts.target, left=left)
    tree, draft, violations = _draft(parts, state, context)
    observe = functools.partial(drafter.observe, drafter.params, draft, context)
    prompt = drafter.hooks.soft_prompts and functools.partial(
        drafter.hooks.soft_prompts, drafter.params, draft, context
    )
    cache, passed = pass_over(parts, state, tree, observe, prompt)
    draft = drafter.update(drafter.params, draft, passed.seen, passed.verdict)
    contract_checks.check_same(f"the drafter's update ({contract_checks.name_of(drafter.update)})", state.draft, draft)
    verdict, kept, (emitted, count, is_eos) = passed.verdict, passed.kept, passed.emitted
    finite = state.finite & (passed.finite | state.done)
    index = jnp.arange(drafter.num_nodes)
    place = jnp.where(index < count[:, None], state.length[:, None] + index, state.tokens.shape[1])
    length = state.length + count
    info = Info(
        tokens=emitted,
        emitted=count,
        accepted=jnp.clip(verdict.num_nodes - 1, 0, count),
        drafted=jnp.where(state.done, 0, jnp.sum(tree.valid, 1, dtype=jnp.int32) - 1),
        drafted_depth=passed.depth,
        active=~state.done,
        hit_eos=is_eos,
        logits=kept.logits,
        logprobs=kept.logprobs,
        violations=_both(violations, kept.violations),
        scored=kept.scored,
        signals=_signals(tree, verdict) if controller.reads_signals else None,
        finite=finite,
    )
    control = controller.update(state.control, info)
    contract_checks.check_same("the controller's update", state.control, control)
    return state._replace(
        tokens=state.tokens.at[jnp.arange(len(length))[:, None], place].set(emitted, mode="drop"),
        length=length,
        done=state.done | is_eos | (length >= state.stop),
        cache=cache,
        draft=draft,
        control=control,
        finite=finite,
        processed=logits_processing.updated(parts.processors, state.processed, emitted, count),
    ), info


def _draft(parts: Parts, state: DecodeState, context: Context) -> tuple[TokenTree, PyTree, Array | None]:
    """The tree of a round, empty in rows that have ended, the drafter's state and, when debugging, what the tree
    violates; it is empty then too."""
    drafter, batch = parts.drafter, len(state.length)
    limit = parts.controller.limit(state.control)
    contract_checks.check_limit(limit, batch)
    limit = jnp.clip(limit, 0, 0 if parts.plain else drafter.max_depth)
    # Deeper nodes than the row may still emit are wasted; a row that has ended keeps no draft loop going.
    limit = jnp.minimum(limit, jnp.where(state.done, 0, jnp.maximum(state.stop - state.length - 1, 0)))
    keys = fold_in(fold_in(state.keys, state.length), jnp.full_like(state.length, DRAFT))
    tree, draft = drafter.propose(drafter.params, keys, state.draft, context, limit)
    contract_checks.check_tree(drafter, tree, batch, parts.target.model.vocab_size)
    violations = (
        value_checks.of_draft(tree, drafter.traits.draws, context.root, limit) if parts.keep.violations else None
    )
    # Whatever was drafted, it hangs below the last token and every node stands behind its parent: so any walk ends.
    node = jnp.arange(drafter.num_nodes, dtype=jnp.int32)
    goes_on = ~state.done if violations is None else ~state.done & (violations == 0)
    if parts.plain:
        goes_on = jnp.zeros_like(goes_on)
    return tree._replace(
        tokens=jnp.where(node == 0, context.root, tree.tokens),
        parents=jnp.minimum(tree.parents, node - 1),
        valid=tree.valid & goes_on[:, None] | (node == 0),
    ), draft, violations  # fmt: skip


def _both(found: Array | None, more: Array | None) -> Array | None:
    return None if found is None or more is None else found | more


def _signals(tree: TokenTree, verdict: Verdict) -> Signals:
    """Raises: UsageError if the draft holds no distributions."""
    if tree.logits is None:
        raise UsageError(
            "the controller reads the drafter's distributions, which this drafter does not hand on; "
            "use two_model(..., keep_logits=True) or another controller"
        )
    node = jnp.arange(tree.tokens.shape[1])
    log_q = jax.nn.log_softmax(tree.logits, -1)
    has_child = jnp.any((tree.parents[:, None, :] == node[:, None]) & tree.valid[:, None, :], 2)
    along = lambda x: take_along(x, jnp.maximum(verdict.path, 0), 1)
    return Signals(
        confidence=along(jnp.exp(jnp.max(log_q, -1))),
        entropy=along(entropy(log_q)),
        judged=(node < verdict.num_nodes[:, None]) & along(has_child),
    )


def axes(parts: Parts, state: DecodeState) -> DecodeState:
    """The place of the rows in the shape of each array of a state; `buffers.SHARED` of what all rows share."""
    return batch_axes.rows_first(state)._replace(
        cache=parts.target.model.axes(state.cache),
        draft=parts.drafter.hooks.axes(state.draft),
        control=parts.controller.axes(state.control),
    )


LOOP = Loop(init, step, axes)
