"""The step of almost every method: draft a tree, verify it with one target pass, commit the accepted path."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax.arrays import batch_axes
from specjax.arrays.indexing import take_along
from specjax.controllers.fixed import fixed
from specjax.engine import contract_checks, value_checks
from specjax.engine.job import DecodeLoop, Keep, Parts
from specjax.engine.prefill import CHUNK, chunk_reader, in_chunks, wide_chunk
from specjax.engine.target_pass import pass_over
from specjax.errors import UsageError
from specjax.numerics.sampling import DRAFT, entropy, fold_in
from specjax.processors import pipeline
from specjax.types import (
    Array,
    Context,
    DecodeState,
    Drafter,
    Info,
    Output,
    PyTree,
    Signals,
    TokenLogprobs,
    TokenTree,
    Verdict,
)
from specjax.verifiers.node_logits import all_rows
from specjax.verifiers.token_logprobs import text_logprobs, zero_logprobs

BUCKET = 128
"""Smallest size of a token buffer. All sizes are multiples of it."""


def buffer_size(longest: int, max_new_tokens: int, num_nodes: int, capacity: int | None = None) -> int:
    """Return the number of slots of the token buffer and the cache.

    The buffer has slots for a complete tree and a complete prefill chunk after the text. `dynamic_update_slice`
    silently clamps its start near the end of a buffer, and these slots prevent that. Sizes are 1 or 1.5 times a power
    of two, so texts of all lengths share a few programs. No size exceeds the needs of `capacity` tokens.

    Args:
      longest: length of the longest prompt. num_nodes: nodes of a tree. capacity: maximum length of a text.
    """
    needed = longest + max(max_new_tokens + num_nodes, CHUNK) + 1
    if capacity is not None:
        limit = max(needed, capacity + max(num_nodes, CHUNK) + 1)
        return min(round_up(needed), -(-limit // BUCKET) * BUCKET)
    return round_up(needed)


def round_up(count: int, unit: int = BUCKET) -> int:
    """Return the smallest of 1, 2, 3, 4, 6, 8, 12, 16, ... times `unit` that is at least `count`."""
    units = max(-(-count // unit), 1)
    power = 1 << (units - 1).bit_length()  # the smallest power of two that is at least `units`
    return unit * (power * 3 // 4 if units <= power * 3 // 4 else power)


def on_mesh(function):
    """Wrap `function(parts, ...)` so that it is traced under the target's mesh, which some kernels need."""

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
    """Prefill the prompts and return the first state.

    Args:
      tokens: int32[B, L], with `buffer_size` slots. length, keys, stop, inputs: as in `Job`.
      beside: state of a running batch that the new rows will join. Arrays shared by all rows are taken from it.
    """
    state = begin(parts, tokens, length, keys, stop, inputs)
    if beside is not None:
        state = batch_axes.with_shared(state, beside, axes(parts, state))
    wide = wide_chunk(len(tokens), slots=tokens.shape[1])
    carry = state.cache, (state.draft, None)
    cache, (draft, _) = in_chunks(_reader(parts, state, inputs), carry, jnp.max(_unread(length)), wide, CHUNK)
    target = parts.target
    cache = target.model.cache_after_prompt(target.params, cache, tokens, length, parts.drafter.num_nodes)
    return state._replace(cache=cache, draft=draft)


@on_mesh
def begin(parts: Parts, tokens: Array, length: Array, keys: Array, stop: Array, inputs: PyTree = None) -> DecodeState:
    """Return the state of prompts of which no token is read yet. The arguments are those of `init`."""
    batch, size = tokens.shape
    target, drafter = parts.target, parts.drafter
    inputs = target.model.encode_inputs(target.params, inputs)  # once, for the target and for a draft model
    return DecodeState(
        tokens=tokens,
        length=length,
        done=length >= stop,
        keys=keys,
        stop=stop,
        cache=target.model.start_cache(target.params, inputs, length, size),
        draft=drafter.init(drafter.params, _prompt_context(parts, tokens, length, keys, inputs)),
        control=parts.controller.init(batch),
        finite=jnp.ones((batch,), bool),
        processed=pipeline.init_states(parts.processors, tokens, length, target.model.vocab_size),
    )


@on_mesh
def read(
    parts: Parts, state: DecodeState, start: Array, size: int, inputs: PyTree = None, scores: Array | None = None
) -> tuple[DecodeState, TokenLogprobs | None]:  # fmt: skip
    """Read `size` tokens of the prompts from `start` int32[] on, of a state that `begin` returned.

    Args:
      scores: bool[], True if the log-probabilities of the tokens after them are computed. None: never.

    Returns: the state and TokenLogprobs [B, size], or None without `scores` or if the loop cannot compute them.
    """
    logprobs, score = None, lambda logprobs, *chunk: logprobs
    if scores is not None and can_score(parts):
        logprobs, score = _scorer(parts, state.tokens, start, size, scores)
    read_chunk = _reader(parts, state, inputs, score)
    cache, (draft, logprobs) = read_chunk(start, size, (state.cache, (state.draft, logprobs)))
    return state._replace(cache=cache, draft=draft), logprobs


