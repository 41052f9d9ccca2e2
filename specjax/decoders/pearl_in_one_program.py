"""PEARL in one program: both roles run under one `shard_map`, each on its own device.

Method, rule and guarantee are those of `specjax.decoders.pearl`. The host does not join the two sides here. The
complete loop is compiled, and can be part of the caller's own `jit`. In every step device 0 of the axis "role" drafts
while device 1 verifies the end of the text. The branches have no collectives. Then the devices exchange token ids, and
both join them.
The cost is memory: an array has the same shape on all devices of a program. Both devices therefore store both models
and both caches, although each uses only its own. The version with two programs avoids this.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from specjax.arrays.modes import with_standard_modes
from specjax.catalog import REQUIRED, Method, Option
from specjax.decoders.loop_setup import check_rows, init_loop
from specjax.decoders.pearl import Role, Text, check_options, check_pair, commit_all, draws, join, make_roles, triangle
from specjax.engine.packing import Prompts
from specjax.engine.prefill import prefill
from specjax.engine.results import DecodeResult, add_round, zero_stats
from specjax.errors import UsageError
from specjax.types import Array, PyTree, Stats, Target

METHOD = Method(
    name="pearl_in_one_program",
    kind="decoder",
    guarantee="distribution",
    summary="runs PEARL as one compiled program on two devices, which can be part of a larger program",
    paper="Liu et al. 2024, arXiv 2408.11850",
    needs=frozenset({"draft", "devices"}),
    arguments=("target", "draft"),
    settings=("key", "temperature", "top_k", "top_p"),
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
    """Decode a batch. A second call with the same shapes compiles no program.

    Args:
      target, draft: models with the same tokenizer, not sharded; both are copied to both devices.
      num_tokens: gamma, the number of drafted tokens per step.
      devices: two devices, of the draft model and of the target; default: the first two.
      The other arguments are those of `specjax.decode`.

    Returns: DecodeResult; a depth in its `stats` is a position in the draft, and every step drafts gamma tokens.

    Raises: UsageError for fewer than two devices, models that are sharded or cannot rewind, or a setting out of range.
      It is also raised for a target that returns NaN or Inf.
    """
    settings = check_options(num_tokens=num_tokens, temperature=temperature, top_k=top_k, top_p=top_p)
    check_pair(target, draft)
    devices = jax.devices()[:2] if devices is None else devices
    if len(set(devices)) != 2:
        raise UsageError(f"pearl_in_one_program needs two devices, not {len(set(devices))}; pass them as devices=")
    for model in (target.model, draft.model):
        if model.mesh is not None:
            raise UsageError(f"{model.name} is sharded, but each role has one device; use pearl for meshes")
    settings = dataclasses.replace(settings, eos=eos, capacity=capacity)
    loop_inputs = init_loop(
        target, prompts, settings, key=key, max_new_tokens=max_new_tokens, room=1, inputs=inputs,
        longest=draft.model.max_positions,
    )  # fmt: skip
    mesh = Mesh(np.array(devices), ("role",))
    roles = make_roles(target, draft, loop_inputs)
    arguments = roles, loop_inputs.tokens, loop_inputs.prompts, loop_inputs.usable, loop_inputs.eos
    if not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arguments)):
        arguments = jax.device_put(arguments, NamedSharding(mesh, P()))
    return check_rows(_run(*arguments, mesh=mesh, gamma=num_tokens, max_new_tokens=int(max_new_tokens)), target)


@functools.partial(jax.jit, static_argnames=("mesh", "gamma", "max_new_tokens"))
@with_standard_modes
def _run(
    roles, tokens: Array, lengths: Array, usable: Array, eos: Array, *, mesh, gamma: int, max_new_tokens: int
) -> DecodeResult:
    start = Text.of(tokens, lengths, max_new_tokens, gamma, usable)
    loop = functools.partial(_loop, gamma=gamma)
    # The results are equal on all devices, which the compiler cannot infer.
    sharded_loop = jax.shard_map(loop, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    text, stats = sharded_loop(roles, start, eos)
    count = text.verified - lengths
    new = jnp.where(np.arange(max_new_tokens) < count[:, None], text.window(lengths, max_new_tokens), -1)
    return DecodeResult(new, count, text.hit_eos, stats._replace(hit_eos=text.hit_eos), finite=text.finite)


def _loop(roles: tuple[Role, Role], start: Text, eos: Array, *, gamma: int) -> tuple[Text, Stats]:
    """Run the loop of one device."""
    is_drafting = jax.lax.axis_index("role") == 0
    drafter, target = roles

    def run_role(draft, verify):
        """Return the result of this device's role, and zeros for the other role."""
        return jax.lax.cond(is_drafting, lambda: (draft(), _zeros_of(verify)), lambda: (_zeros_of(draft), verify()))

    def body(carry):
        text, stats, (drafted, cache) = carry
        drafted = drafter.target.model.rewind_cache(drafted, text.length - 1)
        cache = target.target.model.rewind_cache(cache, text.verified - 1)
        last, window = text.window(text.length - 1, 1), text.window(text.verified - 1, gamma)
        (drafts, new), (picks, pending) = run_role(
            lambda: _draft(drafter, drafted, last, text.length, gamma),
            lambda: draws(target, cache, window, text.verified, triangle(window)),
        )
        # The commits are outside of the branches, which would copy the caches that they return.
        caches = commit_all(drafter, drafted, new, drafts), commit_all(target, cache, pending, window)
        drafts, picks = jax.lax.psum((drafts, picks), "role")
        active = jnp.repeat(~text.done[:, None], gamma, 1)
        text, accepted = join(text, drafts, picks, eos)
        return text, add_round(stats, active[:, 0], active, accepted), caches

    caches = run_role(lambda: _read(drafter, start), lambda: _read(target, start))
    is_running = lambda carry: ~jnp.all(carry[0].done)
    return jax.lax.while_loop(is_running, body, (start, zero_stats(len(start.tokens), gamma), caches))[:2]


def _read(role: Role, text: Text) -> PyTree:
    """Return the cache of the prompts without their last tokens."""
    model, params = role.target.model, role.target.params
    cache = model.start_cache(params, role.inputs, text.length, text.tokens.shape[1])
    return prefill(model, params, cache, text.tokens, text.length - 1)


def _draft(role: Role, cache: PyTree, last: Array, length: Array, gamma: int) -> tuple[Array, PyTree]:
    """Draft int32[B, gamma] tokens after a text of `length` int32[B] tokens that ends with `last` int32[B, 1].

    The second result is the pending cache entries of that token and of all drafts except the last.
    """
    batch = last.shape[0]
    wide = jnp.zeros((batch, gamma), jnp.int32)
    none = _zeros_of(lambda: draws(role, cache, wide, length, triangle(wide))[1])

    def draft_token(carry, depth):
        pending, token = carry
        visible = jnp.append(jnp.arange(gamma) < depth, True)
        mask = jnp.broadcast_to(visible, (batch, 1, gamma + 1))
        picks, new = draws(role, cache, token, length + depth, mask, pending)
        picks = jnp.maximum(picks, 0)  # a draft that failed is wrong, and nothing else
        return (role.target.model.insert(pending, new, depth), picks), picks[:, 0]

    (pending, _), drafts = jax.lax.scan(draft_token, (none, last), jnp.arange(gamma))
    return drafts.T, pending


def _zeros_of(run: Callable[[], PyTree]) -> PyTree:
    """Return zeros with the structure and shapes of the result of `run()`."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(run))
