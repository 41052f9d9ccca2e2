"""One pass of the target over a drafted tree: as wide as the draft, judged by the verifier, committed to the cache."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays import batch_axes
from specjax.arrays.branching import narrow_or_wide
from specjax.arrays.indexing import take_along
from specjax.engine import contract_checks, logits_processing, value_checks
from specjax.engine.job import Parts
from specjax.numerics.sampling import is_greedy, node_keys, warp
from specjax.trees import operations
from specjax.types import Appended, Array, DecodeState, Output, PyTree, Scored, SoftPrompts, TokenTree, Verdict
from specjax.verifiers import greedy

ObserveFn = Callable[[TokenTree, Verdict, Output], PyTree]
PromptFn = Callable[[TokenTree], SoftPrompts]


class Emitted(NamedTuple):
    """The tokens of a verdict, cut at the first eos and at the row's limit."""

    tokens: Array  # int32[B, N]
    number: Array  # int32[B], how many of them; 0 for finished rows
    is_eos: Array  # bool[B], whether the last of these is an eos


class Diagnostics(NamedTuple):
    """Fields of `Info` that need the target's logits, those that were asked for."""

    logits: Array | None
    logprobs: Array | None
    violations: Array | None  # of the target alone
    scored: Scored | None


class Passed(NamedTuple):
    """What a pass leaves behind besides the cache."""

    verdict: Verdict
    emitted: Emitted
    depth: Array  # int32[B], of the deepest valid node
    seen: PyTree  # what the drafter observed
    finite: Array  # bool[B], whether what the target said of the root was
    kept: Diagnostics


def pass_over(
    parts: Parts, state: DecodeState, tree: TokenTree, observe: ObserveFn, prompt: PromptFn | None = None
) -> tuple[PyTree, Passed]:
    """The cache with what was accepted of `tree`, and the outcome; `observe` gives the drafter's view of it, `prompt`
    the vectors that the pass reads below the nodes of its part of the tree.

    The pass is as wide as the widest valid draft among the rows, rounded up to one of the drafter's `widths`: an empty
    draft costs one plain step. Which width ran changes rounding, never the distribution.
    """
    n = parts.drafter.num_nodes
    widths = sorted({w for w in parts.drafter.traits.widths if w < n} | {n})
    needed = jnp.max(jnp.sum(tree.valid, 1))

    def over(widths: list[int], cache: PyTree) -> tuple[PyTree, Passed]:
        """By the narrowest of `widths` that holds the draft."""
        judge = functools.partial(judge_at, parts, state, tree, observe, prompt, cache)
        slots = [width + _count(prompt, tree, width) for width in widths]
        judged, pending = _narrowest(widths, slots, needed, judge, parts.target.model.widen)
        verdict, *others = judged
        emitted = emit(parts, state, tree, verdict)
        num_nodes = jnp.minimum(verdict.num_nodes, emitted.number)
        committed = parts.target.model.commit(cache, pending, verdict.path[:, : widths[-1]], num_nodes)
        contract_checks.check_same(f"commit of the model {parts.target.model.name}", cache, committed)
        return committed, Passed(verdict, emitted, *others)

    if parts.plain:
        return over([1], state.cache)
    if widths[0] > 1 or len(widths) == 1:
        return over(widths, state.cache)
    # A plain step is a program of its own, with nothing in it that only wider ones need, such as keys and values with
    # room for 16 nodes.
    plain, wider = (functools.partial(over, some) for some in ([1], widths[1:]))
    return narrow_or_wide(needed == 1, plain, wider, state.cache)


def _count(prompt: PromptFn | None, tree: TokenTree, width: int) -> int:
    """Vectors that a pass over `width` nodes reads besides them."""
    return 0 if prompt is None else jax.eval_shape(prompt, operations.cut(tree, width)).parents.shape[1]


def _narrowest(widths: list[int], slots: list[int], needed: Array, judge, widen) -> tuple[tuple, PyTree]:
    """`judge(width)`, whose second result is pending, at the first of the rising `widths` that is not below `needed`
    int32[], with room for the most of `slots`, which say how much is pending of each."""
    if len(widths) == 1:
        return judge(widths[0])

    def at(width: int, has: int):
        judged, pending = judge(width)
        return judged, widen(pending, max(slots)) if has < max(slots) else pending

    branches = [functools.partial(at, width, has) for width, has in zip(widths, slots, strict=True)]
    return jax.lax.switch(jnp.sum(needed > jnp.array(widths)), branches)


