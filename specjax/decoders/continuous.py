"""Continuous speculative decoding: draft and verify for models with continuous tokens from a diffusion head.

Wang, Zhang, Ding, Yang, Li, Xiang: Continuous Speculative Decoding for Autoregressive Image Generation (2024), arXiv
2411.11925.

A token is the end x_0 of a chain x_{t-1} = mean_t(x_t) + std_t eps_t from x_T ~ N(0, 1). The chain is conditioned on
the previous tokens. The density of a token is unknown; only that of the complete path is known.

Rule: the draft model drafts `window` tokens, and one pass of the target's backbone conditions the target's head on
them. Accept with probability min(1, R) up to the first rejection. For the rejected token, the target's head draws
candidates and accepts each with probability max(0, 1 - 1 / R). The normalisation of [p - q]+ cancels in it. After a
fully accepted window it draws one more token.
  ratio="path": R = p(path) / q(path), the target's transitions on the draft's own states. A candidate is a new path.
  ratio="aligned": the paper's ratio. Both chains run on the same noise, and only their last Gaussian exponents count:
    R = prod_{t=2..T} std^q_t / std^p_t x N(x_0; target's last step) / N(x_0; draft's last step).
    A candidate is the target's last step with new noise.
  ratio="coupled": "aligned" without the product of stds.
Guarantee:
  path: distribution, on paths and therefore on x_0.
  coupled: distribution. Given the shared noise of the other steps, x_0 is Gaussian under either model. The standard
    rule on these two Gaussians gives x_0 the target's distribution.
  aligned: LOSSY. The product of stds belongs to a change of variables that does not occur with shared noise. The rule
    is exact only if the stds of the steps T ... 2 agree.
The cap on candidates is an exception. A token with `max_tries` rejected candidates takes the last one. This shifts its
distribution by at most 1 / (e max_tries) in total variation; `exhausted` counts these tokens.
Deviations: "path" and "coupled" are not in the paper. "path" accepts hardly any token if chains are long and far apart.
A bonus token follows a fully accepted window. After the last try the last candidate is used, never zeros. The ratio is
compared in log space and not clipped. Each pass may read the complete text, without a cache. Two features of the
released code are not implemented: densities flattened by an inner temperature, and tokens replaced in place without
dropping later ones.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays.modes import with_standard_modes
from specjax.catalog import Method, Option
from specjax.catalog.method import Guarantee
from specjax.decoders.loop_setup import check_rows
from specjax.engine.results import DecodeResult, add_round, zero_stats
from specjax.errors import UsageError
from specjax.numerics.sampling import DRAFT, VERIFY, fold_in, normal, row_keys, uniform
from specjax.numerics.validation import check_range
from specjax.types import Array, PyTree, Stats

METHOD = Method(
    name="continuous",
    kind="decoder",
    guarantee="distribution",
    summary='drafts and verifies continuous tokens, vectors from a diffusion head; lossy with ratio="aligned"',
    paper="Wang et al. 2024, arXiv 2411.11925",
    needs=frozenset({"draft", "continuous"}),
    arguments=("target", "draft"),
    settings=("key",),
    options=(
        Option("window", "int", 8, "drafted tokens per step"),
        Option("ratio", ("path", "coupled", "aligned"), "path", "acceptance ratio"),
        Option(
            "prefill_ratio", "float", 0.15, "fraction of the new tokens that the target first decodes without a draft"
        ),
        Option("max_tries", "int", 1000, "maximum number of tries to resample a rejected token"),
    ),
)


Ratio = Literal["path", "coupled", "aligned"]

GUARANTEES: dict[Ratio, Guarantee] = {"path": "distribution", "coupled": "distribution", "aligned": "lossy"}

_LAST = 1  # step of the chain


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ContinuousModel:
    """A backbone and a diffusion head over tokens float32[d], with their parameters as the only leaves.

    `features(params, condition, tokens[B, S, d], positions int32[B, Q]) -> z[B, Q, D]` returns the head's inputs for
    the tokens at `positions`. It may read only `tokens[b, :positions[b, i]]`.
    `mean(params, t, x[..., d], z[..., D]) -> [..., d]` and `std(params, t, z[..., D]) -> [..., d]` return step
    t = num_steps ... 1 of the chain, from x_t to x_{t-1}. A std that broadcasts to [..., d] is valid too. The std must
    be positive, also for t = 1.
    """

    features: Callable[..., Array] = field(metadata={"static": True})
    mean: Callable[..., Array] = field(metadata={"static": True})
    std: Callable[..., Array] = field(metadata={"static": True})
    dim: int = field(metadata={"static": True})
    num_steps: int = field(metadata={"static": True})
    params: PyTree = ()


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ContinuousResult(DecodeResult):
    """Result of `continuous`.

    `tokens` are float32[B, max_new_tokens, d]. In `stats`, passes are those of the backbone, and a depth is a position
    in the window.
    """

    exhausted: Array  # int32[B], number of tokens without an accepted candidate


def continuous(
    target: ContinuousModel,
    draft: ContinuousModel,
    prompts: Array,
    *,
    key: Array | int,
    max_new_tokens: int,
    lengths: Array | None = None,
    condition: PyTree = (),
    window: int = 8,
    ratio: Ratio = "path",
    prefill_ratio: float = 0.15,
    max_tries: int = 1000,
) -> ContinuousResult:
    """Decode a batch in one compiled program, in which each row proceeds at its own speed.

    Args:
      target, draft: models of the same token width and the same number of steps.
      prompts: float32[B, P, d], where P may be 0. lengths: int32[B], lengths of the prompts, from 0 to P; default: P.
      key: one PRNG key or seed, and row b uses `fold_in(key, b)`; or one key per row [B].
      condition: an argument of both backbones, a pytree of arrays [B, ...] such as a class.
      window: number of drafted tokens per step.
      ratio: "path" or "coupled", which are exact, or "aligned", the paper's, which is LOSSY; see `GUARANTEES`.
      prefill_ratio: fraction of the new tokens that the target first decodes alone; early tokens disagree most.
      max_tries: maximum number of candidates for a rejected token.

    Raises: UsageError for a setting out of range, models that do not match, or tokens that are NaN or Inf.
    """
    prompts = jnp.asarray(prompts, jnp.float32)
    if (target.dim, target.num_steps) != (draft.dim, draft.num_steps):
        raise UsageError(
            f"the draft model has {draft.dim} values per token and {draft.num_steps} steps and the target {target.dim} "
            f"and {target.num_steps}; choose a draft model of the same shape"
        )
    if prompts.ndim != 3 or prompts.shape[2] != target.dim:
        raise UsageError(f"prompts must be [B, P, {target.dim}], not {prompts.shape}")
    for name, value in (("max_new_tokens", max_new_tokens), ("window", window), ("max_tries", max_tries)):
        if value < 1:
            raise UsageError(f"{name} must be at least 1, not {value}")
    if not 0 <= prefill_ratio <= 1:
        raise UsageError(f"prefill_ratio must be from 0 to 1, not {prefill_ratio}")
    if ratio not in GUARANTEES:
        raise UsageError(f'ratio must be "path", "coupled" or "aligned", not "{ratio}"')
    batch = prompts.shape[0]
    keys = row_keys(key, batch)
    size = prompts.shape[1]
    lengths = jnp.full((batch,), size, jnp.int32) if lengths is None else jnp.asarray(lengths)
    check_range("lengths", lengths, lambda x: (x >= 0) & (x <= size), f"from 0 to {size}, the length of the prompts")
    result = _decode(
        ModelPair(target, draft, condition), prompts, jnp.clip(lengths, 0, size).astype(jnp.int32),
        (lengths >= 0) & (lengths <= size), keys,
        max_new_tokens=max_new_tokens, window=window, ratio=ratio,
        alone=math.ceil(prefill_ratio * max_new_tokens), max_tries=max_tries,
    )  # fmt: skip
    return check_rows(result, target, draft)


def sample_path(model: ContinuousModel, noise: Array, z: Array) -> Array:
    """Return the chain x_T, ..., x_0 float32[T + 1, ..., d] for noise of this shape, x_T = noise[0], and z [..., D]."""

    def body(x, step):
        t, eps = step
        x = model.mean(model.params, t, x, z) + model.std(model.params, t, z) * eps
        return x, x

    _, states = jax.lax.scan(body, noise[0], (_steps(model), noise[1:]))
    return jnp.concatenate([noise[:1], states])


def path_log_ratio(target: ContinuousModel, draft: ContinuousModel, path: Array, z_p: Array, z_q: Array) -> Array:
    """Return log p(path) - log q(path), float32[...], of paths [T + 1, ..., d]; all steps run in parallel."""

    def step_log_ratio(t, x, next_x):
        p, q = (_log_normal(next_x, m.mean(m.params, t, x, z), m.std(m.params, t, z)) for m, z in pairs)
        return p - q

    pairs = (target, z_p), (draft, z_q)
    return jnp.sum(jax.vmap(step_log_ratio)(_steps(target), path[:-1], path[1:]), 0)


def coupled_log_ratio(
    target: ContinuousModel, draft: ContinuousModel, x_0: Array, x_1: tuple[Array, Array], z_p: Array, z_q: Array
) -> Array:
    """Return log R of the last steps, float32[...], at tokens x_0 [..., d].

    Args:
      x_1: the states [..., d] of the target's path and of the draft's before their last step, on the same noise.
    """

    def last(m, x, z):
        return _log_normal(x_0, m.mean(m.params, _LAST, x, z), m.std(m.params, _LAST, z))

    return last(target, x_1[0], z_p) - last(draft, x_1[1], z_q)


def aligned_log_ratio(target, draft, x_0, x_1, z_p, z_q) -> Array:
    """Return the paper's log R: `coupled_log_ratio` plus the stds of the other steps."""

    def log_stds(t):
        q, p = (jnp.broadcast_to(jnp.log(m.std(m.params, t, z)), x_0.shape) for m, z in ((draft, z_q), (target, z_p)))
        return jnp.sum(q - p, -1)

    return coupled_log_ratio(target, draft, x_0, x_1, z_p, z_q) + jnp.sum(jax.vmap(log_stds)(_steps(target)[:-1]), 0)


