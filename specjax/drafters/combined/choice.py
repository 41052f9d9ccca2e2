"""Choice: a bandit picks the drafter and the depth of each round, plain decoding among its arms.

Rule: the arms are plain decoding and every pair of a drafter and one of its `depths`. A round pays the tokens it emits,
over all rows, per cost of its pass, and `specjax.controllers.bandit.ucb` picks the arm. Every drafter learns from every
round, whoever drafted it.
Guarantee: distribution (point-mass trees). One arm for the batch, so the passes of a row depend on its batch; its text
does not. Unlike `auto`, which weighs nodes in hindsight, this needs to know nothing of how its drafters work.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax import costs as costs_of
from specjax.arrays import batch_axes
from specjax.catalog import Method, Option, shared
from specjax.controllers.bandit import Arms, Bandit, ucb
from specjax.drafters.composed import longest_of_each, read_each, remember_each, taps_of_each
from specjax.drafters.making import make_inner_drafter
from specjax.errors import UsageError
from specjax.retrieval.datastore import Datastore
from specjax.trees import operations
from specjax.types import Array, Context, Drafter, Hooks, PyTree, Target, Traits, TreeSize

METHOD = Method(
    name="choice",
    kind="drafter",
    guarantee="distribution",
    summary="selects a drafter and a draft length per step, or plain decoding, with a multi-armed bandit",
    paper="Auer et al. 2002; Garivier, Moulines 2008, arXiv 0805.3415",
    takes=frozenset({"costs", "datastore"}),
    options=(
        Option("several", "drafters", "prompt_lookup+token_recycling", "drafters to choose from, joined by +"),
        shared.num_nodes(7),
        Option("depths", "integers", (3, 7), "draft lengths to choose from"),
    ),
    factory="make_choice",
    arguments=("target",),
)


class Memory(NamedTuple):
    """What a later call may start from."""

    several: tuple[PyTree, ...]  # of the drafters
    arms: Arms | tuple[()] = ()


class _State(NamedTuple):
    several: tuple[PyTree, ...]  # of the drafters
    arms: Arms
    arm: Array  # int32[], the one pulled


def choice(
    *several: Drafter,
    depths: tuple[int, ...] = (3, 7),
    costs: costs_of.Costs = None,
    dtype: str = "float32",
    platform: str | None = None,
    bandit: Bandit | None = None,
) -> Drafter:
    """Pick among `several` drafters without randomness that follow any tree, each at each of `depths`, and plain
    decoding.

    Args:
      costs: from `specjax.costs`, or numbers, of a pass of each verify width (1 and those of the drafters, rising) in
        passes of width 1; None: the rule of thumb for the batch, `dtype` and `platform`.
      bandit: over 1 + drafters * depths arms; default: `ucb`.

    Raises: UsageError for no or equal drafters, one that needs its own trees back, depths below 1, or costs that do not
      fit the widths.
    """
    if not several:
        raise UsageError("choice needs at least one drafter")
    if len({id(d.propose) for d in several}) < len(several):
        raise UsageError("choice was given the same drafter twice; give each once, with all depths in depths=")
    if any(d.traits.draws != "point_mass" or not d.traits.follows_any_tree for d in several):
        raise UsageError("choice can only pick among drafters without randomness that follow any tree")
    if not depths or min(depths) < 1:
        raise UsageError(f"depths must be at least 1, not {list(depths)}; plain decoding is an arm of its own")
    arms = 1 + len(several) * len(depths)
    bare = tuple(drafter.replace(params=()) for drafter in several)
    made = _functions(bare, tuple(depths), costs, dtype, platform, bandit or ucb(arms))
    return made.replace(params=Memory(tuple(drafter.params for drafter in several)))


def make_choice(
    target: Target,
    *,
    several: str | Sequence[str | Drafter] = "prompt_lookup+token_recycling",
    num_nodes: int = 7,
    datastore: Datastore | None = None,
    **options,
) -> Drafter:
    """Return `choice` among drafters by name, such as `prompt_lookup+suffix:7`; each drafts `num_nodes` tokens."""
    specs: Sequence[str | Drafter] = several.split("+") if isinstance(several, str) else several
    drafters = (make_inner_drafter(spec, target, datastore, num_nodes) for spec in specs)
    return choice(*drafters, dtype=costs_of.dtype_of(target), **options)


@functools.cache
def _functions(several: tuple[Drafter, ...], depths, costs, dtype: str, platform, bandit: Bandit) -> Drafter:
    nodes = max(drafter.num_nodes for drafter in several)
    widths = sorted({1, *(w for drafter in several for w in (*drafter.traits.widths, drafter.num_nodes))})
    costs_of.check(costs, len(widths), "verify width")

    def init(params: Memory, context: Context) -> _State:
        states = tuple(drafter.init(own, context) for drafter, own in zip(several, params.several, strict=True))
        return _State(states, params.arms or bandit.init(), jnp.int32(0))

    def propose(params: Memory, keys, state: _State, context: Context, limit: Array):
        arm = bandit.choose(state.arms)
        which, depth = (arm - 1) // len(depths), jnp.asarray(depths)[(arm - 1) % len(depths)]
        bound = jnp.where(arm == 0, 0, jnp.minimum(limit, depth))

        def drafted_by(index: int):
            def draft(states):
                tree, new = several[index].propose(params.several[index], keys, states[index], context, bound)
                return operations.pad_nodes(tree, nodes), (*states[:index], new, *states[index + 1 :])

            return draft

        branches = [drafted_by(index) for index in range(len(several))]
        tree, states = jax.lax.switch(jnp.maximum(which, 0), branches, state.several)
        return tree, _State(states, state.arms, arm)

    def observe(params: Memory, state: _State, context: Context, tree, verdict, output) -> tuple[PyTree, Array]:
        seen = tuple(
            drafter.observe(own, memory, context, tree, verdict, output)
            for drafter, own, memory in zip(several, params.several, state.several, strict=True)
        )
        batch, width = tree.tokens.shape  # that of the pass
        known = costs_of.evaluate(costs, widths, batch, dtype, platform)
        running = jnp.sum(verdict.num_nodes > 0)
        wide_enough = next((i for i, own in enumerate(widths) if own >= width), -1)  # another drafter may set the width
        reward = jnp.sum(verdict.num_nodes) / jnp.maximum(running, 1) / known[wide_enough]
        return seen, reward

    def update(params: Memory, state: _State, seen: tuple[PyTree, Array], verdict) -> _State:
        each, reward = seen
        states = tuple(
            drafter.update(own, memory, noticed, verdict)
            for drafter, own, memory, noticed in zip(several, params.several, state.several, each, strict=True)
        )
        was_pulled = jnp.any(verdict.num_nodes > 0)  # not so where all rows had ended
        pulled = bandit.update(state.arms, state.arm, reward)
        arms = jax.tree.map(lambda new, old: jnp.where(was_pulled, new, old), pulled, state.arms)
        return _State(states, arms, state.arm)

    def axes(state: _State) -> _State:
        each = zip(several, state.several, strict=True)
        return _State(
            tuple(drafter.hooks.axes(own) for drafter, own in each), *batch_axes.shared((state.arms, state.arm))
        )

    def read(params: Memory, state: _State, *chunk):
        return state._replace(several=read_each(several, params.several, state.several, *chunk))

    def remember(params: Memory, state: _State) -> Memory:
        return Memory(remember_each(several, params.several, state.several), state.arms)

    deepest = max(drafter.max_depth for drafter in several)
    return Drafter(
        propose=propose,
        size=TreeSize(nodes, deepest),
        init=init,
        observe=observe,
        update=update,
        traits=Traits(
            chains=all(drafter.drafts_chains for drafter in several),
            rewinds=all(drafter.traits.rewinds for drafter in several),
            max_accepted=longest_of_each(several, deepest),
            widths=tuple(w for w in widths if w < nodes),
            follows_any_tree=True,
            taps=taps_of_each(several),
        ),
        hooks=Hooks(
            axes=axes, prefill=read if any(drafter.hooks.prefill for drafter in several) else None, export=remember
        ),
    )