def can_score(parts: Parts) -> bool:
    """Return True if `read` can compute the log-probabilities of prompts."""
    return parts.keep.alternatives is not None and parts.target.model.unembed is not None


def _scorer(
    parts: Parts, tokens: Array, start: Array, size: int, scores: Array
) -> tuple[TokenLogprobs, Callable[..., TokenLogprobs]]:  # fmt: skip
    """Return zeros, and a function that reads the log-probabilities of the tokens after a chunk of the prompts."""
    target, count = parts.target, parts.keep.alternatives
    assert count is not None
    following = jnp.take(tokens, start + 1 + jnp.arange(size), axis=1, mode="clip")

    def score(logprobs: TokenLogprobs, window: Array, num_new: Array, output: Output) -> TokenLogprobs:
        end = jnp.where(scores, jnp.max(num_new), 0)
        return text_logprobs(target, output.hidden, following, end, logprobs)

    return zero_logprobs(following.shape, count), score


def _reader(
    parts: Parts, state: DecodeState, inputs: PyTree, score: Callable[..., PyTree] = lambda logprobs, *chunk: logprobs
) -> Callable:  # fmt: skip
    """Return the `chunk_reader` of the prompts, with the carry (cache, (state of the drafter, state of `score`)).

    The drafter's prefill hook and `score` read each chunk too.
    """
    target, drafter, hook = parts.target, parts.drafter, parts.drafter.hooks.prefill
    context = _prompt_context(parts, state.tokens, state.length, state.keys, inputs)
    read_images = target.model.images
    context = context._replace(images=read_images and read_images(state.cache))

    def read(carry: tuple[PyTree, PyTree], *chunk: Any) -> tuple[PyTree, PyTree]:
        draft = carry[0] if hook is None else hook(drafter.params, carry[0], context, *chunk)
        return draft, score(carry[1], *chunk)

    return chunk_reader(
        target.model, target.params, state.tokens, _unread(state.length), read, taps=drafter.traits.taps
    )


def _unread(length: Array) -> Array:
    """Return the number of prompt tokens that are read before the first step: all except the last one."""
    return jnp.maximum(length - 1, 0)


def _prompt_context(parts: Parts, tokens: Array, length: Array, keys: Array, inputs: PyTree) -> Context:
    noise = keys if parts.coupled else None
    return Context(tokens, length, parts.sampling, noise, target=parts.target, inputs=inputs)


@on_mesh
def step(parts: Parts, state: DecodeState) -> tuple[DecodeState, Info]:
    """Draft a tree, score it with one target pass, and commit the part that the verifier accepts.

    Randomness depends only on the row's key and on positions. The target's draws at a position use (key, position). So
    verifiers that sample the target directly return the same text for any draft. The draft of a step uses (key, length
    of the text). It uses new random numbers in each step, because the drafter may have learned from a discarded draft.
    """
    drafter, controller = parts.drafter, parts.controller
    noise = state.keys if parts.coupled else None
    remaining = None if parts.serving else state.stop - state.length
    read_source = parts.target.model.source
    context = Context(
        state.tokens, state.length, parts.sampling, noise, state.cache, parts.target, remaining=remaining,
        unlimited=() if controller is fixed() else None, source=read_source and read_source(state.cache),
    )  # fmt: skip
    tree, draft, violations, limit = _draft(parts, state, context)
    observe = functools.partial(drafter.observe, drafter.params, draft, context)
    hook = drafter.hooks.soft_prompts
    prompt = hook and functools.partial(hook, drafter.params, draft, context)
    cache, passed = pass_over(parts, state, tree, observe, prompt)
    draft = drafter.update(drafter.params, draft, passed.observed, passed.verdict)
    contract_checks.check_same(f"the drafter's update ({contract_checks.name_of(drafter.update)})", state.draft, draft)
    verdict, diagnostics, (emitted, count, is_eos, failed) = passed.verdict, passed.diagnostics, passed.emitted
    finite = state.finite & ~failed
    index = jnp.arange(drafter.num_nodes)
    place = jnp.where(index < count[:, None], state.length[:, None] + index, state.tokens.shape[1])
    length = state.length + count
    info = Info(
        tokens=emitted,
        emitted=count,
        accepted=jnp.clip(verdict.num_nodes - 1, 0, count),
        drafted=jnp.where(state.done, 0, jnp.sum(tree.valid, 1, dtype=jnp.int32) - 1),
        drafted_depth=passed.depth,
        offered_depth=limit,
        active=~state.done,
        hit_eos=is_eos,
        logits=diagnostics.logits,
        logprobs=diagnostics.logprobs,
        violations=_merge_bits(violations, diagnostics.violations),
        scored=diagnostics.scored,
        signals=_signals(tree, verdict) if controller.reads_signals else None,
        finite=finite,
        raw_logprobs=diagnostics.raw_logprobs,
        experts=diagnostics.experts,
        confidence=_chain_confidence(drafter, tree) if controller.reads_confidence else None,
    )
    control = controller.update(state.control, info)
    contract_checks.check_same("the controller's update", state.control, control)
    return state._replace(
        tokens=state.tokens.at[jnp.arange(len(length))[:, None], place].set(emitted, mode="drop"),
        length=length,
        done=state.done | is_eos | failed | (length >= state.stop),
        cache=cache,
        draft=draft,
        control=control,
        finite=finite,
        processed=pipeline.update_states(parts.processors, state.processed, emitted, count),
    ), info


