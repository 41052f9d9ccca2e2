"""Agreement of a draft head with its target: how often its first draft is the target's most likely next token.

Verification hides a checkpoint that was read wrongly: the drafts are rejected, and the text is still right. This check
drafts after every token of a text, with the target's true features of the tokens before it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.models.heads.contract import DraftHead, FeaturePairs, Head
from specjax.types import Appended, Array, Context, DraftOutput, Output, PyTree, Target


class TargetText(NamedTuple):
    """The outputs of one target pass over a text."""

    tokens: Array  # int32[1, T]
    best: Array  # int32[T], the most likely next token at each position
    hidden: Array  # [1, T, D]
    pending: PyTree  # the new entries of the target's cache
    streams: dict[int, Array]  # by tap

    def features(self, head: Head) -> Array:
        """Return the features [1, T, F] that a head reads."""
        return head.features_of(Output(self.best, self.hidden, tuple(self.streams[tap] for tap in head.taps)))


def read_text(target: Target, tokens: Sequence[int], heads: Sequence[DraftHead]) -> TargetText:
    """Run one target pass over at least three tokens, and record the features of all these heads."""
    taps = tuple(sorted({tap for head in heads for tap in head.head.taps}))
    text = jnp.asarray(tokens, jnp.int32)[None]
    best, hidden, pending, streams = _pass(target, text, taps)
    return TargetText(text, best, hidden, pending, dict(zip(taps, streams, strict=True)))


def agreement(target: Target, head: DraftHead, text: TargetText) -> float:
    """Return the fraction of positions at which the head's most likely draft is the target's most likely token."""
    has_prompts = head.head.soft_prompts is not None
    features = prompted_features(target, head, text.tokens) if has_prompts else text.features(head.head)
    return float(_agreement(target, head, text.tokens, text.best, text.pending, features))


@functools.partial(jax.jit, static_argnames="taps")
def _pass(target: Target, tokens: Array, taps: tuple[int, ...]) -> tuple[Array, Array, PyTree, tuple[Array, ...]]:
    model, size = target.model, tokens.shape[1]
    positions, mask = jnp.arange(size)[None], jnp.tril(jnp.ones((1, size, size), bool))
    cache = model.init_cache(target.params, None, 1, size)
    tapped = {"taps": taps} if taps else {}
    output, pending = model.forward(target.params, tokens, cache, positions=positions, mask=mask, **tapped)
    return jnp.argmax(output.logits[0], -1), output.hidden, pending, output.taps


@jax.jit
def prompted_features(target: Target, head: DraftHead, tokens: Array, first: Array | None = None) -> Array:
    """Compute the features [B, T, F] of the head's soft prompts below each token of texts int32[B, T] in one pass.

    first: int32[B, T], the first position that each token attends to; None: 0.
    """
    assert head.head.soft_prompts is not None
    model, (batch, size) = target.model, tokens.shape
    vectors = head.head.soft_prompts(head.params)  # [depths, copies, D]
    depths, copies, width = vectors.shape
    place, depth, copy = jnp.indices((size, depths, copies)).reshape(3, -1)  # of each prompt vector
    text = jnp.arange(size)
    prompt_mask = (place[:, None] == place) & (copy[:, None] == copy) & (depth[:, None] >= depth)
    text_rows, prompt_rows = jnp.pad(text[:, None] >= text, ((0, 0), (0, len(place)))), place[:, None] >= text
    mask = jnp.concatenate([text_rows, jnp.concatenate([prompt_rows, prompt_mask], 1)])[None]
    if first is not None:
        first = jnp.concatenate([first, first[:, place]], 1)  # a prompt belongs to the text of the token above it
        mask &= (jnp.arange(size + len(place)) >= size) | (jnp.arange(size + len(place)) >= first[:, :, None])
    mask = jnp.broadcast_to(mask, (batch, *mask.shape[1:]))
    positions = jnp.concatenate([text, place + 1 + depth])
    prompts = jnp.tile(vectors.reshape(-1, width), (size, 1))
    rows = Appended(tokens, jnp.broadcast_to(prompts, (batch, *prompts.shape)))
    cache = model.init_cache(target.params, None, batch, 0)
    positions = jnp.broadcast_to(positions, (batch, len(positions)))
    output, _ = model.forward(target.params, rows, cache, positions=positions, mask=mask)
    return output.hidden[:, size:].reshape(batch, size, -1)


@jax.jit
def _agreement(target: Target, head: DraftHead, tokens: Array, best: Array, pending: PyTree, features: Array) -> Array:
    """Return the agreement float32[]."""
    size, one, model = tokens.shape[1], jnp.ones((1,), jnp.int32), target.model

    def is_right(carry, t):
        """Draft the token of position t + 2, after the root at t + 1, and compare it with the target's."""
        memory, cache = carry
        cache = model.commit(cache, pending, t[None, None], one)  # some heads run the target's own layers
        context = Context(tokens, one * (t + 2), target=target, cache=cache)
        pair = FeaturePairs(jax.lax.dynamic_slice_in_dim(features, t, 1, 1), context.root, one)
        memory = head.head.read(head.params, memory, pair, context)
        _, output = head.head.start(head.params, memory, context, 2)
        logits = output.logits if isinstance(output, DraftOutput) else output
        return (memory, cache), jnp.argmax(logits[0], -1) == best[t + 1]

    memory = head.head.init_memory(head.params, Context(tokens, one, target=target), 1, size + 1)
    carry = memory, model.init_cache(target.params, None, 1, size)
    return jnp.mean(jax.lax.scan(is_right, carry, jnp.arange(size - 1))[1].astype(jnp.float32))
