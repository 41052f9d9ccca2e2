"""DEL: early exit from the layer, and with the draft length, that lately gave most tokens per layer loaded.

Zarch et al.: DEL: Context-Aware Dynamic Exit Layer for Efficient Self-Speculative Decoding (2025),
arXiv 2504.05598.

Rule: with a_l the chance that exit l names the target's token, L layers and drafts of d tokens,
  TPL(l, d) = (1 + a_l + ... + a_l^d) / (d l + L);
each round drafts with the best l and d; d = 0 is plain decoding. a_l comes from shadow tokens, what head(norm(h_l))
would have drafted at each position that the target has just verified, up to the first mismatch: decayed counts
  M_l <- w M_l + matches,  C <- w C + positions,  a_l = (M_l + 1/2) / (C + 1).
A draft of j tokens ends where one more would lower its own expected tokens per layer: with c_i the largest probability
where token i is drawn, at temperature 1, it goes on iff c_1 ... c_j / l > (1 + c_1 + c_1 c_2 + ...) / (j l + L).
Guarantee: distribution (verified with the q that was sampled; c_i does not depend on the token drawn).

Per row: each chooses its own l and d, so a row does not depend on its batch; exits are nested, so a batch runs the
deepest exit of its rows, and as many passes as the longest draft.

Deviations: the prompt's shadow tokens are read at 16 positions of each chunk, one chunk like one round. In rounds
without a draft only every eighth is learnt from, so that plain decoding stays free of the extra heads.
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
from specjax.drafters.layers.early_exit import first_layers, layers_of, self_draft, target_of
from specjax.errors import UsageError
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
    """How often the exits agreed with the target, decayed, and whether the coming round is to be counted."""

    matches: Array  # float32[B, E], per exit
    positions: Array  # float32[B]
    watching: Array  # bool[B]


def dynamic_exit(
    target: Target,
    num_tokens: int = 18,
    *,
    exits: tuple[int, ...] | None = None,
    decay: float = 0.95,
) -> Drafter:
    """A chain of at most `num_tokens` tokens by the target's own first layers.

    Args:
      exits: the layers to choose from; default: every second one of the first half. Each costs a read-out of the head
        per round. decay: w above; it forgets within 1 / (1 - w) rounds.

    State: Agreement. Raises: UsageError for an exit that the model does not have or a setting outside its range.
    """
    most = layers_of(target)
    if target.model.head is None:
        raise UsageError(f"the model {target.model.name} cannot read its own layers; give Model.head")
    exits = tuple(range(2, most // 2 + 1, 2)) or (1,) if exits is None else tuple(sorted(set(exits)))
    if not exits or not 1 <= exits[0] <= exits[-1] <= most:
        raise UsageError(f"exits must be from 1 to {most}, the number of layers of the model, not {exits}")
    if num_tokens < 1:
        raise UsageError(f"num_tokens must be at least 1, not {num_tokens}")
    if not 0 <= decay < 1:
        raise UsageError(f"decay must be at least 0 and below 1, not {decay}")
    return _functions(_Config(most, num_tokens, exits, decay))


class _Config(NamedTuple):
    num_layers: int
    num_tokens: int
    exits: tuple[int, ...]
    decay: float


@functools.cache
def _functions(config: _Config) -> Drafter:
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


def _init(config: _Config, params, context: Context) -> Agreement:
    batch = context.length.shape[0]
    return Agreement(jnp.zeros((batch, len(config.exits))), jnp.zeros((batch,)), jnp.zeros((batch,), bool))


def _read(config: _Config, params, state: Agreement, context: Context, tokens, count, output: Output) -> Agreement:
    target = target_of(context)
    assert target.model.head is not None
    # Evenly spread over the row's part of the chunk; all of it if it is short.
    place = jnp.arange(PROMPT_SAMPLES) * jnp.maximum(count, PROMPT_SAMPLES)[:, None] // PROMPT_SAMPLES
    valid = place < count[:, None]
    place = jnp.minimum(place, tokens.shape[1] - 1)
    taps = [take_along(tap, place[:, :, None], 1) for tap in output.taps]
    wanted = first_largest(target.model.head(target.params, taps[-1]))  # of few; `output.logits` would be of all
    return add(state, matches(target, taps[:-1], wanted, valid), jnp.sum(valid, 1), config.decay)


def _propose(config: _Config, params, keys, state: Agreement, context: Context, limit: Array):
    layer, length = choose(acceptance(state), config.exits, config.num_layers, config.num_tokens)
    builder = dataclasses.replace(trees.chain(config.num_tokens), stop=falling(layer, config.num_layers))
    layers = first_layers(target_of(context).model, layer)
    tree = self_draft(builder, keys, context, jnp.minimum(limit, length), layers)
    return tree, state._replace(watching=(length > 0) | (context.length % IDLE_PERIOD == 0))


def _observe(
    params, state: Agreement, context: Context, tree: TokenTree, verdict: Verdict, output: Output
) -> tuple[Array, Array]:
    """At how many accepted nodes each exit named the target's token float32[B, E], and how many there were [B]."""
    valid = jnp.any(verdict.path[:, :, None] == jnp.arange(tree.tokens.shape[1]), 1) & state.watching[:, None]
    matching = lambda: matches(target_of(context), output.taps[:-1], first_largest(output.logits), valid)
    zeros = jnp.zeros_like(state.matches)
    return jax.lax.cond(jnp.any(state.watching), matching, lambda: zeros), jnp.sum(valid, 1)


