"""Draft, verify, commit: the one step that almost every method is."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.engine.checks import violations
from specjax.engine.prefill import CHUNK, prefill_reading
from specjax.errors import UsageError
from specjax.indexing import take_along
from specjax.sampling import DRAFT, entropy, fold_in, node_keys, warp
from specjax.trees import operations
from specjax.types import (
    Array,
    Context,
    Controller,
    Decoder,
    DecodeState,
    Drafter,
    Info,
    PyTree,
    Sampling,
    Scored,
    Signals,
    Stats,
    Target,
    TokenTree,
    Verdict,
)
from specjax.verifiers import Verifier


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Inputs:
    """What stays the same from step to step. A pytree: arguments of the compiled step, never constants of it."""

    target: Target
    drafter: Drafter
    verifier: Verifier
    coupled: bool = field(metadata={"static": True})  # draft with the noise of the target's own draws
    sampling: Sampling
    eos: Array  # int32[E], ids that end a row
    debug: bool = field(default=False, metadata={"static": True})  # fill `Info.violations`
    keep_laws: bool = field(default=False, metadata={"static": True})  # fill `Info.laws`
    keep_logprobs: bool = field(default=False, metadata={"static": True})  # fill `Info.logprobs`
    keep_scored: bool = field(default=False, metadata={"static": True})  # fill `Info.scored`


def buffer_size(prompt_buffer: int, max_new_tokens: int, drafter: Drafter) -> int:
    """Slots of the token buffer and the cache: room for a whole tree, and for a whole prefill chunk, behind the text.

    `dynamic_update_slice` clamps silently near capacity; with this slack it never gets there.
    """
    return prompt_buffer + max(max_new_tokens + drafter.num_nodes, CHUNK) + 1


@functools.cache
def speculative(controller: Controller) -> Decoder:
    """The decoder that drafts a tree, scores it with one pass of the target and keeps what the verifier accepts.

    Randomness is a function of the row's key and of positions only. The target's draws at a position use
    (key, position), so rules that sample the target directly give the same text whatever was drafted. The draft of a
    round uses (key, length of the text): drawn afresh each round, since discarded drafts may have taught the drafter.
    """

    def init(inputs: Inputs, tokens: Array, length: Array, keys: Array, stop: Array) -> DecodeState:
        """`tokens` int32[B, L] with `buffer_size` slots, `length` int32[B] of the prompts, `stop` int32[B]."""
        batch, size = tokens.shape
        target, drafter = inputs.target, inputs.drafter
        context = Context(tokens, length, inputs.sampling, keys if inputs.coupled else None)
        cache = target.model.init_cache(batch, size)
        draft = drafter.init(drafter.params, context)

        def read(draft, *chunk):
            return draft if drafter.read is None else drafter.read(drafter.params, draft, *chunk)

        count = jnp.maximum(length - 1, 0)
        cache, draft = prefill_reading(
            target.model, target.params, cache, tokens, count, read, draft, taps=drafter.taps
        )
        return DecodeState(
            tokens=tokens,
            length=length,
            done=length >= stop,
            keys=keys,
            stop=stop,
            cache=cache,
            draft=draft,
            control=controller.init(batch),
        )

    def step(inputs: Inputs, state: DecodeState) -> tuple[DecodeState, Info]:
        drafter = inputs.drafter
        noise = state.keys if inputs.coupled else None
        context = Context(state.tokens, state.length, inputs.sampling, noise, state.cache)
        limit = jnp.clip(controller.limit(state.control), 0, drafter.max_depth)
        # Deeper nodes than the row may still emit are wasted; a row that has ended keeps no draft loop going.
        limit = jnp.minimum(limit, jnp.where(state.done, 0, jnp.maximum(state.stop - state.length - 1, 0)))
        draft_keys = fold_in(fold_in(state.keys, state.length), jnp.full_like(state.length, DRAFT))
        tree, draft = drafter.propose(drafter.params, draft_keys, state.draft, context, limit)
        tree = tree._replace(valid=tree.valid & (~state.done[:, None] | (jnp.arange(drafter.num_nodes) == 0)))
        cache, draft, outcome = _pass(inputs, state, tree, draft)
        verdict, kept, (emitted, count, is_eos) = outcome.verdict, outcome.kept, outcome.emitted
        rows = jnp.arange(state.length.shape[0])[:, None]
        place = state.length[:, None] + jnp.arange(drafter.num_nodes)
        place = jnp.where(jnp.arange(drafter.num_nodes) < count[:, None], place, state.tokens.shape[1])
        length = state.length + count
        info = Info(
            tokens=emitted,
            emitted=count,
            accepted=jnp.minimum(verdict.num_nodes - 1, count),
            drafted=jnp.where(state.done, 0, jnp.sum(tree.valid, 1, dtype=jnp.int32) - 1),
            drafted_depth=outcome.depth,
            active=~state.done,
            hit_eos=is_eos,
            laws=kept.laws,
            logprobs=kept.logprobs,
            violations=kept.violations,
            scored=outcome.scored,
            signals=_signals(tree, verdict) if controller.reads_signals else None,
        )
        return state._replace(
            tokens=state.tokens.at[rows, place].set(emitted, mode="drop"),
            length=length,
            done=state.done | is_eos | (length >= state.stop),
            cache=cache,
            draft=draft,
            control=controller.update(state.control, info),
        ), info

    return Decoder(on_mesh(init), on_mesh(step))


def on_mesh(function):
    """Of a function whose first argument has a `target`, while it is traced: lets kernels see that they are part of a
    program for several devices, which cannot split them."""

    @functools.wraps(function)
    def traced(inputs, *arguments, **static):
        mesh = inputs.target.model.mesh
        with contextlib.nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(inputs, *arguments, **static)

    return traced


def _signals(tree: TokenTree, verdict: Verdict) -> Signals:
    """Raises: UsageError if the draft holds no laws."""
    if tree.logits is None:
        raise UsageError(
            "the controller reads the drafter's laws, which this drafter does not hand on; "
            "use two_model(..., keep_laws=True) or another controller"
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


class _Kept(NamedTuple):
    """Fields of `Info` that need the target's logits."""

    laws: Array | None
    logprobs: Array | None
    violations: Array | None