def _steps(model: ContinuousModel) -> Array:
    return jnp.arange(model.num_steps, 0, -1)


def _log_normal(x: Array, mean: Array, std: Array) -> Array:
    """Return the log-density of a diagonal Gaussian, summed over the last axis."""
    std = jnp.broadcast_to(std, x.shape)
    return jnp.sum(-0.5 * ((x - mean) / std) ** 2 - jnp.log(std) - 0.5 * math.log(2 * math.pi), -1)


class State(NamedTuple):
    tokens: Array  # float32[B, S, d]
    length: Array  # int32[B]
    stats: Stats
    exhausted: Array  # int32[B]


class ModelPair(NamedTuple):
    target: ContinuousModel
    draft: ContinuousModel
    condition: PyTree


class DraftWindow(NamedTuple):
    """Draft of a step: a window of W tokens, and inputs for the token after it."""

    tokens: Array  # float32[B, S, d], the text with the drafted tokens
    noise: Array  # float32[T + 1, B, W + 1, d]
    paths: Array  # float32[T + 1, B, W, d], paths of the draft
    z_q: Array  # [B, W, D]
    z_p: Array  # [B, W + 1, D]


@functools.partial(jax.jit, static_argnames=("max_new_tokens", "window", "ratio", "alone", "max_tries"))
@with_standard_modes
def _decode(
    models: ModelPair, prompts, lengths, usable, keys, *, max_new_tokens, window, ratio, alone, max_tries
) -> ContinuousResult:
    stop = lengths + max_new_tokens
    slack = ((0, 0), (0, max_new_tokens + window + 1), (0, 0))  # room for a window after the text
    state = State(jnp.pad(prompts, slack), lengths, zero_stats(len(lengths), window), jnp.zeros_like(lengths))
    state = jax.lax.fori_loop(0, alone, lambda _, s: _target_step(models, keys, s), state)
    step = functools.partial(_step, models, keys, stop, window, RULES[ratio], max_tries)
    state = jax.lax.while_loop(lambda s: jnp.any(s.length < stop), step, state)
    tokens = _take(state.tokens, lengths[:, None] + jnp.arange(max_new_tokens))
    finite = usable & jnp.all(jnp.isfinite(tokens), (1, 2))
    return ContinuousResult(
        tokens, jnp.where(finite, state.length - lengths, 0), state.stats.hit_eos, state.stats, finite=finite,
        exhausted=state.exhausted,
    )  # fmt: skip


