"""Training of HAMburger: a base model that reads segments as one token, and modules that merge and write segments.

Liu, Zhang: HAMburger: Accelerating LLM Inference via Token Smashing (2025), arXiv 2505.20438.

Responses are split by the entropies of the untrained base (`specjax.training.data.segments.split_by_entropy`), and
prompts are not split. One pass covers the macro steps of a text, and one pass of the small decoder covers all segments.
The loss has two terms. The first is the mean cross entropy of all response tokens. The base predicts the first token of
a segment, and the decoder predicts the others. The second is half the mean binary cross entropy of the segment ends.
`specjax train --method hamburger` trains only the decoder, with a frozen base.

Deviations: the authors' optional distillation from a teacher is not implemented. Each text has its own row.

    trained, head, losses = train_hamburger(target, head, tokens, prompt_length, length)
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from specjax.adaptive.optimise import descend
from specjax.arrays.indexing import take_along
from specjax.arrays.modes import jit, with_standard_modes
from specjax.decoders.hamburger import check
from specjax.errors import UsageError
from specjax.models.heads.blocks import bind, unembed
from specjax.models.heads.contract import DraftHead, Head
from specjax.models.heads.hamburger import Hamburger, decode_segment
from specjax.models.variants.expanding import check_trainable
from specjax.numerics.validation import check_integer
from specjax.training.data.segments import score_tokens, split_by_entropy
from specjax.types import Array, Context, Model, PyTree, Stream, Target

STOP_SHARE = 0.5  # weight of the loss of segment ends
MIN_RATE = 1e-5  # learning rate at the last step


class MacroSteps(NamedTuple):
    """Texts as macro steps (one per segment). M is the number of tokens, so any segmentation fits."""

    tokens: Array  # int32[B, M, s], tokens of each segment
    size: Array  # int32[B, M], tokens per segment; 0: no segment
    last: Array  # int32[B, M], position of the last token of each segment


def to_macro_steps(tokens: Array, length: Array, starts: Array, max_length: int) -> MacroSteps:
    """Group texts into segments.

    Args: tokens: int32[B, T] with `length` int32[B] tokens. starts: bool[B, T], True for tokens that begin a segment.
    """
    batch, size = tokens.shape
    column = jnp.broadcast_to(jnp.arange(size), tokens.shape)
    is_text, rows = column < length[:, None], jnp.arange(batch)[:, None]
    first = jax.lax.cummax(jnp.where(starts, column, 0), axis=1)
    segment = jnp.where(is_text, jnp.cumsum(starts, 1) - 1, size)
    within = jnp.minimum(column - first, max_length - 1)
    grouped = jnp.zeros((batch, size, max_length), jnp.int32).at[rows, segment, within].set(tokens, mode="drop")
    empty = jnp.zeros((batch, size), jnp.int32)
    count = empty.at[rows, segment].add(1, mode="drop")
    last = empty.at[rows, segment].max(column, mode="drop")
    return MacroSteps(grouped, count, last)


class HamburgerLosses(NamedTuple):
    """Means over texts, float32[] each."""

    tokens: Array
    stops: Array

    @property
    def loss(self) -> Array:
        """Return the weighted sum."""
        return self.tokens + STOP_SHARE * self.stops


class SegmentLogits(NamedTuple):
    """Logits of all segments of texts except the first."""

    first: Array  # float32[B, M - 1, V], for the first token of each segment, from the base
    later: Array  # float32[B, M - 1, s - 1, V], for its other tokens, from the decoder
    stops: Array  # float32[B, M - 1, s - 1], for the end of the segment


def compute_logits(model: Model, head: Head, base: PyTree, params: PyTree, macro: MacroSteps) -> SegmentLogits:
    """Run one pass over the macro steps of texts, and one pass of the decoder over all segments, as in decoding."""
    module, (batch, steps, size) = bind(Hamburger, head.config)(params), macro.tokens.shape
    context = Context(macro.tokens[:, :, 0], jnp.ones((batch,), jnp.int32), target=Target(model, base))
    assert model.embed is not None
    embedded = model.embed(base, macro.tokens.reshape(batch, -1)).reshape(batch, steps, size, -1)
    merged = module.merge(embedded, jnp.maximum(macro.size, 1))
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((steps, steps), bool)), (batch, steps, steps))
    output, _ = model.forward(
        base, Stream(merged), model.init_cache(base, None, batch, 0), positions=macro.last, mask=mask, taps=head.taps
    )
    flatten = lambda x: x.reshape(-1, *x.shape[2:])
    streams = flatten(head.features_of(output)[:, :-1]).astype(head.config.layer.dtype)
    h, _ = decode_segment(module, streams, flatten(macro.tokens[:, 1:, :-1]), context)
    by_segment = lambda x: x.reshape(batch, steps - 1, *x.shape[1:])
    return SegmentLogits(output.logits[:, :-1], by_segment(unembed(h, context)), by_segment(module.stops(h)))


def compute_losses(
    model: Model, head: Head, base: PyTree, params: PyTree, macro: MacroSteps, prompt_length: Array
) -> HamburgerLosses:
    """Return the losses of texts after their prompts, which have `prompt_length` int32[B] tokens."""
    logits = compute_logits(model, head, base, params, macro)
    size, tokens = macro.size[:, 1:], macro.tokens[:, 1:]
    is_response = (size > 0) & (macro.last[:, 1:] - size + 1 >= prompt_length[:, None])
    surprise = lambda logits, tokens: -take_along(jax.nn.log_softmax(logits), tokens[..., None], tokens.ndim)[..., 0]
    index = jnp.arange(1, macro.tokens.shape[2])  # index in the segment of each token of the decoder
    continues = is_response[:, :, None] & (index < size[:, :, None])
    decides, ends = is_response[:, :, None] & (index <= size[:, :, None]), index == size[:, :, None]
    first, later = surprise(logits.first, tokens[:, :, 0]), surprise(logits.later, tokens[:, :, 1:])
    total, count = jnp.sum(first * is_response) + jnp.sum(later * continues), jnp.sum(is_response) + jnp.sum(continues)
    stops = optax.sigmoid_binary_cross_entropy(logits.stops, ends.astype(jnp.float32))
    return HamburgerLosses(total / jnp.maximum(count, 1), jnp.sum(stops * decides) / jnp.maximum(jnp.sum(decides), 1))


@with_standard_modes
def train_hamburger(
    target: Target,
    head: DraftHead,
    tokens: Array,
    prompt_length: Array,
    length: Array,
    *,
    starts: Array | None = None,
    steps: int = 200,
    base_rate: float = 5e-5,
    learning_rate: float = 1e-4,
) -> tuple[Target, DraftHead, Array]:
    """Train the base and its head together, with all texts in one batch.

    Args:
      tokens: int32[B, T], texts of `length` int32[B] tokens that begin with prompts of `prompt_length` int32[B] tokens.
      starts: bool[B, T], True for tokens that begin a segment. None: responses are split by the entropies of the base,
        and each prompt token is a segment.
      base_rate, learning_rate: learning rates of the base and of the head. Both decay to 1e-5 along a cosine.

    Returns: (the trained base, the trained head, float32[steps] losses).

    Raises: UsageError for a quantised base, a head that does not fit it, and segments that the head cannot merge.
    """
    check_trainable(target.params, target.model.name)
    check(target, head)
    check_integer("steps", steps)
    max_length = head.head.config.segment
    if starts is None:
        forced = jnp.arange(tokens.shape[1]) <= prompt_length[:, None]
        starts = split_by_entropy(score_tokens(target, tokens)[1], max_length=max_length, forced=forced)
    macro = to_macro_steps(tokens, length, starts, max_length)
    if not jnp.all(starts[:, 0]) or jnp.max(macro.size) > max_length:
        raise UsageError(
            f"starts must include the first token of each text, and no segment may exceed the {max_length} tokens that "
            "the head merges"
        )
    params = {"base": target.params, "new": head.params}
    arguments = target.model, head.head, steps, base_rate, learning_rate
    params, losses = _train(*arguments, params, macro, prompt_length)
    return Target(target.model, params["base"]), head.replace(params=params["new"]), losses


@jit(static_argnums=(0, 1, 2, 3, 4))
def _train(
    model: Model, head: Head, steps: int, base_rate: float, rate: float, params, macro: MacroSteps, prompt_length: Array
):
    decay = lambda rate: optax.adam(optax.cosine_decay_schedule(rate, steps, min(MIN_RATE / rate, 1.0)))
    optimizer = optax.multi_transform({"base": decay(base_rate), "new": decay(rate)}, {"base": "base", "new": "new"})
    loss = lambda params: compute_losses(model, head, params["base"], params["new"], macro, prompt_length).loss
    return descend(loss, params, steps, optimizer)
