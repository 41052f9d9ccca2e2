"""DEL: early exit with the layer and the draft length that recently gave the most tokens per loaded layer.

Zarch et al.: DEL: Context-Aware Dynamic Exit Layer for Efficient Self-Speculative Decoding (2025),
arXiv 2504.05598.

Rule: let a_l be the probability that exit l predicts the target's token, L the number of layers, and d the draft
length. The tokens per layer are
  TPL(l, d) = (1 + a_l + ... + a_l^d) / (d l + L).
Each step drafts with the best l and d; d = 0 is plain decoding. a_l comes from shadow tokens: the tokens that
head(norm(h_l)) would have drafted at the verified positions, up to the first mismatch. Decayed counts estimate it:
  M_l <- w M_l + matches,  C <- w C + positions,  a_l = (M_l + 1/2) / (C + 1).
A draft of j tokens ends if one more token would lower its own expected tokens per layer. Let c_i be the largest
probability at token i, at temperature 1. The draft continues iff
  c_1 ... c_j / l > (1 + c_1 + c_1 c_2 + ...) / (j l + L).
Guarantee: distribution (verified with the q that was sampled; c_i does not depend on the token drawn).

Each row chooses its own l and d, so a row does not depend on its batch. Exits are nested: a batch runs the deepest exit
of its rows, and as many passes as the longest draft.

Deviations: shadow tokens of the prompt are read at 16 positions per chunk, and a chunk counts as one step. Of the steps
without a draft only every eighth updates the counts, so plain decoding rarely runs the extra heads.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax import trees
from specjax.arrays.indexing import first_largest, take_along
from specjax.catalog import Method, Option, shared
from specjax.drafters.layers.early_exit import context_target, first_layers, self_draft
from specjax.errors import UsageError
from specjax.models.requirements import check_partial_passes
from specjax.trees.contracts import Fed, Stop
from specjax.trees.stops import top_unwarped
from specjax.types import Array, Context, Drafter, Hooks, Output, Target, TokenTree, Traits, TreeSize, Verdict

METHOD = Method(
    name="dynamic_exit",
    kind="drafter",
    guarantee="distribution",
    summary="drafts with the target's first layers, and chooses their number and the draft length in each step",
    paper="Zarch et al. 2025, arXiv 2504.05598",
    options=(
        shared.num_tokens(18, "maximum number of drafted tokens per step"),
        Option("exits", "integers", None, "candidate numbers of layers"),
        Option("decay", "float", 0.95, "decay of the acceptance counts per step"),
    ),
    draft_cost=0.25,
    arguments=("target",),
)


PROMPT_SAMPLES = 16
IDLE_PERIOD = 8


class Agreement(NamedTuple):
    """Decayed counts of agreement between the exits and the target."""

    matches: Array  # float32[B, E], matching positions per exit
    positions: Array  # float32[B], verified positions
    watching: Array  # bool[B], true if the current step updates the counts


def dynamic_exit(
    target: Target,
    num_tokens: int = 18,
    *,
    exits: tuple[int, ...] | None = None,
    decay: float = 0.95,
) -> Drafter:
    """Draft a chain of at most `num_tokens` tokens with the target's own first layers.

    Args:
      exits: candidate numbers of layers; default: every second layer of the first half. Each exit costs one pass of
        the output head per step.
      decay: w above; the counts cover about 1 / (1 - w) steps.

    State: Agreement. Raises: UsageError for an exit that the model does not have, or a setting out of range.
    """
    num_layers = check_partial_passes(target.model, "dynamic_exit")
    if target.model.head is None:
        raise UsageError(f"the model {target.model.name} has no function for the logits of its layers; set Model.head")
    exits = tuple(range(2, num_layers // 2 + 1, 2)) or (1,) if exits is None else tuple(sorted(set(exits)))
    if not exits or not 1 <= exits[0] <= exits[-1] <= num_layers:
        raise UsageError(f"exits must be from 1 to {num_layers}, the number of layers of the model, not {exits}")
    if num_tokens < 1:
        raise UsageError(f"num_tokens must be at least 1, not {num_tokens}")
    if not 0 <= decay < 1:
        raise UsageError(f"decay must be at least 0 and below 1, not {decay}")
    return _functions(Config(num_layers, num_tokens, exits, decay))


class Config(NamedTuple):
    num_layers: int
    num_tokens: int
    exits: tuple[int, ...]
    decay: float


@functools.cache
def _functions(config: Config) -> Drafter:
    builder = trees.chain(config.num_tokens)
    return Drafter(
        propose=functools.partial(_propose, config),
        size=TreeSize(builder.num_nodes, builder.max_depth),
        init=functools.partial(_init, config),
        observe=_observe,
        update=functools.partial(_update, config),
        traits=Traits(draws=builder.draws, widths=builder.widths, taps=(*config.exits, config.num_layers)),
        hooks=Hooks(prefill=functools.partial(_read, config)),
    )


def _init(config: Config, params, context: Context) -> Agreement:
    batch = context.length.shape[0]
    return Agreement(jnp.zeros((batch, len(config.exits))), jnp.zeros((batch,)), jnp.zeros((batch,), bool))


def _read(config: Config, params, state: Agreement, context: Context, tokens, count, output: Output) -> Agreement:
    target = context_target(context)
    assert target.model.head is not None
    # The samples are evenly spaced over the row's part of the chunk; a short part is read in full.
    positions = jnp.arange(PROMPT_SAMPLES) * jnp.maximum(count, PROMPT_SAMPLES)[:, None] // PROMPT_SAMPLES
    valid = positions < count[:, None]
    positions = jnp.minimum(positions, tokens.shape[1] - 1)
    taps = [take_along(tap, positions[:, :, None], 1) for tap in output.taps]
    # Only at the samples; `output.logits` would compute all positions.
    correct = first_largest(target.model.head(target.params, taps[-1]))
    return add(state, matches(target, taps[:-1], correct, valid), jnp.sum(valid, 1), config.decay)


def _propose(config: Config, params, keys, state: Agreement, context: Context, limit: Array):
    layer, length = choose(acceptance(state), config.exits, config.num_layers, config.num_tokens)
    builder = dataclasses.replace(trees.chain(config.num_tokens), stop=falling(layer, config.num_layers))
    layers = first_layers(context_target(context).model, layer)
    tree = self_draft(builder, keys, context, jnp.minimum(limit, length), layers)
    return tree, state._replace(watching=(length > 0) | (context.length % IDLE_PERIOD == 0))


def _observe(
    params, state: Agreement, context: Context, tree: TokenTree, verdict: Verdict, output: Output
) -> tuple[Array, Array]:
    """Return the number of accepted nodes at which each exit predicted the target's token, float32[B, E].

    The second result is the number of accepted nodes, [B].
    """
    valid = jnp.any(verdict.path[:, :, None] == jnp.arange(tree.tokens.shape[1]), 1) & state.watching[:, None]
    matching = lambda: matches(context_target(context), output.taps[:-1], first_largest(output.logits), valid)
    zeros = jnp.zeros_like(state.matches)
    return jax.lax.cond(jnp.any(state.watching), matching, lambda: zeros), jnp.sum(valid, 1)


def _update(config: Config, params, state: Agreement, counts: tuple[Array, Array], verdict: Verdict) -> Agreement:
    return add(state, *counts, config.decay)


def acceptance(state: Agreement) -> Array:
    """Return float32[B, E], the estimate a_l of each exit."""
    return (state.matches + 0.5) / (state.positions[:, None] + 1)


def tokens_per_layer(acceptance: Array, exits: tuple[int, ...], num_layers: int, longest: int) -> Array:
    """Return TPL float32[..., E, longest + 1] of acceptance float32[..., E] for drafts of 0 ... `longest` tokens."""
    drafted = jnp.arange(longest + 1)
    tokens = jnp.cumsum(acceptance[..., None] ** drafted, -1)
    return tokens / (drafted * jnp.array(exits)[:, None] + num_layers)


def choose(acceptance: Array, exits: tuple[int, ...], num_layers: int, longest: int) -> tuple[Array, Array]:
    """Return the exit layer int32[B] and the draft length int32[B] with the largest TPL."""
    value = tokens_per_layer(acceptance, exits, num_layers, longest)
    best = jnp.argmax(value.reshape(*value.shape[:-2], -1), -1)
    return jnp.array(exits)[best // (longest + 1)], best % (longest + 1)


def falling(layer: Array, num_layers: int) -> Stop:
    """Build a stop condition: one more token of exit `layer` int32[B] would lower the expected tokens per layer.

    Its value is the product c_1 ... c_j up to the last drafted token, and the sum 1 + c_1 + c_1 c_2 + ... up to it.
    """

    def continues(value, fed: Fed):
        product, tokens = value
        product = product * top_unwarped(fed)
        tokens = tokens + product
        drafted, exit_layer = fed.depth + 1, layer[:, None]
        return (product, tokens), product / exit_layer > tokens / (drafted * exit_layer + num_layers)

    return Stop(continues, start=(1.0, 1.0))


def matches(target: Target, taps, correct: Array, valid: Array) -> Array:
    """Return float32[B, E], the number of `valid` positions at which the shadow token of a tap [B, T, D] is correct.

    Args:
      correct: int32[B, T], the target's tokens.
    """
    assert target.model.head is not None
    shadow = first_largest(target.model.head(target.params, jnp.concatenate(taps, 1)))
    shadow = shadow.reshape(correct.shape[0], len(taps), -1)
    return jnp.sum((shadow == correct[:, None]) & valid[:, None], -1, dtype=jnp.float32)


def add(state: Agreement, matched: Array, count: Array, decay: float) -> Agreement:
    """Update the counts with a step of `count` int32[B] positions; rows without positions stay unchanged."""
    has_positions = count > 0
    factor = jnp.where(has_positions, decay, 1.0)
    return state._replace(
        matches=factor[:, None] * state.matches + matched,
        positions=factor * state.positions + count,
    )