class _Outcome(NamedTuple):
    """What a pass leaves behind besides the cache and the drafter's state."""

    verdict: Verdict
    emitted: tuple[Array, Array, Array]  # see `_emit`
    depth: Array  # int32[B], of the deepest valid node
    kept: _Kept
    scored: Scored | None


def _pass(inputs: Inputs, state: DecodeState, tree: TokenTree, draft: PyTree) -> tuple[PyTree, PyTree, _Outcome]:
    """One target pass over the tree: the cache with what was accepted, what the drafter learnt, and the outcome.

    The pass is as wide as the widest valid draft among the rows, rounded up to one of the drafter's `widths`: an empty
    draft costs one plain step. Which width ran changes rounding, never the law.
    """
    n = inputs.drafter.num_nodes
    widths = sorted({w for w in inputs.drafter.widths if w < n} | {n})
    if inputs.keep_scored:
        widths = [n]
    needed = jnp.max(jnp.sum(tree.valid, 1))

    def over(widths: list[int], cache: PyTree, draft: PyTree) -> tuple[PyTree, PyTree, _Outcome]:
        verdict, pending, draft, *others = _score(inputs, state, tree, draft, cache, widths, needed)
        emitted = _emit(inputs, state, tree, verdict)
        keep = jnp.minimum(verdict.num_nodes, emitted[1])
        cache = inputs.target.model.commit(cache, pending, verdict.path[:, : widths[-1]], keep)
        return cache, draft, _Outcome(verdict, emitted, *others)

    if widths[0] > 1 or len(widths) == 1:
        return over(widths, state.cache, draft)
    # A plain step is a program of its own, with nothing in it that only wider ones need: where nothing is drafted for
    # 16 rows of SmolLM2, keys and values with room for 16 nodes took 8 ms of 95 on two cores. Both are loops of one
    # turn or none, not branches: what a loop carries is updated in place, what a branch returns is copied.
    plain = jax.jit(functools.partial(over, [1]))  # traced once, for the shapes and for the loop
    *_, outcome = plain.eval_shape(state.cache, draft)
    carry = state.cache, draft, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), outcome)
    is_plain = (needed == 1).astype(jnp.int32)
    carry = jax.lax.fori_loop(0, is_plain, lambda _, carry: plain(*carry[:2]), carry)
    return jax.lax.fori_loop(0, 1 - is_plain, lambda _, carry: over(widths[1:], *carry[:2]), carry)


