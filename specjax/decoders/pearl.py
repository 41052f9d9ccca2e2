"""PEARL: draft model and target run in parallel, each on its own devices.

Liu, Li, Lv, Liu, Zhu, Hu: PEARL: Parallel Speculative Decoding with Adaptive Draft Length (2024), arXiv 2408.11850.

Rule: in each step the draft model appends gamma tokens d_1 ... d_gamma to the text. At the same time the target reads
the end of the same text. Then both results are joined.
  PRE (the complete text is verified): the target's distribution at the next position tests only d_1. If d_1 passes, all
    gamma drafts are appended, with only the first verified, and the row changes to POST. Otherwise the target's token
    is appended.
  POST (the last gamma - 1 tokens are unverified): these tokens and then d_1 are tested in order. If all pass, the gamma
    drafts are appended. At the first failure the text is cut, the target's token is appended, and the row changes to
    PRE.
A step takes as long as the slower of the two models. It verifies one token in PRE and up to gamma in POST, so the draft
length adapts to the acceptance rate. A test passes if the draft equals the target's own draw,
argmax_v (log p(v) + G(row key, position, v)) with Gumbel noise G. The draft model draws with the same noise, which
increases their agreement.
Guarantee: distribution. In addition, the text for a key equals that of plain decoding, for any draft model.
Deviations: sample and match replaces the ratio test, so that only token ids are exchanged between the models. Each row
has its own mode. A target pass has gamma tokens in PRE too. As in the paper, no bonus token is decoded, because the
next draft replaces it.

The loop has two programs instead of the single one of `decode`. Both are dispatched before either result is read, and
the host joins the results once per step.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from specjax.arrays.indexing import first_largest
from specjax.arrays.modes import with_standard_modes
from specjax.catalog import Method, Option
from specjax.decoders.loop_setup import LoopInputs, check_rows, init_loop
from specjax.engine.packing import Prompts
from specjax.engine.prefill import CHUNK, prefill
from specjax.engine.prepare import Settings
from specjax.engine.results import DecodeResult, add_round, zero_stats
from specjax.engine.step import on_mesh
from specjax.engine.value_checks import are_sound
from specjax.errors import UsageError
from specjax.models.requirements import check_rewinds
from specjax.models.vocabulary import match_vocabulary
from specjax.numerics.sampling import draw, node_keys, warp
from specjax.numerics.validation import check_integer
from specjax.types import Array, PyTree, Sampling, Target

METHOD = Method(
    name="pearl",
    kind="decoder",
    guarantee="distribution",
    summary="runs the draft model and the target in parallel, each on its own devices",
    paper="Liu et al. 2024, arXiv 2408.11850",
    needs=frozenset({"draft", "devices"}),
    arguments=("target", "draft"),
    settings=("key", "temperature", "top_k", "top_p"),
    options=(
        Option("num_tokens", "int", None, "drafted tokens per step; default: from the measured times of both models"),
    ),
)


AnyArray = Any  # a NumPy or JAX array

LONGEST = 32
"""Maximum draft length if it is derived from measured times."""
FAILED = -1
"""The draw from logits that are no numbers."""


class Trace(NamedTuple):
    """State of the rows after each step; finished rows do not change."""

    post: np.ndarray  # bool[steps, B], True in mode POST
    lengths: np.ndarray  # int32[steps, B], number of new tokens, unverified ones included
    verified: np.ndarray  # int32[steps, B], number of verified new tokens


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PearlResult(DecodeResult):
    """Result of `pearl`. In `stats` a depth is a position in the draft; every step drafts gamma tokens."""

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
    """Decode a batch, in which each row proceeds at its own speed.

    It cannot run within the caller's own `jit`; use `pearl_in_one_program` there. A second call with the same shapes
    compiles no program if `num_tokens` is set.

    Args:
      target, draft: models with the same tokenizer on disjoint devices. Place them with `jax.device_put`, or with
        `specjax.shard` over meshes of some `devices` each. On several hosts each mesh needs devices of every host.
      num_tokens: gamma, the number of drafted tokens per step. Default: the time of a target pass divided by that of a
        draft pass, rounded, measured before the first step. It must be set on several hosts, because clocks differ.
      The other arguments are those of `specjax.decode`.

    Raises: UsageError for models that share a device or cannot rewind, or a setting out of range. It is also raised for
      a text that is too long for one of the models, and for a target that returns NaN or Inf.
    """
    values = target, draft, prompts, key, temperature, top_k, top_p, eos, inputs
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(values)):
        raise UsageError("pearl runs two programs and cannot be part of your own jit; use pearl_in_one_program")
    settings = check_options(num_tokens=num_tokens, temperature=temperature, top_k=top_k, top_p=top_p)
    settings = dataclasses.replace(settings, eos=eos, capacity=capacity)
    loop_inputs = init_loop(
        target, prompts, settings, key=key, max_new_tokens=max_new_tokens, room=1, inputs=inputs,
        longest=draft.model.max_positions,
    )  # fmt: skip
    check_pair(target, draft)
    if num_tokens is None and jax.process_count() > 1:
        raise UsageError("num_tokens is measured on one host only; give it on several hosts")
    _check_apart(devices_of(target), devices_of(draft))
    tokens, prompt_lengths, eos_ids = map(np.asarray, (loop_inputs.tokens, loop_inputs.prompts, loop_inputs.eos))
    start = Text.of(tokens, prompt_lengths, int(max_new_tokens), num_tokens or LONGEST)
    roles = [_place(role) for role in make_roles(target, draft, loop_inputs)]
    caches = [_read(role, start.tokens, start.length - 1) for role in roles]  # the prompts are read in parallel too
    gamma, caches = (num_tokens, caches) if num_tokens else _measure(roles, caches, start)
    return check_rows(_run(roles, caches, start, eos_ids, gamma, int(max_new_tokens)), target)


def check_options(
    *, num_tokens: int | None, temperature: float | Array = 0.0, top_k: int | Array | None = None,
    top_p: float | Array | None = None,
) -> Settings:  # fmt: skip
    """Check the options, and return the settings. Raises: UsageError."""
    if num_tokens is not None:
        check_integer("num_tokens", num_tokens, 1)
    return Settings(temperature, top_k, top_p)


def check_pair(target: Target, draft: Target) -> None:
    """Raise UsageError for a model that cannot rewind."""
    for model in (draft.model, target.model):
        check_rewinds(model, "PEARL", "use two_model, which commits accepted tokens only")


def devices_of(model: Target) -> set[jax.Device]:
    """Return the devices of a model's parameters."""
    arrays = [leaf for leaf in jax.tree.leaves(model.params) if isinstance(leaf, jax.Array)]
    return {device for leaf in arrays for device in leaf.devices()}


