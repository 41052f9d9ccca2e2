"""`decode` and `stream`: the same step, looped on the device or driven from Python."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Generator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.controllers import fixed
from specjax.engine import checks
from specjax.engine.step import Inputs, add_stats, buffer_size, speculative, zero_stats
from specjax.errors import UsageError
from specjax.indexing import take_along
from specjax.parallel.arrays import gather, is_far, replicate
from specjax.parallel.checkpoint import Checkpoints
from specjax.sampling import row_keys
from specjax.types import Array, Controller, DecodeState, Drafter, Info, Sampling, Stats, Target, VerifyFn
from specjax.verifiers import ANY, Verifier, exact_verifier, greedy, sample_and_match

PROMPT_BUCKET = 128
"""Prompt buffers are rounded up to a multiple of this, so that prompts of similar length share one program."""

Prompts = Sequence[Sequence[int]] | tuple[Array | np.ndarray, Array | np.ndarray]


class DecodeResult(NamedTuple):
    """What was decoded. A pytree of arrays, so it can leave the caller's own `jit`."""

    tokens: Array  # int32[B, max_new_tokens], without the prompts; -1 behind the end
    lengths: Array  # int32[B]
    hit_eos: Array  # bool[B]
    stats: Stats
    drafter: Drafter | None = None  # as it is after what it saw, for the next call; None if it remembers nothing
    logprobs: Array | None = None  # float32[B, max_new_tokens], 0 behind the end; if asked for

    @property
    def finish_reasons(self) -> list[str]:
        """Per row "eos" or "length"."""
        return ["eos" if eos else "length" for eos in _here(self.hit_eos)]

    @property
    def block_efficiency(self) -> Array:
        """float32[B]: tokens per target pass, the bonus token included."""
        return self.lengths / jnp.maximum(self.stats.target_passes, 1)

    @property
    def mean_accepted(self) -> Array:
        """float32[B]: drafted tokens emitted per target pass (the bonus token excluded)."""
        return self.stats.accepted / jnp.maximum(self.stats.target_passes, 1)

    @property
    def acceptance_by_depth(self) -> Array:
        """float32[B, D]: of the rounds that drafted depth d + 1, the fraction that accepted it; nan if none did."""
        return self.stats.accepted_by_depth / self.stats.drafted_by_depth

    def to_lists(self) -> list[list[int]]:
        """The decoded tokens of each row, without padding."""
        return [row[:n].tolist() for row, n in zip(_here(self.tokens), _here(self.lengths), strict=True)]


def _here(x) -> np.ndarray:
    if is_far(x):
        raise UsageError("some rows are on other hosts; call specjax.parallel.gather(result) on every host first")
    return np.asarray(x)


class StreamStep(NamedTuple):
    """What one step added, as numpy."""

    tokens: list[list[int]]  # per row
    accepted: np.ndarray | Array  # int32[B], how many of them, from the front, were drafted; the rest are not
    info: Info
    earlier: Stats | None = None  # of the first step after a restart, which has the text so far: the sums until then


