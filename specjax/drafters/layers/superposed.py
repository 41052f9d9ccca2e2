"""Superposed decoding: several drafts grow from one pass per level, over a mixture of their last tokens.

Shen, Fan, Pratt, Park, Wallingford, Kakade, Holtzman, Krishna, Farhadi, Kusupati: Superposed Decoding: Multiple
Generations from a Single Autoregressive Inference Pass (NeurIPS 2024), arXiv 2405.18400; here the drafter.
`specjax.decoders.superposed` is the generator of completions.

Rule: k drafts with scores s_i. The next input is sum_i softmax(s)_i E[last token of draft i]; its law p, cut to the
`candidates` likeliest tokens and normalised, is the next law of every draft; of all s_i + log p(v) the k best are the
drafts of the next level. The first level takes the k likeliest tokens. Each level's drafts are its nodes of the tree.
Guarantee: distribution (a point-mass tree).
Deviations: the passes are those of the target's first layers, over its own cache (an early exit; the paper decodes with
the whole model). No n-gram models tell the drafts apart (alpha = 0): the authors' are counted on a corpus; in a row's
own text most contexts are new, where their rule subtracts a constant. Drafts that were dropped later stay in the tree.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from specjax.drafters.layers.early_exit import chosen_exit, first_layers, look_below, target_of
from specjax.errors import UsageError
from specjax.indexing import take_along
from specjax.trees.superposition import extend, likeliest
from specjax.types import Array, Context, Drafter, Mixture, Target, TokenTree


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
    return _functions(exit_layer, num_tokens, drafts, candidates, temperature)


@functools.cache
def _functions(exit_layer: int, num_tokens: int, drafts: int, candidates: int, temperature: float) -> Drafter:
    nodes = 1 + num_tokens * drafts

    def named_by(logits: Array) -> tuple[Array, Array]:
        return likeliest(logits[:, 0] / temperature, min(candidates, logits.shape[-1]))

    def propose(params, keys, state, context: Context, limit):
        model = target_of(context).model
        look = functools.partial(look_below, context, first_layers(model, jnp.full_like(context.length, exit_layer)))
        root = context.root
        logits, pending = look(root, jnp.zeros_like(root), limit, mask=jnp.ones((*root.shape, 1), bool))
        tokens, scores = (x[:, :drafts] for x in named_by(logits))

        def level(carry, depth):
            pending, tokens, scores = carry
            mixture = Mixture(tokens[:, None], jax.nn.softmax(scores, -1)[:, None])
            seen = jnp.append(jnp.arange(num_tokens) < depth, True)  # the root, the mixtures before, and this one
            logits, new = look(
                mixture, jnp.full_like(root, depth), limit, earlier=pending,
                mask=jnp.broadcast_to(seen, (root.shape[0], 1, num_tokens + 1)),
            )  # fmt: skip
            named, log_p = named_by(logits)
            draft, choice, scores = extend(scores, jnp.broadcast_to(log_p[:, None], (*tokens.shape, named.shape[1])))
            tokens = take_along(named, choice, 1)
            return (model.insert(pending, new, depth), tokens, scores), (tokens, draft)

        first, start = tokens, (model.widen(pending, num_tokens), tokens, scores)
        _, (tokens, draft) = jax.lax.scan(level, start, jnp.arange(1, num_tokens))
        by_row = lambda x: x.swapaxes(0, 1).reshape(root.shape[0], -1)
        above = 1 + jnp.arange(num_tokens - 1)[:, None, None] * drafts + draft  # [levels, B, k]
        tokens = jnp.concatenate([root, first, by_row(tokens)], 1)
        parents = jnp.concatenate([root * 0 - 1, first * 0, by_row(above)], 1)
        depth = (jnp.arange(nodes) + drafts - 1) // drafts
        return TokenTree(tokens, parents, depth <= jnp.maximum(limit, 0)[:, None]), state

    return Drafter(
        propose=propose,
        num_nodes=nodes,
        max_depth=num_tokens,
        follows_any_tree=True,
    )
