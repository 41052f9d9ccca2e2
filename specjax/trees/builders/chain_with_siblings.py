"""SWIFT's tree: a chain whose tokens have more siblings where the drafter is less confident.

Xia et al.: SWIFT: On-the-Fly Self-Speculative Decoding for LLM Inference Acceleration (ICLR 2025), arXiv 2410.06916.

Rule: let c be the largest probability of a level's distribution. For c > 0.95, > 0.8, > 0.5, else, a level has
  3, 5, 8, 10 likeliest tokens (greedy), or 1, 3, 5, 10 drawn tokens (sampling).
The chain continues below the first of them.
Guarantee: siblings are drawn without replacement. Their number depends on the distribution, not on the drawn tokens.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp

from specjax.errors import UsageError
from specjax.trees.contracts import Builder, Level, Parents

SURE = (0.95, 0.8, 0.5)
LIKELIEST = (3, 5, 8, 10)
DRAWN = (1, 3, 5, 10)


@functools.cache
def chain_with_siblings(num_tokens: int = 25) -> Builder:
    """Return a builder of a chain of `num_tokens` tokens, each with up to 9 siblings.

    Raises: UsageError if num_tokens < 1.
    """
    if num_tokens < 1:
        raise UsageError(f"num_tokens must be at least 1, not {num_tokens}")
    width = max(LIKELIEST)
    nodes = 1 + num_tokens * width

    def expand(state, level, parents: Parents):
        batch = len(parents.ids)
        tokens, scores = parents.best(min(width, parents.vocab_size))  # [B, 1, k]
        best = jnp.exp(parents.reduce(lambda log_q, keys: jnp.max(log_q, 2))[:, 0])
        bucket = jnp.sum(best[:, None] <= jnp.array(SURE), 1)
        count = parents.unless_greedy(jnp.array(DRAWN)[bucket], jnp.array(LIKELIEST)[bucket])
        valid = (scores[:, 0] > -jnp.inf) & (jnp.arange(tokens.shape[2]) < count[:, None]) & parents.valid
        fill = lambda x: jnp.pad(x, ((0, 0), (0, width - x.shape[1])))
        parent = jnp.broadcast_to(parents.ids, (batch, width))
        return state, Level(fill(tokens[:, 0]), parent, fill(valid), jnp.zeros((batch, 1), jnp.int32))

    return Builder(
        init=lambda batch: (),
        expand=expand,
        finish=lambda state, parents, valid: jnp.broadcast_to(jnp.arange(nodes), parents.shape),
        num_nodes=nodes,
        max_depth=num_tokens,
        width=width,
        frontier=1,
        levels=num_tokens,
        draws="without_replacement",
        widths=tuple(w for w in (1, 16, 32, 64) if w < nodes),
    )
