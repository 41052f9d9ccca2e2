"""PEARL: draft and target decode at the same time, each on devices of its own.

Liu, Li, Lv, Liu, Zhu, Hu: PEARL: Parallel Speculative Decoding with Adaptive Draft Length (2024), arXiv 2408.11850.

Rule: in each step the draft model appends gamma tokens d_1 ... d_gamma to the text while the target reads the end of
the same text; then they join.
  PRE (nothing of the text is unverified): the target's distribution at the next position tests d_1 alone. If it
    passes, all gamma drafts are appended, unverified but for the first, and the row goes to POST; else the target's
    token is.
  POST (the last gamma - 1 tokens are unverified): these and then d_1 are tested in order. If all pass, the gamma drafts
    are appended; at the first failure the text is cut there, the target's token appended, and the row goes to PRE.
A step takes as long as the slower of the two and verifies one token in PRE, up to gamma in POST: so how far ahead is
drafted follows the acceptance. A test passes if the draft is the target's own draw, argmax_v (log p(v) + G(row key,
position, v)) with Gumbel noise G; the draft model draws with the same noise, which makes them agree more often.
Guarantee: distribution; more, the text for a key is that of plain decoding, whatever the draft model.
Deviations: sample and match in place of the ratio test, so that only token ids move between the two. The mode is a
row's own. A target pass is gamma tokens wide in PRE too. No bonus token, in the paper neither: the next draft is it.

Not one program of `decode`: two programs are dispatched before either is read, and the host joins them, once per step.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from specjax.arrays.indexing import first_largest
from specjax.arrays.x64 import without_x64
from specjax.catalog import Method, Option
from specjax.engine.packing import Prompts, new_tokens, pack
from specjax.engine.prefill import CHUNK, prefill
from specjax.engine.prepare import Settings
from specjax.engine.results import DecodeResult
from specjax.engine.statistics import add_round, zero_stats
from specjax.engine.step import on_mesh
from specjax.errors import UsageError
from specjax.models.vocabulary import match_vocabulary
from specjax.numerics.sampling import draw, node_keys, row_keys, warp
from specjax.types import Array, PyTree, Sampling, Target

METHOD = Method(
    name="pearl",
    kind="decoder",
    guarantee="distribution",
    summary="runs the draft model and the target in parallel, each on its own devices",
    paper="Liu et al. 2024, arXiv 2408.11850",
    needs=frozenset({"draft", "devices"}),
    options=(
        Option("num_tokens", "int", None, "drafted tokens per step; default: from the measured times of both models"),
    ),
)


AnyArray = Any  # of numpy or JAX

LONGEST = 32
"""Tokens of a draft, where their number is measured."""


class Trace(NamedTuple):
    """Per step, after it. A row that has ended stays as it is."""

    post: np.ndarray  # bool[steps, B], the mode: False is PRE
    lengths: np.ndarray  # int32[steps, B], new tokens, the unverified ones included
    verified: np.ndarray  # int32[steps, B], new tokens


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PearlResult(DecodeResult):
    """What was decoded, and how. In `stats`, a depth is a place in the draft; every step drafts all gamma."""

    trace: Trace
    num_tokens: int = field(metadata={"static": True})  # gamma


def pearl(
    target: Target,
    draft: Target,
    prompts: Prompts,
    *,
    key: Array | int,
    max_new_tokens: int,
    num_tokens: int | None = None,
    temperature: float | Array = 0.0,
    top_k: int | Array | None = None,
    top_p: float | Array | None = None,
    eos=(),
    capacity: int | None = None,
    inputs: PyTree = None,
) -> PearlResult:
    """Decode a batch; each row goes at its own speed. Not for the caller's own `jit`: see `pearl_in_one_program`.

    A second call with the same shapes compiles nothing, if `num_tokens` is given.

    Args:
      target, draft: models of one tokenizer on disjoint devices: placed by `jax.device_put`, or by `specjax.shard`
        over meshes of some `devices` each. Over several hosts, each mesh has devices of every host.
      num_tokens: gamma, how many tokens are drafted per step. None: the time of a target pass over that of a draft
        pass, rounded, as measured before the first step; clocks differ, so give it on several hosts.
      The others are those of `specjax.decode`.

    Raises: UsageError for models that share a device or cannot rewind, a setting outside its
      range, or a text longer than one of the models takes.
    """
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((target, draft, prompts, key))):
        raise UsageError("pearl runs two programs and cannot be part of your own jit; pearl_in_one_program can")
    capacity = min(capacity or target.model.max_positions, draft.model.max_positions)
    settings = Settings(temperature, top_k, top_p, eos)
    max_new_tokens = new_tokens(max_new_tokens)
    tokens, lengths = pack(prompts, max_new_tokens, 1, capacity, target.model.vocab_size)
    check_pair(target, draft, num_tokens)
    if num_tokens is None and jax.process_count() > 1:
        raise UsageError("num_tokens is measured on one host only; give it on several hosts")
    _check_apart(devices_of(target), devices_of(draft))
    start = Text.of(np.asarray(tokens), np.asarray(lengths), max_new_tokens, num_tokens or LONGEST)
    roles = [_place(role) for role in make_roles(target, draft, settings, row_keys(key, len(lengths)), inputs)]
    caches = [_read(role, start.tokens, start.length - 1) for role in roles]  # both prompts at the same time, too
    gamma, caches = (num_tokens, caches) if num_tokens else _measure(roles, caches, start)
    return _run(roles, caches, start, np.asarray(settings.ends()), gamma, max_new_tokens)


def check_pair(target: Target, draft: Target, num_tokens: int | None) -> None:
    """Raises: UsageError for a draft of no tokens, or a model that cannot rewind."""
    if num_tokens is not None and num_tokens < 1:
        raise UsageError(f"num_tokens must be at least 1, not {num_tokens}")
    for model in (draft.model, target.model):
        if model.rewind is None:
            raise UsageError(
                f"PEARL takes back drafts that failed, and the model {model.name} cannot rewind; decode with "
                "specjax.drafters.two_model, which commits only what was accepted"
            )


def devices_of(model: Target) -> set[jax.Device]:
    """Where its parameters lie."""
    arrays = [leaf for leaf in jax.tree.leaves(model.params) if isinstance(leaf, jax.Array)]
    return {device for leaf in arrays for device in leaf.devices()}


def _check_apart(target: set[jax.Device], draft: set[jax.Device]) -> None:
    place = "with jax.device_put or with specjax.shard and specjax.mesh(devices=...)"
    if not target or not draft:
        raise UsageError(f"the {'draft' if target else 'target'} is on no device; place its parameters, {place}")
    if target & draft:
        one = min(target & draft, key=lambda device: device.id)
        raise UsageError(
            f"target and draft share {one}, and would wait for each other; place them on devices of their own, {place}"
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Role:
    """What one side needs in every step, on its devices."""

    target: Target  # the model of this side
    sampling: Sampling
    keys: Array  # key[B]
    inputs: PyTree = None  # those of its model, if it takes any


@without_x64
def make_roles(target: Target, draft: Target, settings: Settings, keys: Array, inputs: PyTree) -> tuple[Role, Role]:
    """Of the draft and of the target."""
    of = lambda side: Role(side, settings.warping(), keys, side.model.reads(inputs))
    return of(Target(match_vocabulary(draft.model, target), draft.params)), of(target)


class Text(NamedTuple):
    """The rows: numpy where the host joins the two sides, arrays of the device where a program does."""

    tokens: AnyArray  # int32[B, S]
    verified: AnyArray  # int32[B], tokens that are final
    length: AnyArray  # int32[B], with those that are not
    post: AnyArray  # bool[B]
    stop: AnyArray  # int32[B], length at which the row is full
    hit_eos: AnyArray  # bool[B]

    @classmethod
    def of(cls, tokens: AnyArray, lengths: AnyArray, max_new_tokens: int, gamma: int) -> Text:
        """Before the first step, with room for what may lie behind the end: drafts of two steps, or a prefill chunk."""
        behind = max(2 * gamma, CHUNK)
        none = lengths < 0
        padded = _numpy_of(tokens).pad(tokens, ((0, 0), (0, behind)))
        return cls(padded, lengths, lengths, none, lengths + max_new_tokens, none)

    @property
    def done(self) -> AnyArray:
        return self.hit_eos | (self.verified >= self.stop)

    def window(self, start: AnyArray, width: int) -> AnyArray:
        """int32[B, width]: the tokens from `start` int32[B] on."""
        return _numpy_of(self.tokens).take_along_axis(self.tokens, start[:, None] + np.arange(width), 1)

    def write(self, start: AnyArray, values: AnyArray) -> Text:
        """With int32[B, W] from `start` int32[B] on."""
        place = start[:, None] + np.arange(values.shape[1])
        if isinstance(self.tokens, jax.Array):
            return self._replace(tokens=self.tokens.at[np.arange(len(values))[:, None], place].set(values))
        tokens = self.tokens.copy()
        np.put_along_axis(tokens, place, values, 1)
        return self._replace(tokens=tokens)


def _numpy_of(x: AnyArray) -> Any:
    """The functions for it."""
    return jnp if isinstance(x, jax.Array) else np


def _run(roles, caches, start: Text, eos: np.ndarray, gamma: int, max_new_tokens: int) -> PearlResult:
    (draft_side, target_side), (drafted_cache, cache) = roles, caches
    stats = jax.tree.map(np.asarray, zero_stats(len(start.tokens), gamma))
    text, trace = start, []
    while not text.done.all():
        # Both are under way before either is read.
        picks, cache = _verify(target_side, cache, text.window(text.verified - 1, gamma), text.verified)
        drafts, drafted_cache = _draft(
            draft_side, drafted_cache, text.window(text.length - 1, 1), text.length, gamma=gamma
        )
        drafts, picks = jax.device_get((drafts, picks))
        active = ~text.done
        text, accepted = join(text, drafts, picks, eos)
        stats = add_round(stats, active, np.repeat(active[:, None], gamma, 1), accepted)
        trace.append((text.post, text.length - start.length, text.verified - start.length))
    count = text.verified - start.length
    tokens = np.where(np.arange(max_new_tokens) < count[:, None], text.window(start.length, max_new_tokens), -1)
    stats = jax.tree.map(jnp.asarray, stats._replace(hit_eos=text.hit_eos))
    return PearlResult(
        jnp.asarray(tokens),
        jnp.asarray(count),
        stats.hit_eos,
        stats,
        trace=Trace(*map(np.stack, zip(*trace, strict=True))),
        num_tokens=gamma,
    )


def join(text: Text, drafts: AnyArray, picks: AnyArray, eos: AnyArray) -> tuple[Text, AnyArray]:
    """The two sides of a step: drafts int32[B, gamma] behind the text, the target's own draws picks int32[B, gamma] for
    the positions from `text.verified` on.

    Every final token is one of the picks: of those that the drafts equal, and of the first that they do not.

    Returns: the text, and accepted bool[B, gamma]: by place in their draft, which tokens became final.
    """
    xp, gamma = _numpy_of(drafts), drafts.shape[1]
    place = np.arange(gamma)
    longer = text.write(text.length, drafts)
    claimed = longer.window(text.verified, gamma)
    tests = xp.where(text.post, gamma, 1)
    matched = xp.sum(xp.cumprod((claimed == picks) & (place < tests[:, None]), 1), 1)
    passed = matched == tests
    # Cut at the first eos and at the row's limit.
    room = xp.where(text.done, 0, text.stop - text.verified)
    alive = place < xp.minimum(xp.where(passed, tests, matched + 1), room)[:, None]
    ends = xp.isin(picks, eos) & alive
    hit_eos = ends.any(1)
    count = xp.where(hit_eos, xp.argmax(ends, 1) + 1, alive.sum(1)).astype(np.int32)
    verified = text.verified + count
    over = text.done | hit_eos | (verified >= text.stop)
    goes_on = passed & ~over
    after = longer.write(text.verified, xp.where(place < count[:, None], picks, claimed))._replace(
        verified=verified,
        length=xp.where(goes_on, text.length + gamma, verified).astype(np.int32),
        post=goes_on,
        hit_eos=text.hit_eos | hit_eos,
    )
    accepted = place < xp.minimum(matched, count)[:, None]  # in the order of the tests, in which d_1 is the last
    return after, xp.where(text.post[:, None], xp.roll(accepted, 1, 1), accepted)


def _place(role: Role) -> Role:
    """The small arrays of a role beside its parameters."""
    shardings = [leaf.sharding for leaf in jax.tree.leaves(role.target.params) if isinstance(leaf, jax.Array)]
    meshes = [sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)]
    everywhere = NamedSharding(meshes[0], PartitionSpec()) if meshes else shardings[0]
    return Role(role.target, *jax.device_put((role.sampling, role.keys, role.inputs), everywhere))


@jax.jit
@on_mesh
@without_x64
def _read(role: Role, tokens: Array, count: Array) -> PyTree:
    """The cache of the first `count` int32[B] of tokens int32[B, S]."""
    model, params = role.target.model, role.target.params
    return prefill(model, params, model.start_cache(params, role.inputs, count + 1, tokens.shape[1]), tokens, count)


@functools.partial(jax.jit, static_argnames=("gamma",), donate_argnames=("cache",))
@on_mesh
@without_x64
def _draft(role: Role, cache: PyTree, last: Array, length: Array, *, gamma: int) -> tuple[Array, PyTree]:
    """Drafts int32[B, gamma] behind a text of `length` int32[B] that ends with `last` int32[B, 1]."""

    def one(carry, depth):
        cache, token = carry
        picks, cache = _next(role, cache, token, length + depth)
        return (cache, picks), picks[:, 0]

    # Rolled back to what the two sides agree on. The text has grown by no more than what was fed.
    cache = role.target.model.rewind_cache(cache, length - 1)
    (cache, _), drafts = jax.lax.scan(one, (cache, last), jnp.arange(gamma))
    return _whole(role, drafts.T), cache


@functools.partial(jax.jit, donate_argnames=("cache",))
@on_mesh
@without_x64
def _verify(role: Role, cache: PyTree, window: Array, verified: Array) -> tuple[Array, PyTree]:
    """The target's draws int32[B, gamma] behind each token of `window` int32[B, gamma], which begins with the last
    verified token. Drafts in it that fail are forgotten by the next step."""
    picks, cache = _next(role, role.target.model.rewind_cache(cache, verified - 1), window, verified)
    return _whole(role, picks), cache


def _next(role: Role, cache: PyTree, tokens: Array, length: Array) -> tuple[Array, PyTree]:
    """Draws int32[B, T] behind each of tokens int32[B, T], all committed; `length` counts the text with the first."""
    picks, pending = draws(role, cache, tokens, length, triangle(tokens))
    return picks, commit_all(role, cache, pending, tokens)


def triangle(tokens: Array) -> Array:
    """bool[B, T, T]: each of tokens int32[B, T] sees itself and those before."""
    batch, width = tokens.shape
    return jnp.broadcast_to(jnp.tril(jnp.ones((width, width), bool)), (batch, width, width))


def draws(
    role: Role, cache: PyTree, tokens: Array, length: Array, mask: Array, earlier: PyTree = None
) -> tuple[Array, PyTree]:
    """Draws int32[B, T] behind each of tokens int32[B, T], and what is pending of these; `length` counts the text with
    the first of them. mask, earlier: as of `Model.forward`.
    """
    place = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    positions, (model, params) = length[:, None] - 1 + place, (role.target.model, role.target.params)
    output, pending = model.forward(params, tokens, cache, positions=positions, mask=mask, earlier=earlier)
    logits = warp(output.logits, role.sampling)
    if role.sampling.temperature is None:
        return first_largest(logits), pending
    return jax.vmap(draw, 1, 1)(node_keys(role.keys, length, place), logits), pending


def commit_all(role: Role, cache: PyTree, pending: PyTree, tokens: Array) -> PyTree:
    """The cache with all of tokens int32[B, T]."""
    batch, width = tokens.shape
    path = jnp.broadcast_to(jnp.arange(width), (batch, width))
    return role.target.model.commit(cache, pending, path, jnp.full((batch,), width, jnp.int32))


def _whole(role: Role, ids: Array) -> Array:
    """Token ids whole on every device, so that every host can read them."""
    mesh = role.target.model.mesh
    return ids if mesh is None else jax.lax.with_sharding_constraint(ids, NamedSharding(mesh, PartitionSpec()))


def _measure(roles, caches, text: Text) -> tuple[int, list]:
    """Tokens that the draft model writes during a pass of the target, and the caches, which keep their tokens."""
    (draft_side, target_side), (drafted_cache, cache) = roles, caches

    def seconds(run, cache):
        times = []
        for _ in range(4):  # the first compiles
            start = time.perf_counter()
            cache = jax.block_until_ready(run(cache)[1])
            times.append(time.perf_counter() - start)
        return min(times[1:]), cache

    last = text.window(text.length - 1, 1)
    draft_time, drafted_cache = seconds(lambda c: _draft(draft_side, c, last, text.length, gamma=1), drafted_cache)
    target_time, cache = seconds(lambda c: _verify(target_side, c, last, text.length), cache)
    return int(np.clip(round(target_time / draft_time), 1, LONGEST)), [drafted_cache, cache]