def judge_at(
    parts: Parts, state: DecodeState, tree: TokenTree, observe: ObserveFn, prompt: PromptFn | None, cache: PyTree,
    width: int,
):  # fmt: skip
    """A pass over the first `width` nodes: (verdict, depth, seen, finite, kept) of `Passed`, and what is pending."""
    drafter, model, n = parts.drafter, parts.target.model, parts.drafter.num_nodes
    part = operations.cut(tree, width)
    tokens: Array | Appended = part.tokens
    if prompt is None:
        mask = operations.ancestor_mask(part.parents, part.valid, drafter.max_depth)
    else:
        tokens, mask = _with_prompts(part, prompt(part))
    depth = jnp.sum(mask, 2) - 1  # 0 of invalid nodes
    positions = state.length[:, None] - 1 + depth
    taps = {"taps": drafter.traits.taps} if drafter.traits.taps else {}
    whole, pending = model.forward(parts.target.params, tokens, cache, positions=positions, mask=mask, **taps)
    contract_checks.check_output(model, whole, *depth.shape)
    output = whole if prompt is None else jax.tree.map(lambda x: x[:, :width], whole)
    depth = depth[:, :width]
    raw = output
    if parts.processors:
        above = mask[:, :width, :width]
        output = raw._replace(
            logits=logits_processing.processed(parts.processors, state.processed, part, above, raw.logits)
        )
    keys = node_keys(state.keys, state.length, depth)  # [B, width]
    verdict, logits = _judged(parts, state, keys, part, output)
    contract_checks.check_verdict(parts.verifier, verdict, *part.tokens.shape)
    verdict = _of_running(verdict, state.done)
    seen = observe(part, verdict, whole)
    along_path = jnp.maximum(verdict.path, 0)[:, :, None]
    kept = Diagnostics(
        logits=batch_axes.widen(take_along(logits, along_path, 1), n) if parts.keep.logits else None,
        logprobs=batch_axes.widen(_logprobs(parts, part, verdict, logits), n) if parts.keep.logprobs else None,
        violations=value_checks.of_target(part.valid, logits) if parts.keep.violations else None,
        scored=Scored(tree, *batch_axes.widen((logits, output.hidden), n)) if parts.keep.scored else None,
    )
    verdict = verdict._replace(path=jnp.pad(verdict.path, ((0, 0), (0, n - width)), constant_values=-1))
    deepest, finite = jnp.max(depth, 1), value_checks.is_finite(raw)
    if parts.processors:
        finite &= jnp.any(output.logits[:, 0] > -jnp.inf, 1)  # they left a token
    return (verdict, deepest, seen, finite, kept), pending


def _with_prompts(tree: TokenTree, prompts: SoftPrompts) -> tuple[Appended, Array]:
    """What a pass over a tree and the vectors below it reads, and what each of these sees: bool[B, W + P, W + P]."""
    below = lambda x, more: jnp.concatenate([x, more], 1)
    mask = operations.ancestor_mask(below(tree.parents, prompts.parents), below(tree.valid, prompts.valid))
    return Appended(tree.tokens, prompts.vectors), mask


def _judged(parts: Parts, state: DecodeState, keys: Array, tree: TokenTree, output: Output) -> tuple[Verdict, Array]:
    """What the rule says of a tree, and the target's logits [B, N, V], warped unless they need not be."""
    verifier = parts.verifier
    if verifier.guarantee == "greedy":
        return verifier(keys, tree, output.logits, output.hidden), output.logits
    logits = warp(output.logits, parts.sampling)
    rule = lambda logits: verifier(keys, tree, logits, output.hidden)
    if verifier.guarantee == "lossy" or parts.sampling.temperature is None:
        return rule(logits), logits
    # The drafts of greedy rows were not drawn, as rules suppose; but there any exact rule is the greedy one.
    row_is_greedy = is_greedy(parts.sampling, len(state.done))
    likeliest = greedy(keys, tree, output.logits)

    def mixed(logits):
        pick = lambda x, y: jnp.where(row_is_greedy.reshape(-1, *[1] * (x.ndim - 1)), x, y)
        return jax.tree.map(pick, likeliest, rule(logits))

    if parts.serving:  # where no request is sampled, nothing need be warped and drawn
        warped = lambda logits: mixed(warp(logits, parts.sampling))
        is_sampled = jnp.any(~row_is_greedy & ~state.done)
        return jax.lax.cond(is_sampled, warped, lambda logits: likeliest, output.logits), output.logits
    return mixed(logits), logits


def _of_running(verdict: Verdict, done: Array) -> Verdict:
    """The verdict with nothing accepted in rows that had ended."""
    path = jnp.where(done[:, None], -1, verdict.path)
    return verdict._replace(path=path, num_nodes=jnp.where(done, 0, verdict.num_nodes))


def _logprobs(parts: Parts, tree: TokenTree, verdict: Verdict, logits: Array) -> Array:
    """float32[B, N]: log p of each token of the verdict in the distributions [B, N, V] that gave it, then zeros."""
    n = tree.tokens.shape[1]
    index = jnp.arange(n)
    if parts.verifier.guarantee == "greedy":  # its distribution has one token
        return jnp.zeros(tree.tokens.shape)
    # By reductions over the vocabulary, which a mesh may split.
    place = jnp.where(index < verdict.num_nodes[:, None], verdict.path, n)
    rows = jnp.arange(place.shape[0])[:, None]
    following = (
        jnp.zeros(tree.tokens.shape, jnp.int32).at[rows, place].set(operations.emitted_tokens(tree, verdict), mode="drop")
    )
    is_token = jnp.arange(logits.shape[-1]) == following[:, :, None]
    log_p = jnp.max(jnp.where(is_token, logits, -jnp.inf), -1) - jax.nn.logsumexp(logits, -1)
    return jnp.where(place < n, take_along(log_p, jnp.minimum(place, n - 1), 1), 0.0)


def emit(parts: Parts, state: DecodeState, tree: TokenTree, verdict: Verdict) -> Emitted:
    """What a verdict adds to the text."""
    index = jnp.arange(tree.tokens.shape[1])
    tokens = operations.emitted_tokens(tree, verdict)
    room = jnp.where(state.done, 0, state.stop - state.length)[:, None]
    alive = index < jnp.minimum(verdict.num_nodes[:, None], room)
    eos = parts.eos if parts.eos.ndim == 1 else parts.eos[:, None]
    ends = jnp.any(tokens[:, :, None] == eos, -1) & alive
    is_eos = jnp.any(ends, 1)
    count = jnp.where(is_eos, jnp.argmax(ends, 1) + 1, jnp.sum(alive, 1))
    return Emitted(tokens, count.astype(jnp.int32), is_eos)
