"""Superposed decoding: several drafts grow from one pass per level, over a mixture of their last tokens.

Shen, Fan, Pratt, Park, Wallingford, Kakade, Holtzman, Krishna, Farhadi, Kusupati: Superposed Decoding: Multiple
Generations from a Single Autoregressive Inference Pass (NeurIPS 2024), arXiv 2405.18400; here the drafter.
`specjax.decoders.superposed` is the generator of completions.

Rule: k drafts with scores s_i. The next input is sum_i softmax(s)_i E[last token of draft i]. What follows it, cut to
the `candidates` likeliest tokens and normalised, is the next distribution p of every draft; of all s_i + log p(v) the
k best are the drafts of the next level. The first level takes the k likeliest tokens. Each level's drafts are its nodes
of the tree.
Guarantee: distribution (a point-mass tree).
Deviations: the passes are those of the target's first layers, over its own cache (an early exit; the paper decodes with
the whole model). No n-gram models tell the drafts apart (alpha = 0): the authors' are counted on a corpus; in a row's
own text most contexts are new, where their rule subtracts a constant. Drafts that were dropped later stay in the tree.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays.indexing import take_along
from specjax.catalog import Method, Option, shared
from specjax.drafters.layers.early_exit import chosen_exit, first_layers, score_below, target_of
from specjax.errors import UsageError
from specjax.trees.contracts import narrower
from specjax.trees.superposition import extend, likeliest
from specjax.types import Array, Context, Drafter, Mixture, Target, TokenTree, Traits, TreeSize

METHOD = Method(
    name="superposed",
    kind="drafter",
    guarantee="distribution",
    summary="drafts several chains at once with the target's first layers, which read a mixture of the chains' tokens",
    paper="Shen et al. 2024, arXiv 2405.18400",
    options=(
        shared.EXIT_LAYER,
        shared.num_tokens(6, "tokens per chain"),
        Option("drafts", "int", 3, "number of chains"),
        Option("candidates", "int", 9, "most likely tokens that the chains choose from"),
        Option("temperature", "float", 0.06, "temperature of the mixture's distribution"),
    ),
    draft_cost=0.25,
    arguments=("target",),
)


def superposed(
    target: Target,
    exit_layer: int | None = None,
    *,
    num_tokens: int = 6,
    drafts: int = 3,
    candidates: int = 9,
    temperature: float = 0.06,
) -> Drafter:
    """A tree of `drafts` nodes on each of `num_tokens` levels, by the first `exit_layer` layers of the target.

    Args:
      exit_layer: how many layers draft; default: a quarter of them. candidates: likeliest tokens per level to choose
        from. temperature: of p; the authors'. The lower, the more the likeliest draft outweighs the others.

    State: none; the cache is the target's. Raises: UsageError for a setting outside its range.
    """
    exit_layer = chosen_exit(target, exit_layer)
    if min(num_tokens, drafts) < 1:
        raise UsageError(f"num_tokens and drafts must be at least 1, not {num_tokens} and {drafts}")
    if candidates < drafts:
        raise UsageError(f"candidates must be at least the number of drafts, {drafts}, not {candidates}")
    if temperature <= 0:
        raise UsageError(f"temperature must be above 0, not {temperature}")
    drafts = min(drafts, target.model.vocab_size)
    if not target.model.capabilities.mixtures:
        raise UsageError(f"the model {target.model.name} takes no mixtures of tokens, which superposed drafts from")
    return _functions(_Config(exit_layer, num_tokens, drafts, candidates, temperature))


class _Config(NamedTuple):
    exit_layer: int
    num_tokens: int
    drafts: int
    candidates: int
    temperature: float

    @property
    def depth(self) -> np.ndarray:
        """int32[N]: of each node."""
        return np.repeat(np.arange(self.num_tokens + 1), [1] + [self.drafts] * self.num_tokens)


@functools.cache
def _functions(config: _Config) -> Drafter:
    return Drafter(
        propose=functools.partial(_propose, config),
        size=TreeSize(len(config.depth), config.num_tokens),
        traits=Traits(widths=narrower(range(1, len(config.depth) + 1, config.drafts)), follows_any_tree=True),
    )


def _propose(config: _Config, params, keys, state, context: Context, limit: Array):
    root, model, levels = context.root, target_of(context).model, np.arange(config.num_tokens)
    exits = jnp.full_like(context.length, config.exit_layer)
    score = functools.partial(score_below, context, first_layers(model, exits))
    logits, pending = score(root, jnp.zeros_like(root), limit[:, None] > 0, mask=jnp.ones((*root.shape, 1), bool))
    first, scores = (x[:, : config.drafts] for x in _named(config, logits))

    def level(carry, depth):
        """From the drafts at `depth` those of the next level: their tokens, and which draft each continues."""
        pending, tokens, scores = carry
        mixture = Mixture(tokens[:, None], jax.nn.softmax(scores, -1)[:, None])
        seen = jnp.append(levels < depth, True)  # the root, the mixtures before, and this one
        logits, new = score(
            mixture, jnp.full_like(root, depth), depth < limit[:, None], earlier=pending,
            mask=jnp.broadcast_to(seen, (root.shape[0], 1, len(seen))),
        )  # fmt: skip
        named, log_p = _named(config, logits)
        draft, choice, scores = extend(scores, jnp.broadcast_to(log_p[:, None], (*tokens.shape, named.shape[1])))
        tokens = take_along(named, choice, 1)
        return (model.insert(pending, new, depth), tokens, scores), (tokens, draft)

    start = model.widen(pending, config.num_tokens), first, scores
    _, (tokens, draft) = jax.lax.scan(level, start, jnp.asarray(levels[1:]))  # [levels, B, k]
    by_row = lambda x: x.swapaxes(0, 1).reshape(root.shape[0], -1)
    above = 1 + levels[:-1, None, None] * config.drafts + draft
    tokens = jnp.concatenate([root, first, by_row(tokens)], 1)
    parents = jnp.concatenate([root * 0 - 1, first * 0, by_row(above)], 1)
    valid = jnp.asarray(config.depth) <= jnp.maximum(limit, 0)[:, None]
    return TokenTree(tokens, parents, valid), state


def _named(config: _Config, logits: Array) -> tuple[Array, Array]:
    """The candidates int32[B, C] of logits [B, 1, V], best first, and their log p."""
    return likeliest(logits[:, 0] / config.temperature, min(config.candidates, logits.shape[-1]))