def _target_step(models: ModelPair, keys: Array, s: State) -> State:
    """Decode one token with the target."""
    target, positions = models.target, s.length[:, None]
    z = target.features(target.params, models.condition, s.tokens, positions)
    token = sample_path(target, _noise(target, _purpose(keys, s.length, DRAFT), 1), z)[-1]
    none = jnp.zeros(s.stats.drafted_by_depth.shape, bool)
    return s._replace(
        tokens=_write(s.tokens, positions, token),
        length=s.length + 1,
        stats=add_round(s.stats, jnp.ones_like(s.length), none, none),
    )


def _step(models: ModelPair, keys: Array, stop: Array, window: int, rule, max_tries: int, s: State) -> State:
    """Draft, verify, and write the accepted tokens and one token of the target."""
    slots = jnp.arange(window + 1)
    positions = s.length[:, None] + slots
    active = s.length < stop
    draft = _draft(models, _purpose(keys, s.length, DRAFT), s.tokens, positions)
    log_ratio, candidate = rule(models, draft)
    accept_keys, try_keys = jnp.moveaxis(jax.vmap(jax.random.split)(_purpose(keys, s.length, VERIFY)), 1, 0)
    u = uniform(accept_keys, window)
    n = jnp.sum(jnp.cumprod(jnp.log(u) < log_ratio, 1, dtype=jnp.int32), 1)
    token, failed = _first_accepted(functools.partial(candidate, n), try_keys, ~active | (n == window), max_tries)
    count = jnp.where(active, jnp.minimum(n + 1, stop - s.length), 0)
    accepted = jnp.minimum(n, count)
    new = jnp.where((slots == n[:, None])[:, :, None], token[:, None], _take(draft.tokens, positions))
    index = jnp.where(slots < count[:, None], positions, s.tokens.shape[1])
    return State(
        tokens=_write(s.tokens, index, new),
        length=s.length + count,
        stats=add_round(s.stats, active, *(slots[:-1] < end[:, None] for end in (window * active, accepted))),
        exhausted=s.exhausted + (failed & (n < count)),
    )


