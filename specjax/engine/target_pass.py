"""The target pass: one forward of the target over a drafted tree, verification, and the commit to its cache."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays import batch_axes
from specjax.arrays.branching import narrow_or_wide
from specjax.arrays.indexing import take_along
from specjax.arrays.logit_rows import LogitRows, are_large
from specjax.engine import contract_checks, value_checks
from specjax.engine.job import Keep, Parts
from specjax.numerics.sampling import is_greedy, node_keys
from specjax.processors import pipeline
from specjax.trees import operations
from specjax.types import (
    Appended,
    Array,
    DecodeState,
    Output,
    PyTree,
    Sampling,
    Scored,
    SoftPrompts,
    TokenLogprobs,
    TokenTree,
    Verdict,
)
from specjax.verifiers import greedy
from specjax.verifiers.node_logits import NodeLogits, UnstoredLogits
from specjax.verifiers.token_logprobs import raw_logprobs, token_logprobs

ObserveFn = Callable[[TokenTree, Verdict, Output], PyTree]
PromptFn = Callable[[TokenTree], SoftPrompts]


class Emitted(NamedTuple):
    """The tokens of a verdict, cut at the first eos, at the row's limit, and where no token could be drawn."""

    tokens: Array  # int32[B, N]
    number: Array  # int32[B], number of emitted tokens; 0 for rows that have ended
    is_eos: Array  # bool[B], True if the last emitted token is an eos
    failed: Array  # bool[B], True if the text stops because no further token could be drawn


class Diagnostics(NamedTuple):
    """The requested fields of `Info` that need the target's logits."""

    logits: Array | None
    logprobs: Array | None
    violations: Array | None  # violations that need only the target's logits
    scored: Scored | None
    raw_logprobs: TokenLogprobs | None
    experts: Array | None  # `Info.experts`


class Judged(NamedTuple):
    """Result of `judge_at`: a pass of a given width, before the commit."""

    verdict: Verdict
    depth: Array  # int32[B], depth of the deepest valid node
    observed: PyTree  # result of the drafter's `observe`
    sound: Array  # int32[B], result of `value_checks.count_sound_nodes`
    diagnostics: Diagnostics
    pending: PyTree  # cache entries of the nodes, for `Model.commit`


class Passed(NamedTuple):
    """Result of `pass_over`, without the cache."""

    verdict: Verdict
    emitted: Emitted
    depth: Array  # int32[B], depth of the deepest valid node
    observed: PyTree  # result of the drafter's `observe`
    diagnostics: Diagnostics


def pass_over(
    parts: Parts, state: DecodeState, tree: TokenTree, observe: ObserveFn, prompt: PromptFn | None = None
) -> tuple[PyTree, Passed]:
    """Run the target on `tree`, and return the cache with the accepted nodes and the result of the pass.

    The pass is as wide as the widest valid draft among the rows, rounded up to one of the drafter's widths. So an
    empty draft costs one plain step. The width changes rounding, but never the distribution.

    Args:
      observe: the drafter's `observe`, with its first arguments bound.
      prompt: returns the soft prompts of a tree that is cut to the width of the pass.
    """
    widths = parts.drafter.pass_widths(len(state.length), parts.target)
    needed = jnp.max(jnp.sum(tree.valid, 1))

    def pass_at_one_of(widths: list[int], cache: PyTree) -> tuple[PyTree, Passed]:
        judge = functools.partial(judge_at, parts, state, tree, observe, prompt, cache)
        slots = [width + _num_prompts(prompt, tree, width) for width in widths]
        judged = _judge_narrowest(widths, slots, needed, judge, parts.target.model.widen)
        verdict = judged.verdict
        emitted = emit(parts, state, tree, verdict, judged.sound)
        num_nodes = jnp.minimum(verdict.num_nodes, emitted.number)
        committed = parts.target.model.commit(cache, judged.pending, verdict.path[:, : widths[-1]], num_nodes)
        contract_checks.check_same(f"commit of the model {parts.target.model.name}", cache, committed)
        return committed, Passed(verdict, emitted, judged.depth, judged.observed, judged.diagnostics)

    if parts.plain:
        return pass_at_one_of([1], state.cache)
    if widths[0] > 1 or len(widths) == 1:
        return pass_at_one_of(widths, state.cache)
    # A plain step has a separate branch, without the arrays that only wider passes need, such as keys and values of 16
    # nodes.
    plain, wider = (functools.partial(pass_at_one_of, some) for some in ([1], widths[1:]))
    return narrow_or_wide(needed == 1, plain, wider, state.cache)


def _num_prompts(prompt: PromptFn | None, tree: TokenTree, width: int) -> int:
    """Return the number of soft prompts in a pass over `width` nodes."""
    return 0 if prompt is None else jax.eval_shape(prompt, operations.cut(tree, width)).parents.shape[1]


