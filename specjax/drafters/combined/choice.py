"""Choice: a multi-armed bandit selects the drafter and the draft length of each step, or plain decoding.

Rule: the arms are plain decoding and all pairs of a drafter and one of its `depths`. The reward of a step is the number
of emitted tokens over all rows, divided by the cost of the pass. `specjax.controllers.bandit.ucb` selects the arm.
Every drafter observes every step, even those that another one drafted.
Guarantee: distribution (point-mass trees). The batch has one arm, so the number of passes of a row depends on its
batch; its text does not. `auto` estimates single nodes in hindsight; this method needs no knowledge about its drafters.
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
from specjax.drafters.composed import longest_of_each, read_each, remember_each, taps_of_each, widths_of_each
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


class ChoiceParams(NamedTuple):
    """Parameters of the drafters, and the state of the bandit after an earlier call."""

    several: tuple[PyTree, ...]  # one per drafter
    arms: Arms | tuple[()] = ()


class State(NamedTuple):
    several: tuple[PyTree, ...]  # one per drafter
    arms: Arms
    arm: Array  # int32[], the selected arm


def choice(
    *several: Drafter,
    depths: tuple[int, ...] = (3, 7),
    costs: costs_of.Costs = None,
    dtype: costs_of.WeightDtype = "float32",
    platform: str | None = None,
    bandit: Bandit | None = None,
) -> Drafter:
    """Select among `several` drafters with one of `depths` each, or plain decoding.

    The drafters must be deterministic and follow any tree.

    Args:
      costs: costs of a target pass of each width (1 and those of the drafters, rising) in passes of width 1, as numbers
        or from `specjax.costs`. Default: the rule of thumb for the batch, `dtype` and `platform`.
      bandit: a bandit over 1 + drafters * depths arms; default: `ucb`.

    Raises: UsageError for no or equal drafters, or one that is random or follows its own trees only. It is also raised
      for depths below 1, or costs that do not fit the widths.
    """
    if not several:
        raise UsageError("choice needs at least one drafter")
    if len({id(d.propose) for d in several}) < len(several):
        raise UsageError("choice got the same drafter twice; pass each drafter once, with all lengths in depths=")
    if any(d.traits.draws != "point_mass" or not d.traits.follows_any_tree for d in several):
        raise UsageError("choice needs drafters without randomness that follow any tree")
    if not depths or min(depths) < 1:
        raise UsageError(f"depths must be at least 1, not {list(depths)}; plain decoding is an arm of its own")
    arms = 1 + len(several) * len(depths)
    bare = tuple(drafter.replace(params=()) for drafter in several)
    combined = _functions(bare, tuple(depths), costs, dtype, platform, bandit or ucb(arms))
    return combined.replace(params=ChoiceParams(tuple(drafter.params for drafter in several)))


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
def _functions(
    several: tuple[Drafter, ...], depths, costs, dtype: costs_of.WeightDtype, platform, bandit: Bandit
) -> Drafter:
    nodes = max(drafter.num_nodes for drafter in several)
    widths = sorted({1, *(w for drafter in several for w in (*drafter.traits.widths, drafter.num_nodes))})
    costs_of.check(costs, len(widths), "verify width")

    def init(params: ChoiceParams, context: Context) -> State:
        states = tuple(
            drafter.init(drafter_params, context)
            for drafter, drafter_params in zip(several, params.several, strict=True)
        )
        return State(states, params.arms or bandit.init(), jnp.int32(0))

    def propose(params: ChoiceParams, keys, state: State, context: Context, limit: Array):
        arm = bandit.choose(state.arms)
        which, depth = (arm - 1) // len(depths), jnp.asarray(depths)[(arm - 1) % len(depths)]
        bound, context = jnp.where(arm == 0, 0, jnp.minimum(limit, depth)), context._replace(unlimited=None)

        def drafted_by(index: int):
            def draft(states):
                tree, new = several[index].propose(params.several[index], keys, states[index], context, bound)
                return operations.pad_nodes(tree, nodes), (*states[:index], new, *states[index + 1 :])

            return draft

        branches = [drafted_by(index) for index in range(len(several))]
        tree, states = jax.lax.switch(jnp.maximum(which, 0), branches, state.several)
        return tree, State(states, state.arms, arm)

    def observe(params: ChoiceParams, state: State, context: Context, tree, verdict, output) -> tuple[PyTree, Array]:
        observations = tuple(
            drafter.observe(drafter_params, memory, context, tree, verdict, output)
            for drafter, drafter_params, memory in zip(several, params.several, state.several, strict=True)
        )
        batch, width = tree.tokens.shape  # width of the pass
        pass_costs = costs_of.evaluate(costs, widths, batch, dtype, platform)
        num_running = jnp.sum(verdict.num_nodes > 0)
        # Another drafter may determine the width.
        wide_enough = next((i for i, candidate in enumerate(widths) if candidate >= width), -1)
        reward = jnp.sum(verdict.num_nodes) / jnp.maximum(num_running, 1) / pass_costs[wide_enough]
        return observations, reward

    def update(params: ChoiceParams, state: State, observation: tuple[PyTree, Array], verdict) -> State:
        each, reward = observation
        states = tuple(
            drafter.update(drafter_params, memory, drafter_observation, verdict)
            for drafter, drafter_params, memory, drafter_observation in zip(
                several, params.several, state.several, each, strict=True
            )
        )
        was_pulled = jnp.any(verdict.num_nodes > 0)  # false if all rows had finished
        pulled = bandit.update(state.arms, state.arm, reward)
        arms = jax.tree.map(lambda new, old: jnp.where(was_pulled, new, old), pulled, state.arms)
        return State(states, arms, state.arm)

    def axes(state: State) -> State:
        each = zip(several, state.several, strict=True)
        return State(
            tuple(drafter.hooks.axes(drafter_state) for drafter, drafter_state in each),
            *batch_axes.shared((state.arms, state.arm)),
        )

    def read(params: ChoiceParams, state: State, *chunk):
        return state._replace(several=read_each(several, params.several, state.several, *chunk))

    def remember(params: ChoiceParams, state: State) -> ChoiceParams:
        return ChoiceParams(remember_each(several, params.several, state.several), state.arms)

    max_depth = max(drafter.max_depth for drafter in several)
    return Drafter(
        propose=propose,
        size=TreeSize(nodes, max_depth),
        init=init,
        observe=observe,
        update=update,
        traits=Traits(
            chains=all(drafter.drafts_chains for drafter in several),
            rewinds=all(drafter.traits.rewinds for drafter in several),
            max_accepted=longest_of_each(several, max_depth),
            widths=tuple(w for w in widths if w < nodes),
            follows_any_tree=True,
            taps=taps_of_each(several),
            lag=max(drafter.traits.lag for drafter in several),
        ),
        hooks=Hooks(
            axes=axes,
            prefill=read if any(drafter.hooks.prefill for drafter in several) else None,
            export=remember,
            widths=widths_of_each(several, 1),
        ),
    )
