"""Training rounds: a head drafts from many positions of a text in one pass, exactly as it drafts when it is served.

The round from position t begins with the pair of x_t and its root x_{t+1}. The head's own `start` and `follow` draft a
chain whose tokens are replaced by those of the text, as after a correct draft. All rounds of a text share its keys and
values. Each round appends its own, like the nodes of a tree. Every head is therefore trained on the same computation as
in decoding. For EAGLE-3 this is the training-time test of arXiv 2503.01840. There the query of position t at step i
attends to the pairs up to t. From earlier steps it attends only to pairs of its own round.

    depth k of the round from t predicts x_{t+2+k}; the teacher is the target's prediction from x_{t+1+k}
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from specjax.arrays.indexing import take_along
from specjax.models.heads.agreement import prompted_features
from specjax.models.heads.blocks import share_cache
from specjax.models.heads.contract import DraftedNodes, DraftHead, FeaturePairs, Head, features_of
from specjax.training.data.packing import PackedBatch
from specjax.training.objectives.chunks import TARGET, sum_in_chunks
from specjax.types import Array, Context, DraftOutput, Model, Output, PyTree, Target


class TargetActivations(NamedTuple):
    """Results of a pass of the target over a packed batch."""

    features: Array  # [B, T, F], features of the tapped layers
    hidden: Array  # [B, T, D], hidden states after the last norm
    pending: PyTree  # cache entries; None: not stored, for heads that do not read the cache
    images: PyTree = None  # vectors of the images of the texts (`Model.images`)


class DepthOutput(NamedTuple):
    """Outputs of N rounds at one depth, and their labels."""

    logits: Array  # float32[N, v], v: size of the draft vocabulary
    label: Array  # int32[N], draft id of the next token, or v if it is not in the draft vocabulary
    hidden: Array  # [N, D], hidden states from which the target predicts the next token
    weight: Array  # float32[N], 1 where the target wrote the next token
    confidence: Array | None  # float32[N], predicted acceptance
    scratch: PyTree  # scratch of the head, for losses that read more than logits


class Rounds(NamedTuple):
    """Rounds of a packed batch."""

    packed: PackedBatch
    activations: TargetActivations
    positions: Array  # int32[B, R], where rounds begin; -1: no round, with weight 0
    ids: Array | None = None  # int32[V], the draft id of each token; None: the head drafts all ids of the target
    token_positions: Array | None = None  # int32[B, T], of the tokens in the activations' pass; None: their columns
    skipped: Array | None = None  # int32[B, R], depths before the only one that each round drafts; None: it drafts all
    keys: Array | None = None  # key[B], of what the head draws; None: it is measured, not trained


def forward_packed(
    model: Model, params: PyTree, packed: PackedBatch, taps: tuple[int, ...] = (), positions: Array | None = None,
    cache: PyTree = None,
) -> tuple[Output, PyTree]:  # fmt: skip
    """Run a model over a packed batch. Texts do not attend to each other. Returns: (output, pending).

    positions: int32[B, T]; None: the columns. cache: that of `empty_cache`; None: a new one.
    """
    batch, size = packed.tokens.shape
    column = jnp.arange(size)
    mask = (column <= column[:, None]) & (column >= jnp.asarray(packed.text_start)[:, :, None])
    positions = jnp.broadcast_to(column, (batch, size)) if positions is None else positions
    cache = empty_cache(model, params, packed) if cache is None else cache
    options = {"taps": taps} if taps else {}
    return model.forward(params, jnp.asarray(packed.tokens), cache, positions=positions, mask=mask, **options)


def empty_cache(model: Model, params: PyTree, packed: PackedBatch) -> PyTree:
    """Return a cache without room for tokens, with the inputs of the texts if the model reads any."""
    return model.init_cache(params, model.select_inputs(packed.inputs), len(packed.tokens), 0)


def run_target(target: Target, head: Head, packed: PackedBatch, positions: Array | None = None) -> TargetActivations:
    """Run the target once over a packed batch, without gradients. positions: as in `forward_packed`."""
    return _run_target(target, packed, head.taps, positions)


def run_target_without_cache(target: Target, packed: PackedBatch, *, taps: tuple[int, ...]) -> TargetActivations:
    """Run the target once, for heads with these taps that do not read its cache."""
    return _run_target(target, packed, taps)._replace(pending=None, images=None)


def _run_target(
    target: Target, packed: PackedBatch, taps: tuple[int, ...], positions: Array | None = None
) -> TargetActivations:
    model = target.model
    cache = empty_cache(model, target.params, packed)
    output, pending = forward_packed(model, target.params, packed, taps, positions, cache)
    images = model.images and model.images(cache)
    activations = jax.lax.stop_gradient(TargetActivations(features_of(output, taps), output.hidden, pending, images))
    return checkpoint_name(activations, TARGET)


def unroll_rounds(
    head: Head,
    params: PyTree,
    target: Target,
    rounds: Rounds,
    depths: int,
    judge: Callable[[list[DepthOutput]], Any],
    chunk: int | None = None,
    *,
    over: Callable[..., Any] = sum_in_chunks,
) -> Any:
    """Return the sum over all rounds of `judge(outputs by depth)`, a tree of arrays.

    Args:
      depths: drafted tokens per round. judge: reduces the outputs of a chunk of rounds to sums.
      over: `map_in_chunks` returns results [B, R, ...] of all rounds instead of their sum.
      chunk: rounds of a row per call, a divisor of R. The backward pass recomputes their logits. None: one call covers
        all rounds, and nothing is recomputed.
    """
    tokens, text_start = jnp.asarray(rounds.packed.tokens), jnp.asarray(rounds.packed.text_start)
    batch, count = rounds.positions.shape
    begin = jnp.maximum(rounds.positions, 0)
    skipped = 0 if rounds.skipped is None else rounds.skipped
    num_read = jnp.minimum(begin + 1 + skipped, tokens.shape[1] - 1)
    features = rounds.activations.features
    if head.soft_prompts is not None:  # the head has no pass of its own, so gradients flow through the target's
        features = prompted_features(target, DraftHead(head, params), tokens, text_start)
    positions = None if rounds.token_positions is None else rounds.token_positions[:, :-1]
    pairs = FeaturePairs(features[:, :-1], tokens[:, 1:], num_read, text_start[:, :-1], positions, rounds.keys)
    context = Context(tokens, jnp.ones((batch,), jnp.int32), target=target)
    if rounds.activations.images is not None:  # each row has one text
        prompt = jnp.argmax(jnp.asarray(rounds.packed.loss_mask), 1).astype(jnp.int32)
        context = context._replace(length=jnp.maximum(prompt, 1), images=rounds.activations.images)
    # The capacity is 0: the pairs are not written to the memory, but replace it.
    memory = head.read(params, head.init_memory(params, context, batch, 0), pairs, context)
    is_per_round = jax.tree.map(lambda axis, x: x.shape[axis] == batch * count, head.axes(memory), memory)

    def judge_chunk(params, memory: PyTree, i: Array, size: int) -> Any:
        """Judge `size` of the R rounds of each row, from the i-th on."""

        def take_rounds(x: Array, axis: int, per_round: bool) -> Array:
            if not per_round or size == count:
                return x
            split = x.reshape(*x.shape[:axis], batch, count, *x.shape[axis + 1 :])
            part = jax.lax.dynamic_slice_in_dim(split, i, size, axis + 1)
            return part.reshape(*x.shape[:axis], batch * size, *x.shape[axis + 1 :])

        part = jax.tree.map(take_rounds, memory, head.axes(memory), is_per_round)
        cut = lambda x: jax.lax.dynamic_slice_in_dim(x, i, size, 1)
        chunk = rounds._replace(positions=cut(rounds.positions))
        if rounds.skipped is not None:
            chunk = chunk._replace(skipped=cut(rounds.skipped))
        return judge(_draft_rounds(head, params, part, target, chunk, depths))

    return over(judge_chunk, count, chunk, params, memory)


def _draft_rounds(
    head: Head, params: PyTree, memory: PyTree, target: Target, rounds: Rounds, depths: int
) -> list[DepthOutput]:
    """Return the outputs of the N = B R rounds at each depth.

    A round that skips k depths drafts one token, as if k tokens had been drafted before it: the head has read the text
    up to them, and the target has not.
    """
    packed, activations, positions, ids, *_ = rounds
    skipped: Array | int = 0 if rounds.skipped is None else rounds.skipped
    tokens, text_start, loss_mask = (jnp.asarray(x) for x in packed[:3])
    (batch, size), count = tokens.shape, positions.shape[1]
    flatten = lambda x: x.reshape(-1, *x.shape[2:])
    begin = jnp.maximum(positions, 0)

    def take_ahead(x: Array, ahead: Array | int) -> Array:
        """Return [N, ..], the entries of x [B, T, ..] that are `ahead` columns after each round's position."""
        column = jnp.minimum(begin + ahead, size - 1)
        return flatten(take_along(x, column.reshape(*column.shape, *[1] * (x.ndim - 2)), 1))

    length = flatten(begin + skipped) + 2
    cache = share_cache(activations.pending, FeaturePairs(activations.features, tokens, begin + 1, text_start))
    repeated = jnp.broadcast_to(tokens[:, None], (batch, count, size))
    context = Context(flatten(repeated), length, cache=cache, target=target)
    slot = jnp.arange(depths)
    by_depth = []
    scratch, output = head.start(params, memory, context, depths)
    for k in range(depths):
        if k:
            ancestors = jnp.broadcast_to((slot > 0) & (slot < k), (batch * count, 1, depths))
            depth = jnp.full((batch * count, 1), k, jnp.int32)
            drafted = DraftedNodes(take_ahead(tokens, 1 + k)[:, None], depth, jnp.int32(k), depth - 1, ancestors)
            scratch, output = head.follow(params, scratch, drafted, context)
            output = jax.tree.map(lambda x: x[:, 0], output)
        output = output if isinstance(output, DraftOutput) else DraftOutput(output)
        token, column = take_ahead(tokens, 2 + k + skipped), begin + 2 + k + skipped
        same_text = take_ahead(text_start, 2 + k + skipped) == take_ahead(text_start, 0)
        is_valid = flatten((positions >= 0) & (column < size)) & same_text
        label = token if ids is None else ids[token]
        weight = (is_valid & take_ahead(loss_mask, 2 + k + skipped)).astype(jnp.float32)
        hidden = take_ahead(activations.hidden, 1 + k + skipped)
        by_depth.append(DepthOutput(output.logits, label, hidden, weight, output.confidence, scratch))
    return by_depth
