"""Adaptive depth as a drafter: a subset of the target's layers drafts, and the whole target verifies.

Methods of adaptive depth are lossy by themselves; as drafters they are lossless. The depth policy is one of
`specjax.adaptive`, such as CALM's exits, SkipDecode's budgets or FFN-SkipLLM. Their papers are cited there.

Rule: q(. | text) is the distribution of the target with skipped layers. Drafted tokens read each other and the target's
own cache, which has the keys and values of all layers.
Guarantee: distribution (verified with the q that was sampled).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from specjax import trees
from specjax.adaptive.parsing import parse_depth
from specjax.catalog import Method, Option, shared
from specjax.drafters.layers.early_exit import context_target, self_draft
from specjax.errors import UsageError
from specjax.models.skipping.policy import DepthPolicy
from specjax.models.variants.skipping_model import check_depth, skip_layers_over_cache
from specjax.trees import Builder, Stop
from specjax.types import Array, Context, Drafter, Hooks, Sublayers, Target, Traits, TreeSize

METHOD = Method(
    name="thinned",
    kind="drafter",
    guarantee="distribution",
    summary="drafts with the layers of the target that a method of adaptive depth selects",
    paper="our combination; see the papers of the adaptive methods",
    options=(
        Option("depth", "depth", "calm", "method of adaptive depth, such as skip_decode:speedup=2"),
        shared.num_tokens(4),
        shared.TREE,
        shared.STOP,
    ),
    draft_cost=0.6,
    factory="make_thinned",
    arguments=("target",),
)


def thinned(
    target: Target,
    depth: DepthPolicy,
    *,
    num_tokens: int = 4,
    tree: Builder | None = None,
    stop: Stop | None = None,
) -> Drafter:
    """Draft a chain of `num_tokens` tokens, or a `tree` from `specjax.trees`, with the layers that `depth` selects.

    Args:
      stop: the condition that ends a row's draft, such as `trees.stops.confidence(0.6)`.

    State: int32[B], the length of the prompt. Raises: UsageError for a target that is not from `specjax.models` or
      skips layers itself. It is also raised for layers that the target lacks, and for a policy that reads the prompt.
    """
    num_layers = check_depth(target, depth)
    if jax.tree.leaves(depth.init_state(1, num_layers)):
        raise UsageError(
            f"{depth.name} learns from the prompt and cannot draft; use specjax.adaptive.skip_layers, or another method"
        )
    builder = trees.make_builder(num_tokens, tree, stop)
    return _functions(builder, depth.replace(params=())).replace(params=depth.params)


def make_thinned(target: Target, *, depth: str | DepthPolicy = "calm", **options) -> Drafter:
    """Return `thinned` with a depth policy by name, such as `skip_decode:speedup=2`."""
    return thinned(target, parse_depth(depth) if isinstance(depth, str) else depth, **options)


@functools.cache
def _functions(builder: Builder, depth: DepthPolicy) -> Drafter:
    return Drafter(
        propose=functools.partial(_propose, builder, depth),
        size=TreeSize(builder.num_nodes, builder.max_depth),
        init=_init,
        traits=Traits(draws=builder.draws, widths=builder.widths, follows_any_tree=True),
        hooks=Hooks(resume=lambda params, state, kept: state),
    )


def _init(params, context: Context) -> Array:
    return context.length


def _propose(builder: Builder, depth: DepthPolicy, params, keys, prompt: Array, context: Context, limit: Array):
    target, cache = skip_layers_over_cache(context_target(context), depth.replace(params=params), context.cache, prompt)
    every = jnp.ones((len(prompt), target.model.capabilities.num_layers), bool)
    part = context._replace(target=target, cache=cache)
    return self_draft(builder, keys, part, limit, Sublayers(every, every)), prompt