def _judge_narrowest(
    widths: list[int], slots: list[int], needed: Array, judge: Callable[[int], Judged], widen: Callable
) -> Judged:
    """Run `judge(width)` at the first of the increasing `widths` that is at least `needed` int32[].

    `slots` is the number of pending tokens at each width. All branches return pending entries of the largest size.
    """
    if len(widths) == 1:
        return judge(widths[0])

    def judge_and_widen(width: int, count: int) -> Judged:
        judged = judge(width)
        return judged if count == max(slots) else judged._replace(pending=widen(judged.pending, max(slots)))

    branches = [functools.partial(judge_and_widen, width, count) for width, count in zip(widths, slots, strict=True)]
    return jax.lax.switch(jnp.sum(needed > jnp.array(widths)), branches)


def judge_at(
    parts: Parts, state: DecodeState, tree: TokenTree, observe: ObserveFn, prompt: PromptFn | None, cache: PyTree,
    width: int,
) -> Judged:  # fmt: skip
    """Run the target and the verifier on the first `width` nodes of `tree`, without a change of the cache."""
    drafter, model, n = parts.drafter, parts.target.model, parts.drafter.num_nodes
    part = operations.cut(tree, width)
    tokens: Array | Appended = part.tokens
    if prompt is None:
        mask = operations.ancestor_mask(part.parents, part.valid, drafter.max_depth)
    else:
        tokens, mask = _append_prompts(part, prompt(part))
    depth = jnp.sum(mask, 2) - 1  # 0 for invalid nodes
    positions = state.length[:, None] - 1 + depth
    taps = {"taps": drafter.traits.taps} if drafter.traits.taps else {}
    with_prompts, pending = model.forward(parts.target.params, tokens, cache, positions=positions, mask=mask, **taps)
    contract_checks.check_output(model, with_prompts, *depth.shape)
    raw = with_prompts
    if prompt is not None:
        raw = jax.tree.map(lambda x: x[:, :width], with_prompts._replace(experts=None))
    depth = depth[:, :width]
    keys = node_keys(state.keys, state.length, depth)  # [B, width]
    if prompt is None and _stores_no_logits(parts, *depth.shape):
        raw = with_prompts = _with_best(parts, raw)
    processed = _processed(parts, state, part, mask[:, :width, :width], raw)
    verdict, logits = _verify(parts, state, keys, part, processed, raw.hidden)
    contract_checks.check_verdict(parts.verifier, verdict, *part.tokens.shape)
    verdict = _reject_ended(verdict, state.done)
    observed = observe(part, verdict, with_prompts)
    along_path = jnp.maximum(verdict.path, 0)[:, :, None]
    diagnostics = Diagnostics(
        logits=batch_axes.widen(take_along(logits.every(), along_path, 1), n) if parts.keep.logits else None,
        logprobs=batch_axes.widen(_logprobs(parts, part, verdict, logits, processed, raw.logits), n)
        if parts.keep.logprobs
        else None,
        violations=value_checks.find_target_violations(part.valid, logits.every()) if parts.keep.violations else None,
        scored=Scored(tree, *batch_axes.widen((logits.every(), raw.hidden), n)) if parts.keep.scored else None,
        raw_logprobs=None
        if parts.reports is None or parts.keep.alternatives is None
        else batch_axes.widen(raw_logprobs(part, verdict, raw.logits, parts.reports, parts.keep.alternatives), n),
        experts=_experts(parts, with_prompts, *mask.shape[:2]),
    )
    sound = value_checks.count_sound_nodes(raw.hidden, processed, verdict, processed=bool(parts.processors))
    path = jnp.pad(verdict.path, ((0, 0), (0, n - width)), constant_values=-1)
    return Judged(verdict._replace(path=path), jnp.max(depth, 1), observed, sound, diagnostics, pending)


def _experts(parts: Parts, output: Output, batch: int, width: int) -> Array | None:
    """Return `Info.experts` of a pass over `width` tokens of each row."""
    if output.experts is None or not parts.controller.reads_experts:
        return None
    return jnp.broadcast_to(jnp.stack([output.experts, jnp.float32(width)]), (batch, 2))


def _append_prompts(tree: TokenTree, prompts: SoftPrompts) -> tuple[Appended, Array]:
    """Return the inputs of a pass over a tree and its soft prompts, and their mask bool[B, W + P, W + P]."""
    append = lambda x, more: jnp.concatenate([x, more], 1)
    mask = operations.ancestor_mask(append(tree.parents, prompts.parents), append(tree.valid, prompts.valid))
    return Appended(tree.tokens, prompts.vectors), mask


def _stores_no_logits(parts: Parts, batch: int, width: int) -> bool:
    """Return True if the logits of a pass are too large to be stored, and the model, rule and drafter do not need them.

    The drafter's `observe` and greedy rules then read the likeliest tokens of the nodes. A sampled rule computes the
    logits of each node that it visits, which reads the output head again.
    """
    model = parts.target.model
    reads_rows = parts.verifier.by_row and not parts.processors and parts.keep == Keep()
    return (
        are_large(batch, width, model.vocab_size)
        and reads_rows
        and None not in (model.best, model.unembed, parts.drafter.reads_best)
    )


