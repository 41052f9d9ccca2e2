"""Agreement of a draft head with its target: how often its drafts are the target's most likely next tokens.

Verification hides a checkpoint that was read wrongly: the drafts are rejected, and the text is still right. This check
drafts after every token of a text, with the target's true features of the tokens before it. Some errors only show in
the later drafts, so it reads several depths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays.modes import jit
from specjax.models.heads.contract import DraftedNodes, DraftHead, FeaturePairs, Head
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


def agreement(target: Target, head: DraftHead, text: TargetText, depths: int = 4) -> tuple[float, ...]:
    """Return the fractions of positions at which the head's most likely drafts are the target's most likely tokens.

    The first one is of the first draft after each root, the next one of the second draft, and so on: as many as
    `depths`, the longest chain of the head and the text allow. Each draft follows the text's own tokens, so an error at
    one depth does not lower the later fractions.
    """
    depths = min(depths, head.head.max_depth or depths, text.tokens.shape[1] - 1)
    has_prompts = head.head.soft_prompts is not None
    features = prompted_features(target, head, text.tokens) if has_prompts else text.features(head.head)
    hits = _agreement(target, head, text.tokens, text.best, text.pending, features, depths)
    return tuple(map(float, hits))


@jit(static_argnames="taps")
def _pass(target: Target, tokens: Array, taps: tuple[int, ...]) -> tuple[Array, Array, PyTree, tuple[Array, ...]]:
    model, size = target.model, tokens.shape[1]
    positions, mask = jnp.arange(size)[None], jnp.tril(jnp.ones((1, size, size), bool))
    cache = model.init_cache(target.params, None, 1, size)
    tapped = {"taps": taps} if taps else {}
    output, pending = model.forward(target.params, tokens, cache, positions=positions, mask=mask, **tapped)
    return jnp.argmax(output.logits[0], -1), output.hidden, pending, output.taps


@jit
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


@jit(static_argnames="depths")
def _agreement(
    target: Target, head: DraftHead, tokens: Array, best: Array, pending: PyTree, features: Array, depths: int
) -> Array:
    """Return the agreement float32[depths]."""
    size, one, model = tokens.shape[1], jnp.ones((1,), jnp.int32), target.model
    logits_of = lambda output: output.logits if isinstance(output, DraftOutput) else output

    def hits(carry, t):
        """Draft after the root at t + 1, along the text, and compare each draft with the target's token."""
        memory, cache = carry
        cache = model.commit(cache, pending, t[None, None], one)  # some heads run the target's own layers
        context = Context(tokens, one * (t + 2), target=target, cache=cache)
        pair = FeaturePairs(jax.lax.dynamic_slice_in_dim(features, t, 1, 1), context.root, one)
        memory = head.head.read(head.params, memory, pair, context)
        scratch, output = head.head.start(head.params, memory, context, depths)
        drafts = [jnp.argmax(logits_of(output)[0], -1)]
        for depth in range(1, depths):
            scratch, output = head.head.follow(head.params, scratch, _text_node(tokens, t + 1, depth, depths), context)
            drafts.append(jnp.argmax(logits_of(output)[0, 0], -1))
        place = t + 1 + jnp.arange(depths)
        is_inside = place < size
        is_right = (jnp.stack(drafts) == best[jnp.minimum(place, size - 1)]) & is_inside
        return (memory, cache), (is_right, is_inside)

    memory = head.head.init_memory(head.params, Context(tokens, one, target=target), 1, size + 1)
    carry = memory, model.init_cache(target.params, None, 1, size)
    is_right, is_inside = jax.lax.scan(hits, carry, jnp.arange(size - 1))[1]
    return jnp.sum(is_right, 0, dtype=jnp.float32) / jnp.sum(is_inside, 0, dtype=jnp.float32)


def _text_node(tokens: Array, root: Array, depth: int, places: int) -> DraftedNodes:
    """Return the token of the text at this depth below a root as a node of a chain."""
    node = lambda value: jnp.full((1, 1), value, jnp.int32)
    token = tokens[:, jnp.minimum(root + depth, tokens.shape[1] - 1)][:, None]
    ancestors = (jnp.arange(places) > 0) & (jnp.arange(places) < depth)
    return DraftedNodes(token, node(depth), jnp.int32(depth), node(depth - 1), ancestors[None, None])