def decode(
    target: Target,
    drafter: Drafter | str | None,
    prompts: Prompts,
    *,
    key: Array,
    max_new_tokens: int,
    temperature: float | Array = 0.0,
    top_k: int | Array | None = None,
    top_p: float | Array | None = None,
    eos: int | Sequence[int] | Array = (),
    sampling: Literal["speculative", "coupled"] = "speculative",
    verifier: Verifier | VerifyFn | None = None,
    controller: Controller | None = None,
    capacity: int | None = None,
    logprobs: bool = False,
    debug: bool = False,
) -> DecodeResult:
    """Decode a batch of prompts: prefill and the whole loop in one compiled program.

    May be called inside the caller's own `jit` with `target`, `drafter`, `prompts` and `key` as arguments. A second
    call with the same shapes compiles nothing.

    Args:
      target: the model and its parameters.
      drafter: see `specjax.drafters`; its parameters, if any, are its leaves. The name of a row of METHODS that needs
        nothing else will do; None is "auto", which drafts where it pays.
      prompts: a list of token lists, or (tokens int32[B, P], lengths int32[B]) padded on the right.
      key: one PRNG key, from which row b takes `fold_in(key, b)`, or one key per row [B]. A row's text depends on its
        key and prompt only, not on the batch.
      max_new_tokens: exact, unless the row ends with an eos.
      temperature: a Python 0 compiles the greedy program; else a float or [B], traced, where 0 is greedy too.
      top_k, top_p: None, or a number or [B], applied to target and draft alike, after the temperature.
      eos: ids that end a row; the eos itself is the last token of the row.
      sampling: "speculative" accepts a drafted token by its p/q, as often as any rule for one token can, and keeps the
        law of the text. "coupled" draws target and draft with the same noise, so that the text for a key is that of
        plain sampling, whatever drafter, tree, batch or mesh; it accepts a little less of one chain, and more of wide
        trees (docs/verifiers.md).
      verifier: one of `specjax.verifiers`, or your own `VerifyFn`; default: the exact rule for how the drafter draws.
      controller: how deep to draft, one of `specjax.controllers`; default: always as deep as possible.
      debug: check every draft for what its verifier needs (`specjax.checks`) and raise UsageError if one lacks it;
        inside the caller's `jit`, where nothing can be raised, look at `stats.violations`.
      capacity: largest length of prompt plus new tokens; default: the model's own limit.
      logprobs: also return the log-probability of each token under the target's law it was drawn from: after
        temperature, top-k and top-p, so 0 for a greedy token and -inf for one that only a lossy rule lets through.

    Returns: DecodeResult.
    Raises: UsageError for an empty prompt, one over the capacity, or a setting outside its range, before compiling.
    """
    inputs, tokens, lengths, keys, static = prepare(
        target, drafter, prompts, key=key, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k,
        top_p=top_p, eos=eos, sampling=sampling, verifier=verifier, controller=controller, capacity=capacity,
        logprobs=logprobs,
    )  # fmt: skip
    if not debug:
        return _decode(inputs, tokens, lengths, keys, **static)
    result = _decode(dataclasses.replace(inputs, debug=True), tokens, lengths, keys, **static)
    if not isinstance(result.stats.violations, jax.core.Tracer):
        checks.refuse(gather(result.stats.violations), inputs.drafter.draws)
    return result


def stream(
    target: Target,
    drafter: Drafter | str | None,
    prompts: Prompts,
    *,
    key: Array,
    max_new_tokens: int,
    checkpoint: Checkpoints | None = None,
    **options: Any,
) -> Generator[StreamStep, None, None]:
    """Like `decode`, with the same arguments, but yields what each step added, as soon as it is known.

    The step is the one that `decode` loops. The next step is dispatched before the tokens of this one are read.

    On several hosts each must run through all steps; every one sees all rows.

    checkpoint: `specjax.parallel.Checkpoints`, to survive a restart. A run that finds its own state in the folder
    yields the text so far as its first step, without saying which of it was drafted, and goes on from there: together
    the tokens of an uninterrupted run. One that finds that of another run raises UsageError. Not with `logprobs`, which
    it does not keep.
    """
    inputs, tokens, lengths, keys, static = prepare(
        target, drafter, prompts, key=key, max_new_tokens=max_new_tokens, **options
    )
    decoding = {"controller": static["controller"]}

    def steps(kept: Kept | None):
        state = _start(inputs, tokens, lengths, keys, **static)
        if kept is not None:
            state, info, earlier = kept.resume(state)
            if info is not None:
                yield StreamStep(_rows(info.tokens, info.emitted), info.accepted, info, earlier)
        done = bool(jnp.all(state.done))
        ahead = None if done else _step(inputs, state, **decoding)
        while ahead is not None:
            state, info, over = ahead
            info, over = replicate((info, over))  # before the next step, or it would have to wait for that
            if kept is not None:
                kept.add(state, info)
            # Dispatched on the chance that rows are left: the device need not wait for this host.
            following = _step(inputs, state, **decoding)
            info, over = jax.device_get((info, over))
            if kept is not None and over:
                kept.finish(following[0])  # a step of rows that have ended changes nothing
            yield StreamStep(_rows(info.tokens, info.emitted), info.accepted, info)
            ahead = None if over else following

    if checkpoint is None:
        return steps(None)
    if inputs.keep_logprobs:
        raise UsageError("a checkpoint does not keep log-probabilities; leave logprobs or checkpoint out")
    from specjax.parallel.resuming import Kept

    kept = Kept(checkpoint, (inputs, tokens, lengths, keys, static))
    return kept.closing(steps(kept))