def _draft(models: ModelPair, keys: Array, tokens: Array, positions: Array) -> DraftWindow:
    """Draft a window of tokens after the text, and run the target's backbone on it."""
    target, draft = models.target, models.draft
    noise = _noise(target, keys, positions.shape[1])

    def body(tokens, slot):
        position, eps = slot  # int32[B], float32[T + 1, B, d]
        z = draft.features(draft.params, models.condition, tokens, position[:, None])[:, 0]
        path = sample_path(draft, eps, z)
        return _write(tokens, position[:, None], path[-1][:, None]), (path, z)

    slots = positions[:, :-1].T, jnp.moveaxis(noise[:, :, :-1], 2, 0)
    tokens, (paths, z_q) = jax.lax.scan(body, tokens, slots)
    z_p = target.features(target.params, models.condition, tokens, positions)
    return DraftWindow(tokens, noise, jnp.moveaxis(paths, 0, 2), jnp.moveaxis(z_q, 0, 1), z_p)


def _path_rule(models: ModelPair, r: DraftWindow):
    """Return log R float32[B, W] of the drafts, and a function that draws candidates.

    The function is (slot [B], keys [B]) -> candidates float32[B, d] and their log R [B].
    """
    target, draft = models.target, models.draft

    def candidate(slot: Array, keys: Array):
        z_p, z_q = _take(r.z_p, slot), _take(r.z_q, slot)
        path = sample_path(target, _noise(target, keys, 1)[:, :, 0], z_p)
        return path[-1], path_log_ratio(target, draft, path, z_p, z_q)

    return path_log_ratio(target, draft, r.paths, r.z_p[:, :-1], r.z_q), candidate