def _score(
    inputs: Inputs, state: DecodeState, tree: TokenTree, draft: PyTree, cache: PyTree, widths: list[int], needed: Array
):
    """The verdict, the pending cache entries of the largest of `widths`, what the drafter learnt, and `_Outcome` from
    `depth` on, of a pass over the first nodes of the tree, at least `needed` int32[]."""
    n = inputs.drafter.num_nodes
    model, params = inputs.target.model, inputs.target.params

    def at_width(width: int, draft: PyTree):
        part = operations.cut(tree, width)
        mask = operations.ancestor_mask(part.parents, part.valid, inputs.drafter.max_depth)
        depth = jnp.sum(mask, 2) - 1  # 0 of invalid nodes
        positions = state.length[:, None] - 1 + depth
        output, pending = model.forward(
            params, part.tokens, cache, positions=positions, mask=mask, taps=inputs.drafter.taps
        )
        keys = node_keys(state.keys, state.length, depth)  # [B, width]
        # The greedy rule needs no laws.
        logits = output.logits if inputs.verifier.guarantee == "greedy" else warp(output.logits, inputs.sampling)
        verdict = inputs.verifier(keys, part, logits, output.hidden)
        draft = inputs.drafter.update(inputs.drafter.params, draft, part, verdict, output)
        along_path = jnp.maximum(verdict.path, 0)[:, :, None]
        kept = _Kept(
            laws=take_along(logits, along_path, 1) if inputs.keep_laws else None,
            logprobs=_logprobs(inputs, part, verdict, logits) if inputs.keep_logprobs else None,
            violations=violations(part, inputs.drafter.draws, logits) if inputs.debug else None,
        )
        verdict = verdict._replace(path=jnp.pad(verdict.path, ((0, 0), (0, n - width)), constant_values=-1))
        kept = kept._replace(laws=_widen(kept.laws, n), logprobs=_widen(kept.logprobs, n))
        scored = Scored(part, logits, output.hidden) if inputs.keep_scored else None
        return verdict, pending, draft, jnp.max(depth, 1), kept, scored

    if len(widths) == 1:
        return at_width(widths[0], draft)
    widest = jax.jit(functools.partial(at_width, widths[-1]))  # traced once, for the shapes and for its branch
    _, full, *_ = widest.eval_shape(draft)  # branches must agree in shape

    def padded(width: int, draft: PyTree):
        verdict, pending, *others = at_width(width, draft)
        return verdict, jax.tree.map(_pad_to, pending, full), *others

    branches: list[Callable] = [*(functools.partial(padded, width) for width in widths[:-1]), widest]
    return jax.lax.switch(jnp.sum(needed > jnp.array(widths)), branches, draft)


def _widen(x: Array | None, n: int) -> Array | None:
    """x [B, T, ...] with n in place of T, zeros behind."""
    return None if x is None else _pad_to(x, jax.ShapeDtypeStruct((x.shape[0], n, *x.shape[2:]), x.dtype))