def _rows(tokens, count) -> list[list[int]]:
    return [row[:n].tolist() for row, n in zip(tokens, count, strict=True)]


def prepare(
    target: Target, drafter: Drafter | str | None, prompts: Prompts, *, key: Array, max_new_tokens: int,
    temperature=0.0, top_k=None, top_p=None, eos=(), sampling="speculative", verifier=None, controller=None,
    capacity=None, logprobs=False,
) -> tuple[Inputs, Array, Array, Array, dict]:  # fmt: skip
    """Check the arguments of `decode`.

    Returns: Inputs, padded tokens int32[B, L], lengths int32[B], keys [B] and the static arguments of the program.
    """
    if not isinstance(drafter, Drafter):
        from specjax.catalog import make_drafter  # which has loops among its rows that import this file

        drafter = make_drafter(drafter or "auto", target)
    if max_new_tokens < 1:
        raise UsageError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
    is_greedy = isinstance(temperature, int | float) and temperature == 0
    _check_range("temperature", temperature, lambda x: x >= 0, "at least 0")
    _check_range("top_k", top_k, lambda x: x >= 1, "at least 1")
    _check_range("top_p", top_p, lambda x: (x > 0) & (x <= 1), "above 0 and at most 1")
    tokens, lengths = _pack(prompts, max_new_tokens, capacity or target.model.max_positions)
    batch, width = tokens.shape
    size = buffer_size(width, max_new_tokens, drafter)
    tokens = jnp.pad(tokens, ((0, 0), (0, size - width)))
    warping = Sampling()
    if not is_greedy:
        warping = Sampling(*(None if x is None else jnp.asarray(x) for x in (temperature, top_k, top_p)))
    ids = jnp.atleast_1d(jnp.asarray(eos, jnp.int32))
    verifier = _choose_verifier(verifier, drafter, is_greedy, sampling)
    static = {
        "controller": controller or fixed(),
        "max_new_tokens": max_new_tokens,
    }
    coupled = sampling == "coupled" and not is_greedy
    inputs = Inputs(target, drafter, verifier, coupled, warping, ids, keep_logprobs=logprobs)
    return inputs, tokens, lengths, row_keys(key, batch), static


def _choose_verifier(
    verifier: Verifier | VerifyFn | None, drafter: Drafter, is_greedy: bool, sampling: str
) -> Verifier:
    """The rule asked for, or the exact one; at temperature 0 every exact rule is the greedy one."""
    if sampling not in ("speculative", "coupled"):
        raise UsageError(f'sampling must be "speculative" or "coupled", not "{sampling}"')
    if sampling == "coupled" and verifier is not None:
        raise UsageError('sampling="coupled" brings its own verifier, sample_and_match; leave verifier out')
    if sampling == "coupled":
        return greedy if is_greedy else sample_and_match
    if verifier is None:
        return exact_verifier(drafter, is_greedy)
    if not isinstance(verifier, Verifier):  # the caller's own function promises nothing
        verifier = Verifier(getattr(verifier, "__name__", "custom"), verifier, ANY, "lossy", "the caller's own rule")
    if is_greedy and verifier.guarantee != "lossy":
        return greedy
    if drafter.draws not in verifier.draws:
        default = exact_verifier(drafter, is_greedy).name
        raise UsageError(
            f"verifier {verifier.name} is not valid for drafts drawn {drafter.draws}, "
            f"only for {', '.join(verifier.draws)}; the default for this drafter is {default}"
        )
    return verifier


def _check_range(name, value, holds, wanted):
    if value is None or isinstance(value, jax.core.Tracer):
        return
    if not np.all(holds(np.asarray(gather(value)))):
        raise UsageError(f"{name} must be {wanted}, not {value}")


