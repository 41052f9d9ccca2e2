"""How often a head's first draft is the target's own next token, on a text that is given.

Verification hides a head that is misread: its drafts are rejected, and the text is right. So it is asked of every token
of a text what it would draft behind it, with the target's true features of the tokens before.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from specjax.models.heads.contract import DraftHead, Pairs
from specjax.types import Array, Context, Target


def agreement(target: Target, head: DraftHead, tokens: Sequence[int]) -> float:
    """The share of the places of a text of at least three tokens where the likeliest draft is the likeliest token."""
    return float(_agreement(target, head, jnp.asarray(tokens, jnp.int32)[None]))


@jax.jit
def _agreement(target: Target, head: DraftHead, tokens: Array) -> Array:
    """float32[], of a text int32[1, T]."""
    model, size = target.model, tokens.shape[1]
    taps = {"taps": head.head.taps} if head.head.taps else {}
    positions, mask = jnp.arange(size)[None], jnp.tril(jnp.ones((1, size, size), bool))
    cache = model.begin(target.params, None, 1, size)
    output, _ = model.forward(target.params, tokens, cache, positions=positions, mask=mask, **taps)
    best, features = jnp.argmax(output.logits[0], -1), head.head.features_of(output)  # [T], [1, T, F]
    one = jnp.ones((1,), jnp.int32)

    def drafted(memory, t):
        """What it drafts behind token t + 1, the root: that of position t + 2."""
        context = Context(tokens, one * (t + 2), target=target)
        pair = Pairs(jax.lax.dynamic_slice_in_dim(features, t, 1, 1), context.root, one)
        memory = head.head.read(head.params, memory, pair, context)
        _, logits = head.head.start(head.params, memory, context, 2)
        return memory, jnp.argmax(logits[0], -1) == best[t + 1]

    first = head.head.begin(head.params, Context(tokens, one, target=target), 1, size + 1)
    return jnp.mean(jax.lax.scan(drafted, first, jnp.arange(size - 1))[1].astype(jnp.float32))