def _check_apart(target: set[jax.Device], draft: set[jax.Device]) -> None:
    place = "with jax.device_put or with specjax.shard and specjax.mesh(devices=...)"
    if not target or not draft:
        raise UsageError(f"the {'draft' if target else 'target'} is on no device; place its parameters, {place}")
    if target & draft:
        shared_device = min(target & draft, key=lambda device: device.id)
        raise UsageError(
            f"target and draft share {shared_device} and would wait for each other; place them on different devices "
            f"{place}"
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Role:
    """Inputs of one side for every step, on its devices."""

    target: Target  # the model of this side
    sampling: Sampling
    keys: Array  # key[B]
    inputs: PyTree = None  # inputs of its model, if any


@with_standard_modes
def make_roles(target: Target, draft: Target, loop_inputs: LoopInputs) -> tuple[Role, Role]:
    """Return the roles of the draft model, which may read no inputs, and of the target."""
    inputs = loop_inputs.inputs
    make_role = lambda side, inputs: Role(side, loop_inputs.sampling, loop_inputs.keys, inputs)
    drafting = Target(match_vocabulary(draft.model, target), draft.params)
    return make_role(drafting, draft.model.select_inputs(inputs)), make_role(target, inputs)


class Text(NamedTuple):
    """Texts of the rows: NumPy arrays if the host joins the two sides, device arrays if a program joins them."""

    tokens: AnyArray  # int32[B, S]
    verified: AnyArray  # int32[B], number of verified tokens
    length: AnyArray  # int32[B], number of tokens, unverified ones included
    post: AnyArray  # bool[B]
    stop: AnyArray  # int32[B], length at which the row is full
    hit_eos: AnyArray  # bool[B]
    finite: AnyArray  # bool[B], False for rows that failed

    @classmethod
    def of(
        cls, tokens: AnyArray, lengths: AnyArray, max_new_tokens: int, gamma: int, usable: AnyArray | None = None
    ) -> Text:
        """Return the texts before the first step, with slots for the drafts of two steps or a prefill chunk.

        usable: bool[B], False for rows that decode no token; None: all rows decode.
        """
        slack = max(2 * gamma, CHUNK)
        false = lengths < 0
        padded = _array_module(tokens).pad(tokens, ((0, 0), (0, slack)))
        return cls(
            padded, lengths, lengths, false, lengths + max_new_tokens, false, ~false if usable is None else usable
        )

    @property
    def done(self) -> AnyArray:
        return self.hit_eos | ~self.finite | (self.verified >= self.stop)

    def window(self, start: AnyArray, width: int) -> AnyArray:
        """Return the tokens int32[B, width] from position `start` int32[B] on."""
        return _array_module(self.tokens).take_along_axis(self.tokens, start[:, None] + np.arange(width), 1)

    def write(self, start: AnyArray, values: AnyArray) -> Text:
        """Return the texts with values int32[B, W] written from position `start` int32[B] on."""
        place = start[:, None] + np.arange(values.shape[1])
        if isinstance(self.tokens, jax.Array):
            return self._replace(tokens=self.tokens.at[np.arange(len(values))[:, None], place].set(values))
        tokens = self.tokens.copy()
        np.put_along_axis(tokens, place, values, 1)
        return self._replace(tokens=tokens)


def _array_module(x: AnyArray) -> Any:
    """Return the array module of x: `jax.numpy` or `numpy`."""
    return jnp if isinstance(x, jax.Array) else np


def _run(roles, caches, start: Text, eos: np.ndarray, gamma: int, max_new_tokens: int) -> PearlResult:
    (draft_side, target_side), (drafted_cache, cache) = roles, caches
    stats = jax.tree.map(np.asarray, zero_stats(len(start.tokens), gamma))
    text, trace = start, []
    while not text.done.all():
        # Both programs are dispatched before either result is read.
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
        finite=jnp.asarray(text.finite),
        trace=Trace(*map(np.stack, zip(*trace, strict=True))),
        num_tokens=gamma,
    )