def _pack(prompts: Prompts, max_new_tokens: int, capacity: int) -> tuple[Array, Array]:
    """(tokens int32[B, P], lengths int32[B]) from either form of prompts; checks lengths where they are known."""
    if isinstance(prompts, tuple) and len(prompts) == 2 and hasattr(prompts[0], "ndim"):
        tokens, lengths = jnp.asarray(prompts[0], jnp.int32), jnp.asarray(prompts[1], jnp.int32)
        if tokens.ndim != 2 or lengths.shape != tokens.shape[:1]:
            raise UsageError(f"prompts must be (tokens[B, P], lengths[B]), not {tokens.shape} and {lengths.shape}")
    else:
        if not len(prompts):
            raise UsageError("prompts is empty; give at least one prompt")
        longest = max(len(row) for row in prompts)
        width = -(-max(longest, 1) // PROMPT_BUCKET) * PROMPT_BUCKET
        padded = np.zeros((len(prompts), width), np.int32)
        for place, prompt in zip(padded, prompts, strict=True):
            place[: len(prompt)] = prompt
        tokens, lengths = jnp.asarray(padded), jnp.asarray([len(row) for row in prompts], jnp.int32)
    if not isinstance(lengths, jax.core.Tracer):
        for row, length in enumerate(gather(lengths)):
            if length < 1:
                raise UsageError(f"prompt {row} is empty; a prompt needs at least one token (such as bos)")
            if length + max_new_tokens > capacity:
                raise UsageError(
                    f"prompt {row} has {length} tokens and max_new_tokens is {max_new_tokens}, over the capacity of "
                    f"{capacity} positions; shorten the prompt, lower max_new_tokens or raise capacity"
                )
    return tokens, lengths


STATIC = ("controller", "max_new_tokens")


@functools.partial(jax.jit, static_argnames=STATIC)
def _decode(inputs: Inputs, tokens, lengths, keys, *, controller, max_new_tokens: int) -> DecodeResult:
    decoder = speculative(controller)
    state = decoder.init(inputs, tokens, lengths, keys, lengths + max_new_tokens)
    stats = zero_stats(tokens.shape[0], inputs.drafter.max_depth, inputs.debug)

    index = jnp.arange(max_new_tokens)

    def body(carry):
        before, stats, logprobs = carry
        state, info = decoder.step(inputs, before)
        if logprobs is not None:
            place = (before.length - lengths)[:, None] + jnp.arange(info.tokens.shape[1])
            place = jnp.where(place < (state.length - lengths)[:, None], place, max_new_tokens)
            logprobs = logprobs.at[jnp.arange(place.shape[0])[:, None], place].set(info.logprobs, mode="drop")
        return state, add_stats(stats, info), logprobs

    logprobs = jnp.zeros((tokens.shape[0], max_new_tokens)) if inputs.keep_logprobs else None
    state, stats, logprobs = jax.lax.while_loop(lambda carry: ~jnp.all(carry[0].done), body, (state, stats, logprobs))
    new = take_along(state.tokens, lengths[:, None] + index, 1)
    count = state.length - lengths
    drafter = inputs.drafter
    if drafter.remember is not None:
        drafter = drafter.replace(params=drafter.remember(drafter.params, state.draft))
    return DecodeResult(
        jnp.where(index < count[:, None], new, -1),
        count,
        stats.hit_eos,
        stats,
        drafter if drafter.remember else None,
        logprobs,
    )


@functools.partial(jax.jit, static_argnames=STATIC)
def _start(inputs: Inputs, tokens, lengths, keys, *, controller, max_new_tokens: int) -> DecodeState:
    return speculative(controller).init(inputs, tokens, lengths, keys, lengths + max_new_tokens)


@functools.partial(jax.jit, static_argnames=("controller",), donate_argnames=("state",))
def _step(inputs: Inputs, state: DecodeState, *, controller) -> tuple[DecodeState, Info, Array]:
    state, info = speculative(controller).step(inputs, state)
    return state, info, jnp.all(state.done)