def _update(config: _Config, params, state: Agreement, seen: tuple[Array, Array], verdict: Verdict) -> Agreement:
    return add(state, *seen, config.decay)


def acceptance(state: Agreement) -> Array:
    """float32[B, E]: the estimate a_l of each exit."""
    return (state.matches + 0.5) / (state.positions[:, None] + 1)


def tokens_per_layer(acceptance: Array, exits: tuple[int, ...], num_layers: int, most: int) -> Array:
    """float32[..., E, most + 1]: TPL of acceptance float32[..., E] for drafts of 0 ... `most` tokens."""
    drafted = jnp.arange(most + 1)
    tokens = jnp.cumsum(acceptance[..., None] ** drafted, -1)
    return tokens / (drafted * jnp.array(exits)[:, None] + num_layers)


def choose(acceptance: Array, exits: tuple[int, ...], num_layers: int, most: int) -> tuple[Array, Array]:
    """The exit layer and the draft length of the largest TPL: int32[B], int32[B]."""
    value = tokens_per_layer(acceptance, exits, num_layers, most)
    best = jnp.argmax(value.reshape(*value.shape[:-2], -1), -1)
    return jnp.array(exits)[best // (most + 1)], best % (most + 1)


def falling(layer: Array, num_layers: int) -> Stop:
    """Stop where one more token of exit `layer` int32[B] would lower the draft's expected tokens per layer.

    Its value is c_1 ... c_j of the token drafted last, and the sum 1 + c_1 + c_1 c_2 + ... up to that.
    """

    def judge(value, fed: Fed):
        product, tokens = value
        product = product * top_unwarped(fed)
        tokens = tokens + product
        drafted, exit_layer = fed.depth + 1, layer[:, None]
        return (product, tokens), product / exit_layer > tokens / (drafted * exit_layer + num_layers)

    return Stop(judge, start=(1.0, 1.0))


def matches(target: Target, taps, wanted: Array, valid: Array) -> Array:
    """float32[B, E]: at how many `valid` positions the shadow token of each tap [B, T, D] is `wanted` int32[B, T]."""
    assert target.model.head is not None
    shadow = first_largest(target.model.head(target.params, jnp.concatenate(taps, 1)))
    shadow = shadow.reshape(wanted.shape[0], len(taps), -1)
    return jnp.sum((shadow == wanted[:, None]) & valid[:, None], -1, dtype=jnp.float32)


def add(state: Agreement, matched: Array, count: Array, decay: float) -> Agreement:
    """After one more round with `count` int32[B] positions; a row without any keeps its own."""
    new = count > 0
    forget = jnp.where(new, decay, 1.0)
    return state._replace(
        matches=forget[:, None] * state.matches + matched,
        positions=forget * state.positions + count,
    )
