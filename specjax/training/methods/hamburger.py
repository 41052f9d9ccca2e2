"""Training HAMburger: a base that reads segments as one, with the parts that make and write them.

Liu, Zhang: HAMburger: Accelerating LLM Inference via Token Smashing (2025), arXiv 2505.20438.

The answers are cut by the entropies of the base as it is (`specjax.training.data.segments.by_entropy`), prompts are not. One
pass over the macro steps of a text, one of the small decoder over all segments. Loss: the mean cross entropy of all
tokens of the answers, the first of a segment by the base and the others by the decoder, and half the mean binary cross
entropy of its ends. To train the decoder alone for a base that stays as it is: `specjax train --method hamburger`.

Deviations: the distillation from a teacher, which is an option of the authors', is left out. Each text is one row.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from specjax.adaptive.optimise import descend
from specjax.arrays.indexing import take_along
from specjax.decoders.hamburger import check
from specjax.errors import UsageError
from specjax.models.heads.blocks import bind, unembed
from specjax.models.heads.contract import DraftHead, Head
from specjax.models.heads.hamburger import Hamburger, continued
from specjax.numerics.validation import check_integer
from specjax.training.data.segments import by_entropy, told
from specjax.types import Array, Context, Model, PyTree, Stream, Target

STOPS = 0.5
LEAST_RATE = 1e-5


class MacroSteps(NamedTuple):
    """Texts in macro steps, as many as they have tokens at most."""

    tokens: Array  # int32[B, M, s], of each segment
    size: Array  # int32[B, M], how many; 0: there is none
    last: Array  # int32[B, M], the position of the last


def macro_steps(tokens: Array, length: Array, starts: Array, longest: int) -> MacroSteps:
    """Of texts `tokens` int32[B, T], of `length` int32[B] tokens, of which `starts` bool[B, T] begin a segment."""
    batch, size = tokens.shape
    place = jnp.broadcast_to(jnp.arange(size), tokens.shape)
    inside, rows = place < length[:, None], jnp.arange(batch)[:, None]
    first = jax.lax.cummax(jnp.where(starts, place, 0), axis=1)
    segment = jnp.where(inside, jnp.cumsum(starts, 1) - 1, size)
    within = jnp.minimum(place - first, longest - 1)
    found = jnp.zeros((batch, size, longest), jnp.int32).at[rows, segment, within].set(tokens, mode="drop")
    empty = jnp.zeros((batch, size), jnp.int32)
    count = empty.at[rows, segment].add(1, mode="drop")
    last = empty.at[rows, segment].max(place, mode="drop")
    return MacroSteps(found, count, last)


class Losses(NamedTuple):
    """Means over texts, float32[] each."""

    tokens: Array
    stops: Array

    @property
    def loss(self) -> Array:
        return self.tokens + STOPS * self.stops


class Said(NamedTuple):
    """What is said of the segments of texts but the first."""

    first: Array  # float32[B, M - 1, V], logits of the first token of each, by the base
    others: Array  # float32[B, M - 1, s - 1, V], of the tokens behind it, by the decoder
    stops: Array  # float32[B, M - 1, s - 1], logits that the segment ends with these


def said(model: Model, head: Head, base: PyTree, params: PyTree, macro: MacroSteps) -> Said:
    """One pass over the macro steps of texts, and one of the decoder over all segments: what decoding them does."""
    module, (batch, steps, most) = bind(Hamburger, head.config)(params), macro.tokens.shape
    context = Context(macro.tokens[:, :, 0], jnp.ones((batch,), jnp.int32), target=Target(model, base))
    assert model.embed is not None
    embedded = model.embed(base, macro.tokens.reshape(batch, -1)).reshape(batch, steps, most, -1)
    merged = module.merge(embedded, jnp.maximum(macro.size, 1))
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((steps, steps), bool)), (batch, steps, steps))
    output, _ = model.forward(
        base, Stream(merged), model.init_cache(base, None, batch, 0), positions=macro.last, mask=mask, taps=head.taps
    )
    rows = lambda x: x.reshape(-1, *x.shape[2:])
    streams = rows(head.features_of(output)[:, :-1]).astype(head.config.layer.dtype)
    h, _ = continued(module, streams, rows(macro.tokens[:, 1:, :-1]), context)
    by_segment = lambda x: x.reshape(batch, steps - 1, *x.shape[1:])
    return Said(output.logits[:, :-1], by_segment(unembed(h, context)), by_segment(module.stops(h)))


def losses(model: Model, head: Head, base: PyTree, params: PyTree, macro: MacroSteps, prompt: Array) -> Losses:
    """Of texts whose first `prompt` int32[B] tokens are given."""
    found, size, following = said(model, head, base, params, macro), macro.size[:, 1:], macro.tokens[:, 1:]
    asked = (size > 0) & (macro.last[:, 1:] - size + 1 >= prompt[:, None])
    surprise = lambda logits, tokens: -take_along(jax.nn.log_softmax(logits), tokens[..., None], tokens.ndim)[..., 0]
    place = jnp.arange(1, macro.tokens.shape[2])  # of the token that the decoder is at, in its segment
    goes_on = asked[:, :, None] & (place < size[:, :, None])
    here, ends = asked[:, :, None] & (place <= size[:, :, None]), place == size[:, :, None]
    first, others = surprise(found.first, following[:, :, 0]), surprise(found.others, following[:, :, 1:])
    total, count = jnp.sum(first * asked) + jnp.sum(others * goes_on), jnp.sum(asked) + jnp.sum(goes_on)
    stops = optax.sigmoid_binary_cross_entropy(found.stops, ends.astype(jnp.float32))
    return Losses(total / jnp.maximum(count, 1), jnp.sum(stops * here) / jnp.maximum(jnp.sum(here), 1))


def train_hamburger(
    target: Target,
    head: DraftHead,
    tokens: Array,
    prompt: Array,
    length: Array,
    *,
    starts: Array | None = None,
    steps: int = 200,
    base_rate: float = 5e-5,
    learning_rate: float = 1e-4,
) -> tuple[Target, DraftHead, Array]:
    """The base, its other parts, and the loss of each step, from texts `tokens` int32[B, T] of `length` int32[B]
    tokens whose first `prompt` int32[B] are given; all of them are one batch.

    starts: bool[B, T], which tokens begin a segment; default: by the entropies of the base, prompts token by token.
    base_rate, learning_rate: of the base and of the others, which fall to 1e-5 as a cosine. Raises: UsageError for
    parts that do not fit the base, and for segments that they cannot merge.
    """
    check(target, head)
    check_integer("steps", steps)
    longest = head.head.config.segment
    if starts is None:
        alone = jnp.arange(tokens.shape[1]) <= prompt[:, None]
        starts = by_entropy(told(target, tokens)[1], longest=longest, alone=alone)
    macro = macro_steps(tokens, length, starts, longest)
    if not jnp.all(starts[:, 0]) or jnp.max(macro.size) > longest:
        raise UsageError(
            f"starts must have the first token of each text, and no segment of more than the {longest} tokens that the "
            "head merges"
        )
    params = {"base": target.params, "new": head.params}
    arguments = target.model, head.head, steps, base_rate, learning_rate
    params, found = _train(*arguments, params, macro, prompt)
    return Target(target.model, params["base"]), head.replace(params=params["new"]), found


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _train(model: Model, head: Head, steps: int, base_rate: float, rate: float, params, macro: MacroSteps, prompt: Array):
    falling = lambda rate: optax.adam(optax.cosine_decay_schedule(rate, steps, min(LEAST_RATE / rate, 1.0)))
    optimizer = optax.multi_transform(
        {"base": falling(base_rate), "new": falling(rate)}, {"base": "base", "new": "new"}
    )  # fmt: skip
    loss = lambda params: losses(model, head, params["base"], params["new"], macro, prompt).loss
    return descend(loss, params, steps, optimizer)
