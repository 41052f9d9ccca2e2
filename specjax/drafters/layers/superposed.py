"""Superposed decoding: several drafts grow with one pass per level over a mixture of their last tokens.

Shen, Fan, Pratt, Park, Wallingford, Kakade, Holtzman, Krishna, Farhadi, Kusupati: Superposed Decoding: Multiple
Generations from a Single Autoregressive Inference Pass (NeurIPS 2024), arXiv 2405.18400. This file is the drafter;
`specjax.decoders.superposed` generates completions.

Rule: there are k drafts with scores s_i. The next input is sum_i softmax(s)_i E[last token of draft i]. Its output, cut
to the `candidates` most likely tokens and normalised, is the next distribution p of every draft. The k best of all
s_i + log p(v) are the drafts of the next level. The first level takes the k most likely tokens. The drafts of a level
are its nodes of the tree.
Guarantee: distribution (a point-mass tree).
Deviations: the passes run the target's first layers over its own cache (an early exit); the paper decodes with the
whole model. No n-gram models distinguish the drafts (alpha = 0). The authors count n-grams on a corpus; in a row's own
text most contexts are new, and their rule then subtracts a constant. Drafts that are dropped later stay in the tree.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays.indexing import take_along
from specjax.catalog import Method, Option, shared
from specjax.drafters.layers.early_exit import context_target, first_layers, resolve_exit_layer, score_below
from specjax.errors import UsageError
from specjax.trees.contracts import verify_widths
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
    """Draft a tree of `drafts` nodes on each of `num_tokens` levels with the target's first `exit_layer` layers.

    Args:
      exit_layer: number of layers that draft; default: a quarter of all.
      candidates: number of most likely tokens per level to choose from.
      temperature: temperature of p; the default is the authors'. A lower one favours the most likely draft.

    The drafter has no state and uses the target's cache. Raises: UsageError for a setting out of range.
    """
    exit_layer = resolve_exit_layer(target, exit_layer, "superposed")
    if min(num_tokens, drafts) < 1:
        raise UsageError(f"num_tokens and drafts must be at least 1, not {num_tokens} and {drafts}")
    if candidates < drafts:
        raise UsageError(f"candidates must be at least the number of drafts, {drafts}, not {candidates}")
    if temperature <= 0:
        raise UsageError(f"temperature must be above 0, not {temperature}")
    drafts = min(drafts, target.model.vocab_size)
    if not target.model.capabilities.mixtures:
        raise UsageError(f"the model {target.model.name} takes no mixtures of tokens, which superposed drafts from")
    return _functions(Config(exit_layer, num_tokens, drafts, candidates, temperature))


class Config(NamedTuple):
    exit_layer: int
    num_tokens: int
    drafts: int
    candidates: int
    temperature: float

    @property
    def depth(self) -> np.ndarray:
        """Return the depth int32[N] of each node."""
        return np.repeat(np.arange(self.num_tokens + 1), [1] + [self.drafts] * self.num_tokens)


@functools.cache
def _functions(config: Config) -> Drafter:
    return Drafter(
        propose=functools.partial(_propose, config),
        size=TreeSize(len(config.depth), config.num_tokens),
        traits=Traits(widths=verify_widths(range(1, len(config.depth) + 1, config.drafts)), follows_any_tree=True),
    )


def _propose(config: Config, params, keys, state, context: Context, limit: Array):
    root, model, levels = context.root, context_target(context).model, np.arange(config.num_tokens)
    exits = jnp.full_like(context.length, config.exit_layer)
    score = functools.partial(score_below, context, first_layers(model, exits))
    logits, pending = score(root, jnp.zeros_like(root), limit[:, None] > 0, mask=jnp.ones((*root.shape, 1), bool))
    first, scores = (x[:, : config.drafts] for x in _candidates(config, logits))

    def level(carry, depth):
        """Extend the drafts at `depth` by one level; return the tokens and the draft that each of them continues."""
        pending, tokens, scores = carry
        mixture = Mixture(tokens[:, None], jax.nn.softmax(scores, -1)[:, None])
        is_visible = jnp.append(levels < depth, True)  # the root, the earlier mixtures, and this one
        logits, new = score(
            mixture, jnp.full_like(root, depth), depth < limit[:, None], earlier=pending,
            mask=jnp.broadcast_to(is_visible, (root.shape[0], 1, len(is_visible))),
        )  # fmt: skip
        candidates, log_p = _candidates(config, logits)
        draft, choice, scores = extend(scores, jnp.broadcast_to(log_p[:, None], (*tokens.shape, candidates.shape[1])))
        tokens = take_along(candidates, choice, 1)
        return (model.insert(pending, new, depth), tokens, scores), (tokens, draft)

    start = model.widen(pending, config.num_tokens), first, scores
    _, (tokens, draft) = jax.lax.scan(level, start, jnp.asarray(levels[1:]))  # [levels, B, k]
    by_row = lambda x: x.swapaxes(0, 1).reshape(root.shape[0], -1)
    above = 1 + levels[:-1, None, None] * config.drafts + draft
    tokens = jnp.concatenate([root, first, by_row(tokens)], 1)
    parents = jnp.concatenate([root * 0 - 1, first * 0, by_row(above)], 1)
    valid = jnp.asarray(config.depth) <= jnp.maximum(limit, 0)[:, None]
    return TokenTree(tokens, parents, valid), state


def _candidates(config: Config, logits: Array) -> tuple[Array, Array]:
    """Return the candidates int32[B, C] of logits [B, 1, V], best first, and their log p."""
    return likeliest(logits[:, 0] / config.temperature, min(config.candidates, logits.shape[-1]))