def _draft(parts: Parts, state: DecodeState, context: Context) -> tuple[TokenTree, PyTree, Array | None, Array]:
    """Return the tree of this step, the drafter's state, the violations of the tree, and its limit int32[B].

    There are violations only under debug=True.

    The tree is empty in rows that have ended, and in rows with a violation.
    """
    drafter, batch = parts.drafter, len(state.length)
    vocab_size = parts.target.model.vocab_size
    limit = parts.controller.limit(state.control)
    contract_checks.check_limit(limit, batch)
    limit = jnp.clip(limit, 0, 0 if parts.plain else drafter.max_depth)
    # Nodes deeper than the number of remaining tokens are wasted, and rows that have ended need no draft loop.
    limit = jnp.minimum(limit, jnp.where(state.done, 0, jnp.maximum(state.stop - state.length - 1, 0)))
    keys = fold_in(fold_in(state.keys, state.length), jnp.full_like(state.length, DRAFT))
    tree, draft = drafter.propose(drafter.params, keys, state.draft, context, limit)
    contract_checks.check_tree(drafter, tree, batch, vocab_size)
    if tree.logits is not None and (parts.keep != Keep() or parts.controller.reads_signals):
        tree = tree._replace(logits=all_rows(tree.logits))
    violations = None
    if parts.keep.violations:
        violations = value_checks.find_draft_violations(tree, drafter.traits.draws, context.root, limit, vocab_size)
    # Enforce the root and the order of parents and children for any draft, so that every walk along the tree ends.
    node = jnp.arange(drafter.num_nodes, dtype=jnp.int32)
    is_drafting = ~state.done if violations is None else ~state.done & (violations == 0)
    if parts.plain:
        is_drafting = jnp.zeros_like(is_drafting)
    return tree._replace(
        tokens=jnp.where(node == 0, context.root, tree.tokens),
        parents=jnp.minimum(tree.parents, node - 1),
        valid=tree.valid & is_drafting[:, None] | (node == 0),
    ), draft, violations, limit  # fmt: skip


def _merge_bits(first: Array | None, second: Array | None) -> Array | None:
    return None if first is None or second is None else first | second


def _chain_confidence(drafter: Drafter, tree: TokenTree) -> Array:
    """Return the drafter's confidence float32[B, D] in the tokens of a chain.

    Raises: UsageError for a draft without confidence, or a tree that is no chain.
    """
    if tree.confidence is None or drafter.num_nodes != drafter.max_depth + 1:
        raise UsageError(
            "the controller budget reads the trained confidence in the tokens of a chain, which this drafter does not "
            "return; use a chain of dspark with keep_confidence, or the controller goodput"
        )
    return tree.confidence[:, 1:]


def _signals(tree: TokenTree, verdict: Verdict) -> Signals:
    """Return the statistics of the drafter's distributions along the accepted path.

    Raises: UsageError if the draft has no distributions.
    """
    if tree.logits is None:
        raise UsageError(
            "the controller reads the drafter's distributions, which this drafter does not return; "
            "use two_model with keep_logits, or another controller"
        )
    node = jnp.arange(tree.tokens.shape[1])
    log_q = jax.nn.log_softmax(all_rows(tree.logits), -1)
    has_child = jnp.any((tree.parents[:, None, :] == node[:, None]) & tree.valid[:, None, :], 2)
    along_path = lambda x: take_along(x, jnp.maximum(verdict.path, 0), 1)
    return Signals(
        confidence=along_path(jnp.exp(jnp.max(log_q, -1))),
        entropy=along_path(entropy(log_q)),
        judged=(node < verdict.num_nodes[:, None]) & along_path(has_child),
    )


def axes(parts: Parts, state: DecodeState) -> DecodeState:
    """Return the position of the batch axis in each array of a state, or `batch_axes.SHARED` for shared arrays."""
    return batch_axes.rows_first(state)._replace(
        cache=parts.target.model.axes(state.cache),
        draft=parts.drafter.hooks.axes(state.draft),
        control=parts.controller.axes(state.control),
    )


LOOP = DecodeLoop(init, step, axes, begin=begin, read=read)