def _with_best(parts: Parts, output: Output) -> Output:
    """Return the output of a pass with its likeliest tokens: as many as the drafter reads, and at least one."""
    model, params, count = parts.target.model, parts.target.params, parts.drafter.reads_best
    assert model.best is not None and count is not None
    return output._replace(best=model.best(params, output.hidden, min(max(count, 1), model.vocab_size)))


def _processed(parts: Parts, state: DecodeState, tree: TokenTree, ancestors: Array, output: Output) -> NodeLogits:
    """Return the processed logits of the nodes. Processors that need all nodes at once are applied immediately."""
    processors, states, logits = parts.processors, state.processed, output.logits
    if output.best is not None:
        model, params = parts.target.model, parts.target.params
        assert model.unembed is not None
        rows = LogitRows(output.hidden, functools.partial(model.unembed, params))
        return NodeLogits(UnstoredLogits(rows, output.best), lambda rows, node: rows)
    if all(processor.by_row for processor in processors):
        above = lambda node: ancestors if node is None else take_along(ancestors, node[:, None, None], 1)
        return NodeLogits(
            logits, lambda rows, node: pipeline.process(processors, states, tree, above(node), rows)
        )  # fmt: skip
    return NodeLogits(pipeline.process(processors, states, tree, ancestors, logits), lambda rows, node: rows)


def _verify(
    parts: Parts, state: DecodeState, keys: Array, tree: TokenTree, processed: NodeLogits, hidden: Array
) -> tuple[Verdict, NodeLogits]:
    """Return the verdict, and the target's logits by node, which are warped unless the verifier is greedy."""
    verifier, temperature = parts.verifier, parts.sampling.temperature
    verify = lambda rule, logits: rule(keys, tree, logits, hidden)
    if verifier.guarantee == "greedy":
        return verify(verifier, processed), processed
    warped = processed._replace(sampling=parts.sampling)
    if verifier.guarantee == "lossy" or temperature is None:
        return verify(verifier, warped), warped
    # Rejection rules assume sampled drafts, but drafts of greedy rows are not sampled. At temperature 0 every exact
    # rule equals the greedy one, so greedy rows use that.
    row_is_greedy = is_greedy(parts.sampling, len(state.done))

    def mixed() -> Verdict:
        verdict = verify(verifier, warped)
        if temperature.ndim == 0:  # all rows are sampled
            return verdict
        of_greedy_rows = jax.lax.cond(jnp.any(row_is_greedy), lambda: verify(greedy, processed), lambda: verdict)
        pick = lambda x, y: jnp.where(row_is_greedy.reshape(-1, *[1] * (x.ndim - 1)), x, y)
        return jax.tree.map(pick, of_greedy_rows, verdict)

    is_sampled = jnp.any(~row_is_greedy & ~state.done)  # otherwise nothing is warped and drawn
    return jax.lax.cond(is_sampled, mixed, lambda: verify(greedy, processed)), warped


def _reject_ended(verdict: Verdict, done: Array) -> Verdict:
    """Return the verdict with no accepted nodes in rows that have ended."""
    path = jnp.where(done[:, None], -1, verdict.path)
    return verdict._replace(path=path, num_nodes=jnp.where(done, 0, verdict.num_nodes))


def _logprobs(
    parts: Parts, tree: TokenTree, verdict: Verdict, logits: NodeLogits, processed: NodeLogits, raw: Array
) -> Array:  # fmt: skip
    """Return log p float32[B, N] of each token of the verdict in the requested form, then zeros.

    Args:
      logits: the logits of the draws. processed: those after the processors only.
      raw: float[B, N, V], the target's own logits.
    """
    form, temperature = parts.keep.logprobs, parts.sampling.temperature
    if form in ("raw", "tempered"):
        divisor = None if temperature is None else jnp.where(temperature == 0, 1.0, temperature)
        sampling = None if form == "raw" or divisor is None else Sampling(divisor)
        logits = NodeLogits(raw, lambda rows, node: rows, sampling)
    elif form == "untempered":
        logits = processed
    elif parts.verifier.guarantee == "greedy":  # a distribution over one token
        return jnp.zeros(tree.tokens.shape)
    return token_logprobs(tree, verdict, logits)


def emit(parts: Parts, state: DecodeState, tree: TokenTree, verdict: Verdict, sound: Array) -> Emitted:
    """Return the tokens that a verdict adds to the text. `sound` int32[B] are the nodes that a token can follow."""
    index = jnp.arange(tree.tokens.shape[1])
    tokens = operations.emitted_tokens(tree, verdict)
    room = jnp.where(state.done, 0, state.stop - state.length)[:, None]
    limit = jnp.minimum(verdict.num_nodes[:, None], room)
    is_added = index < jnp.minimum(limit, sound[:, None])
    eos = parts.eos if parts.eos.ndim == 1 else parts.eos[:, None]
    ends = jnp.any(tokens[:, :, None] == eos, -1) & is_added
    is_eos = jnp.any(ends, 1)
    count = jnp.where(is_eos, jnp.argmax(ends, 1) + 1, jnp.sum(is_added, 1))
    return Emitted(tokens, count.astype(jnp.int32), is_eos, ~is_eos & (sound < limit[:, 0]))