def join(text: Text, drafts: AnyArray, picks: AnyArray, eos: AnyArray) -> tuple[Text, AnyArray]:
    """Join the two sides of a step.

    The verified tokens are picks: the leading picks that equal the drafts, and the first one that differs. A text ends
    before a pick that is FAILED.

    Args:
      drafts: int32[B, gamma], drafted tokens after the text.
      picks: int32[B, gamma], the target's own draws for the positions from `text.verified` on.

    Returns: the text, and accepted bool[B, gamma], True for the positions of a draft that were verified.
    """
    xp, gamma = _array_module(drafts), drafts.shape[1]
    slots = np.arange(gamma)
    longer = text.write(text.length, drafts)
    claimed = longer.window(text.verified, gamma)
    tests = xp.where(text.post, gamma, 1)
    matched = xp.sum(xp.cumprod((claimed == picks) & (slots < tests[:, None]), 1), 1)
    passed = matched == tests
    # Cut at the first eos and at the row's limit.
    remaining = xp.where(text.done, 0, text.stop - text.verified)
    is_new = slots < xp.minimum(xp.where(passed, tests, matched + 1), remaining)[:, None]
    is_sound = xp.cumprod(picks != FAILED, 1).astype(bool)
    ends = xp.isin(picks, eos) & is_new & is_sound
    hit_eos = ends.any(1)
    finite = text.finite & (hit_eos | (is_sound | ~is_new).all(1))
    is_new = is_new & is_sound
    count = xp.where(hit_eos, xp.argmax(ends, 1) + 1, is_new.sum(1)).astype(np.int32)
    verified = text.verified + count
    is_finished = text.done | hit_eos | ~finite | (verified >= text.stop)
    continues = passed & ~is_finished
    joined = longer.write(text.verified, xp.where(slots < count[:, None], picks, claimed))._replace(
        verified=verified,
        length=xp.where(continues, text.length + gamma, verified).astype(np.int32),
        post=continues,
        hit_eos=text.hit_eos | hit_eos,
        finite=finite,
    )
    accepted = slots < xp.minimum(matched, count)[:, None]  # in the order of the tests; d_1 is the last one
    return joined, xp.where(text.post[:, None], xp.roll(accepted, 1, 1), accepted)


def _place(role: Role) -> Role:
    """Place the small arrays of a role on the devices of its parameters."""
    shardings = [leaf.sharding for leaf in jax.tree.leaves(role.target.params) if isinstance(leaf, jax.Array)]
    meshes = [sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)]
    everywhere = NamedSharding(meshes[0], PartitionSpec()) if meshes else shardings[0]
    return Role(role.target, *jax.device_put((role.sampling, role.keys, role.inputs), everywhere))


@jax.jit
@on_mesh
@with_standard_modes
def _read(role: Role, tokens: Array, count: Array) -> PyTree:
    """Return the cache of the first `count` int32[B] of tokens int32[B, S]."""
    model, params = role.target.model, role.target.params
    return prefill(model, params, model.start_cache(params, role.inputs, count + 1, tokens.shape[1]), tokens, count)