def _pad_to(x: Array, like: jax.ShapeDtypeStruct) -> Array:
    return jnp.pad(x, [(0, big - small) for small, big in zip(x.shape, like.shape, strict=True)])


def _logprobs(inputs: Inputs, tree: TokenTree, verdict: Verdict, logits: Array) -> Array:
    """float32[B, N]: log p of each token of the verdict under the law [B, N, V] that it was drawn from, then zeros."""
    n = tree.tokens.shape[1]
    index = jnp.arange(n)
    if inputs.verifier.guarantee == "greedy":  # its law has one token
        return jnp.zeros(tree.tokens.shape)
    # By reductions over the vocabulary, which a mesh may split.
    place = jnp.where(index < verdict.num_nodes[:, None], verdict.path, n)
    rows = jnp.arange(place.shape[0])[:, None]
    following = jnp.zeros(tree.tokens.shape, jnp.int32).at[rows, place].set(_tokens(tree, verdict), mode="drop")
    is_token = jnp.arange(logits.shape[-1]) == following[:, :, None]
    log_p = jnp.max(jnp.where(is_token, logits, -jnp.inf), -1) - jax.nn.logsumexp(logits, -1)
    return jnp.where(place < n, take_along(log_p, jnp.minimum(place, n - 1), 1), 0.0)


def _tokens(tree: TokenTree, verdict: Verdict) -> Array:
    """int32[B, N]: the accepted drafts, without the root, and the target's own token; then padding."""
    following = jnp.roll(verdict.path, -1, 1)
    drafted = take_along(tree.tokens, jnp.maximum(following, 0), 1)
    accepted = verdict.num_nodes[:, None] - 1
    return jnp.where(jnp.arange(tree.tokens.shape[1]) < accepted, drafted, verdict.next_token[:, None])


def _emit(inputs: Inputs, state: DecodeState, tree: TokenTree, verdict: Verdict) -> tuple[Array, Array, Array]:
    """The tokens of a verdict, cut at the first eos and at the row's limit.

    Returns: tokens int32[B, N], how many of them count int32[B] (0 for finished rows), and whether the last is
    an eos bool[B].
    """
    n = tree.tokens.shape[1]
    index = jnp.arange(n)
    tokens = _tokens(tree, verdict)
    room = jnp.where(state.done, 0, state.stop - state.length)[:, None]
    alive = index < jnp.minimum(verdict.num_nodes[:, None], room)
    ends = jnp.any(tokens[:, :, None] == inputs.eos, -1) & alive
    first = jnp.argmax(ends, 1)
    is_eos = jnp.any(ends, 1)
    count = jnp.where(is_eos, first + 1, jnp.sum(alive, 1))
    return tokens, count.astype(jnp.int32), is_eos


def zero_stats(batch: int, max_depth: int, debug: bool = False) -> Stats:
    """Sums before the first step."""
    row, by_depth = jnp.zeros((batch,), jnp.int32), jnp.zeros((batch, max_depth), jnp.int32)
    return Stats(row, row, row, by_depth, by_depth, jnp.zeros((batch,), bool), row if debug else None)


def add_stats(stats: Stats, info: Info) -> Stats:
    """Sums after one more step."""
    below = jnp.arange(stats.drafted_by_depth.shape[1])
    found = [bits for bits in (stats.violations, info.violations) if bits is not None]
    return Stats(
        target_passes=stats.target_passes + info.active,
        drafted=stats.drafted + info.drafted,
        accepted=stats.accepted + info.accepted,
        drafted_by_depth=stats.drafted_by_depth + (below < jnp.where(info.active, info.drafted_depth, 0)[:, None]),
        accepted_by_depth=stats.accepted_by_depth + (below < info.accepted[:, None]),
        hit_eos=stats.hit_eos | info.hit_eos,
        violations=functools.reduce(jnp.bitwise_or, found) if found else None,
    )
