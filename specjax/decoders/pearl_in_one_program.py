"""PEARL in one program: the two roles under one `shard_map`, each on a device of its own.

The method, its rule and its guarantee are those of `specjax.decoders.pearl`. Here no host joins the sides: the whole
loop is compiled, and may be part of the caller's own `jit`. In every step device 0 of the axis "role" drafts while
device 1 reads the end of the text; the branches hold no collectives, then token ids are exchanged and both join them.
Price: the arrays of a program have one shape on all of its devices, so both hold both models and both caches, though
each only reads its own. Two programs do without that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from specjax.arrays.x64 import without_x64
from specjax.catalog import REQUIRED, Method, Option
from specjax.decoders.pearl import Role, Text, check_pair, commit_all, draws, join, make_roles, triangle
from specjax.engine.packing import Prompts, new_tokens, pack
from specjax.engine.prefill import prefill
from specjax.engine.prepare import Settings
from specjax.engine.results import DecodeResult
from specjax.engine.statistics import add_round, zero_stats
from specjax.errors import UsageError
from specjax.numerics.sampling import row_keys
from specjax.types import Array, PyTree, Stats, Target

METHOD = Method(
    name="pearl_in_one_program",
    kind="decoder",
    guarantee="distribution",
    summary="runs PEARL as one compiled program on two devices, which a larger program can contain",
    paper="Liu et al. 2024, arXiv 2408.11850",
    needs=frozenset({"draft", "devices"}),
    options=(Option("num_tokens", "int", REQUIRED, "drafted tokens per step"),),
)


def pearl_in_one_program(
    target: Target,
    draft: Target,
    prompts: Prompts,
    *,
    key: Array | int,
    max_new_tokens: int,
    num_tokens: int,
    devices: Sequence[jax.Device] | None = None,
    temperature: float | Array = 0.0,
    top_k: int | Array | None = None,
    top_p: float | Array | None = None,
    eos=(),
    capacity: int | None = None,
    inputs: PyTree = None,
) -> DecodeResult:
    """Decode a batch. A second call with the same shapes compiles nothing.

    Args:
      target, draft: models of one tokenizer, not sharded; both are copied to both devices.
      num_tokens: gamma, how many tokens are drafted per step.
      devices: two, of the draft and of the target; default: the first two.
      The others are those of `specjax.decode`.

    Returns: DecodeResult, in whose `stats` a depth is a place in the draft; every step drafts all gamma.
    Raises: UsageError for fewer than two devices, models that are sharded or cannot rewind, or a
      setting outside its range.
    """
    check_pair(target, draft, num_tokens)
    devices = jax.devices()[:2] if devices is None else devices
    if len(set(devices)) != 2:
        raise UsageError(f"pearl_in_one_program runs on two devices, but there are {len(set(devices))}")
    for model in (target.model, draft.model):
        if model.mesh is not None:
            raise UsageError(f"{model.name} is sharded, but here each role has one device; pearl takes meshes")
    settings = Settings(temperature, top_k, top_p, eos)
    capacity = min(capacity or target.model.max_positions, draft.model.max_positions)
    max_new_tokens = new_tokens(max_new_tokens)
    tokens, lengths = pack(prompts, max_new_tokens, 1, capacity, target.model.vocab_size)
    mesh = Mesh(np.array(devices), ("role",))
    roles = make_roles(target, draft, settings, row_keys(key, len(lengths)), inputs)
    arguments = roles, tokens, lengths, settings.ends()
    if not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arguments)):
        arguments = jax.device_put(arguments, NamedSharding(mesh, P()))
    return _run(*arguments, mesh=mesh, gamma=num_tokens, max_new_tokens=max_new_tokens)


@functools.partial(jax.jit, static_argnames=("mesh", "gamma", "max_new_tokens"))
@without_x64
def _run(roles, tokens: Array, lengths: Array, eos: Array, *, mesh, gamma: int, max_new_tokens: int) -> DecodeResult:
    start = Text.of(tokens, lengths, max_new_tokens, gamma)
    loop = functools.partial(_loop, gamma=gamma)
    # Every device ends with the same, which the compiler cannot see.
    spread = jax.shard_map(loop, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    text, stats = spread(roles, start, eos)
    count = text.verified - lengths
    new = jnp.where(np.arange(max_new_tokens) < count[:, None], text.window(lengths, max_new_tokens), -1)
    return DecodeResult(new, count, text.hit_eos, stats._replace(hit_eos=text.hit_eos))


def _loop(roles: tuple[Role, Role], start: Text, eos: Array, *, gamma: int) -> tuple[Text, Stats]:
    """What each of the two devices runs."""
    drafts_here = jax.lax.axis_index("role") == 0
    drafter, target = roles

    def of_both(draft, verify):
        """What one of the two gives here, zeros for the other."""
        return jax.lax.cond(drafts_here, lambda: (draft(), _zeros_of(verify)), lambda: (_zeros_of(draft), verify()))

    def body(carry):
        text, stats, (drafted, cache) = carry
        drafted = drafter.target.model.rewind_cache(drafted, text.length - 1)
        cache = target.target.model.rewind_cache(cache, text.verified - 1)
        last, window = text.window(text.length - 1, 1), text.window(text.verified - 1, gamma)
        (drafts, new), (picks, pending) = of_both(
            lambda: _draft(drafter, drafted, last, text.length, gamma),
            lambda: draws(target, cache, window, text.verified, triangle(window)),
        )
        # Outside of the branches, which would copy the caches that they give back.
        caches = commit_all(drafter, drafted, new, drafts), commit_all(target, cache, pending, window)
        drafts, picks = jax.lax.psum((drafts, picks), "role")
        active = jnp.repeat(~text.done[:, None], gamma, 1)
        text, accepted = join(text, drafts, picks, eos)
        return text, add_round(stats, active[:, 0], active, accepted), caches

    caches = of_both(lambda: _read(drafter, start), lambda: _read(target, start))
    going = lambda carry: ~jnp.all(carry[0].done)
    return jax.lax.while_loop(going, body, (start, zero_stats(len(start.tokens), gamma), caches))[:2]


def _read(role: Role, text: Text) -> PyTree:
    """The cache of the prompts but their last tokens."""
    model, params = role.target.model, role.target.params
    cache = model.start_cache(params, role.inputs, text.length, text.tokens.shape[1])
    return prefill(model, params, cache, text.tokens, text.length - 1)


def _draft(role: Role, cache: PyTree, last: Array, length: Array, gamma: int) -> tuple[Array, PyTree]:
    """Drafts int32[B, gamma] behind a text of `length` int32[B] that ends with `last` int32[B, 1], and what is pending
    of that token and of all drafts but the last.
    """
    batch = last.shape[0]
    wide = jnp.zeros((batch, gamma), jnp.int32)
    none = _zeros_of(lambda: draws(role, cache, wide, length, triangle(wide))[1])

    def one(carry, depth):
        pending, token = carry
        seen = jnp.append(jnp.arange(gamma) < depth, True)
        mask = jnp.broadcast_to(seen, (batch, 1, gamma + 1))
        picks, new = draws(role, cache, token, length + depth, mask, pending)
        return (role.target.model.insert(pending, new, depth), picks), picks[:, 0]

    (pending, _), drafts = jax.lax.scan(one, (none, last), jnp.arange(gamma))
    return drafts.T, pending


def _zeros_of(run: Callable[[], PyTree]) -> PyTree:
    """Zeros in the form of what `run()` would give."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(run))