@functools.partial(jax.jit, static_argnames=("gamma",), donate_argnames=("cache",))
@on_mesh
@with_standard_modes
def _draft(role: Role, cache: PyTree, last: Array, length: Array, *, gamma: int) -> tuple[Array, PyTree]:
    """Draft int32[B, gamma] tokens after a text of `length` int32[B] tokens that ends with `last` int32[B, 1]."""

    def draft_token(carry, depth):
        cache, token = carry
        picks, cache = _next(role, cache, token, length + depth)
        picks = jnp.maximum(picks, 0)  # a draft that failed is wrong, and nothing else
        return (cache, picks), picks[:, 0]

    # Rewind to the tokens on which both sides agree. The text never grows by more tokens than were fed.
    cache = role.target.model.rewind_cache(cache, length - 1)
    (cache, _), drafts = jax.lax.scan(draft_token, (cache, last), jnp.arange(gamma))
    return _replicate(role, drafts.T), cache


@functools.partial(jax.jit, donate_argnames=("cache",))
@on_mesh
@with_standard_modes
def _verify(role: Role, cache: PyTree, window: Array, verified: Array) -> tuple[Array, PyTree]:
    """Return the target's draws int32[B, gamma] after each token of `window` int32[B, gamma].

    The window begins with the last verified token. The next step removes rejected drafts from the cache.
    """
    picks, cache = _next(role, role.target.model.rewind_cache(cache, verified - 1), window, verified)
    return _replicate(role, picks), cache


def _next(role: Role, cache: PyTree, tokens: Array, length: Array) -> tuple[Array, PyTree]:
    """Draw int32[B, T], one token after each of `tokens` int32[B, T], and commit `tokens`.

    Args:
      length: int32[B], length of the text including the first token.
    """
    picks, pending = draws(role, cache, tokens, length, triangle(tokens))
    return picks, commit_all(role, cache, pending, tokens)


def triangle(tokens: Array) -> Array:
    """Return the causal mask bool[B, T, T] of tokens int32[B, T]."""
    batch, width = tokens.shape
    return jnp.broadcast_to(jnp.tril(jnp.ones((width, width), bool)), (batch, width, width))


def draws(
    role: Role, cache: PyTree, tokens: Array, length: Array, mask: Array, earlier: PyTree = None
) -> tuple[Array, PyTree]:
    """Draw int32[B, T], one token or FAILED after each of `tokens` int32[B, T]. Also return their pending entries.

    Args:
      length: int32[B], length of the text including the first token.
      mask, earlier: see `Model.forward`.
    """
    place = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    positions, (model, params) = length[:, None] - 1 + place, (role.target.model, role.target.params)
    output, pending = model.forward(params, tokens, cache, positions=positions, mask=mask, earlier=earlier)
    logits = warp(output.logits, role.sampling)
    if role.sampling.temperature is None:
        picks = first_largest(logits)
    else:
        picks = jax.vmap(draw, 1, 1)(node_keys(role.keys, length, place), logits)
    return jnp.where(are_sound(output.logits), picks, FAILED), pending


def commit_all(role: Role, cache: PyTree, pending: PyTree, tokens: Array) -> PyTree:
    """Commit all of tokens int32[B, T] to the cache."""
    batch, width = tokens.shape
    path = jnp.broadcast_to(jnp.arange(width), (batch, width))
    return role.target.model.commit(cache, pending, path, jnp.full((batch,), width, jnp.int32))


def _replicate(role: Role, ids: Array) -> Array:
    """Replicate token ids on every device, so that every host can read them."""
    mesh = role.target.model.mesh
    return ids if mesh is None else jax.lax.with_sharding_constraint(ids, NamedSharding(mesh, PartitionSpec()))


def _measure(roles, caches, text: Text) -> tuple[int, list]:
    """Measure the number of tokens that the draft model drafts during a target pass. Also return the caches.

    The number of tokens in the caches does not change.
    """
    (draft_side, target_side), (drafted_cache, cache) = roles, caches

    def seconds(run, cache):
        times = []
        for _ in range(4):  # the first one compiles
            start = time.perf_counter()
            cache = jax.block_until_ready(run(cache)[1])
            times.append(time.perf_counter() - start)
        return min(times[1:]), cache

    last = text.window(text.length - 1, 1)
    draft_time, drafted_cache = seconds(lambda c: _draft(draft_side, c, last, text.length, gamma=1), drafted_cache)
    target_time, cache = seconds(lambda c: _verify(target_side, c, last, text.length), cache)
    return int(np.clip(round(target_time / draft_time), 1, LONGEST)), [drafted_cache, cache]