def _last_step_rule(log_ratio, models: ModelPair, r: DraftWindow):
    """Return the same as `_path_rule`, with the log R of two paths on the same noise."""
    target, draft = models.target, models.draft
    target_x_1, draft_x_1 = sample_path(target, r.noise, r.z_p)[-2], r.paths[-2]  # x_1

    def candidate(slot: Array, keys: Array):
        z_p, z_q = _take(r.z_p, slot), _take(r.z_q, slot)
        states = _take(target_x_1, slot), _take(draft_x_1, slot)
        eps = normal(keys, target.dim)
        x_0 = target.mean(target.params, _LAST, states[0], z_p) + target.std(target.params, _LAST, z_p) * eps
        return x_0, log_ratio(target, draft, x_0, states, z_p, z_q)

    states = target_x_1[:, :-1], draft_x_1
    return log_ratio(target, draft, r.paths[-1], states, r.z_p[:, :-1], r.z_q), candidate


RULES: dict[Ratio, Callable] = {
    "path": _path_rule,
    "coupled": functools.partial(_last_step_rule, coupled_log_ratio),
    "aligned": functools.partial(_last_step_rule, aligned_log_ratio),
}


def _first_accepted(candidate, keys: Array, free: Array, max_tries: int) -> tuple[Array, Array]:
    """Return the first accepted candidate of each row float32[B, d], else the last one.

    The second result is bool[B], True if no candidate passed. Rows that are `free` accept their first candidate.
    """

    def body(carry):
        i, token, is_accepted = carry
        noise_keys, u_keys = jnp.moveaxis(jax.vmap(jax.random.split)(fold_in(keys, i)), 1, 0)
        new, log_ratio = candidate(noise_keys)
        u = uniform(u_keys, 1)[:, 0]
        return i + 1, jnp.where(is_accepted[:, None], token, new), is_accepted | free | (u < -jnp.expm1(-log_ratio))

    shape = jax.eval_shape(candidate, keys)[0]
    start = jnp.int32(0), jnp.zeros(shape.shape, shape.dtype), jnp.zeros(keys.shape, bool)
    _, token, is_accepted = jax.lax.while_loop(lambda c: (c[0] < max_tries) & ~jnp.all(c[2]), body, start)
    return token, ~is_accepted


def _purpose(keys: Array, length: Array, purpose: int) -> Array:
    """Return keys [B] of a step for one purpose."""
    return fold_in(fold_in(keys, length), purpose)


def _noise(model: ContinuousModel, keys: Array, count: int) -> Array:
    """Return normal noise float32[T + 1, B, count, d]."""
    shape = model.num_steps + 1, count, model.dim
    return jnp.moveaxis(normal(keys, math.prod(shape)).reshape(-1, *shape), 0, 1)


def _take(x: Array, index: Array) -> Array:
    """Return x[b, index[b]] of x [B, Q, d] for index [B] or [B, I]; an index out of range gives the last entry."""
    index = jnp.minimum(index, x.shape[1] - 1)
    return jax.vmap(lambda row, i: row[i])(x, index)


def _write(tokens: Array, index: Array, new: Array) -> Array:
    """Write new [B, I, d] to tokens [B, S, d] at index [B, I]; entries out of range are dropped."""
    return tokens.at[jnp.arange(tokens.shape[0])[:, None], index].set(new, mode="drop")
