"""Training of draft models: smaller models with the target's tokenizer that draft chains (`drafters.two_model`).

Zhou, Lyu, Rawat, Menon, Rostamizadeh, Kumar, Kagy, Agarwal: DistillSpec: Improving Speculative Decoding via Knowledge
Distillation (2023), arXiv 2310.08461. The texts y after prompts x come from the data, the target, the draft model or a
mix:

    minimise the mean over x, y and t of D(p(. | x, y_<t), q(. | x, y_<t)), D one of `losses.LOSSES`

Goel, Gagrani, Jeon, Park, Lee, Lott: Direct Alignment of Draft Model for Speculative Decoding with Chat-Fine-Tuned LLMs
(2024), arXiv 2403.00858. The loss is the same, with D = TVD++ on the target's responses.
Zafrir, Margulis, Shteyman, Guskin, Boudoukh: FastDraft: How to Train Your Draft (ACL Findings 2025), arXiv 2411.11055.
The loss is cross entropy, first on raw text and then on text that the target wrote. Neither stage runs the target.

Guarantee: training does not change p, so decoding stays as exact as before. No gradient flows through the target or
through the sampling of a text.
Deviations: the mean is over all tokens of a batch, not over the means of texts. p and q have temperature 1, as in
DistillSpec, for every serving temperature.
FastDraft starts with random parameters; starting with some of the target's layers is our own choice. If the
vocabularies differ in size, p and q are over the ids that both models have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.api import decode
from specjax.arrays.indexing import take_along
from specjax.drafters import autoregressive
from specjax.errors import UsageError
from specjax.models.vocabulary import match_vocabulary
from specjax.numerics.global_arrays import gather
from specjax.training.data.packing import PackedBatch
from specjax.training.objectives import losses
from specjax.training.objectives.chunks import sum_in_chunks
from specjax.training.objectives.head_objective import LOGIT_POSITIONS, StepReport, text_log_probabilities
from specjax.training.objectives.recipes import Recipe
from specjax.training.objectives.unroll import forward_packed, run_target_without_cache
from specjax.types import Array, Model, PyTree, Target


class PositionSums(NamedTuple):
    """Sums over positions, float32[] each."""

    loss: Array
    hits: Array  # positions whose most likely token is the text's
    weight: Array  # positions that count
    statistics: Array  # float32[S], see `losses.sum_statistics`

    def means(self) -> Array:
        """Return float32[S], the batch means that the losses read."""
        return self.statistics / jnp.maximum(self.weight, 1e-9)


class DraftPositions(NamedTuple):
    """Hidden states and labels of the first token that each of N rounds drafts."""

    hidden: Array  # [B, N, D], hidden states of the draft model at the root
    teacher: Array | None  # [B, N, E], hidden states of the target at the root
    label: Array  # int32[B, N]
    weight: Array  # float32[B, N]


def sum_losses(
    recipe: Recipe, model: Model, params: PyTree, target: Target | None, packed: PackedBatch, positions: Array,
    chunk: int | None = None, means: Array | None = None, teacher: Array | None = None,
) -> PositionSums:  # fmt: skip
    """Return the sums of the losses of a draft model over a packed batch.

    Args:
      target: None if the only loss is "ce", which needs no target.
      positions: int32[B, R], as for heads: the round from position t has root x_{t+1} and drafts x_{t+2}; -1: no round.
      chunk: positions of a row per call, a divisor of R; the logits are float32[B, chunk, V].
      means: `PositionSums.means` of the whole step; None: those of these positions.
      teacher: [B, T, E], the target's last hidden states; None: they are computed.
    """
    if recipe.reads_teacher and target is None:
        raise UsageError("only the loss ce needs no target; give a target, or the losses (('ce', 1.0),)")
    if not recipe.reads_teacher or target is None:
        teacher = None
    elif teacher is None:
        teacher = run_target_without_cache(target, packed, taps=()).hidden
    drafts = _gather_positions(model, params, target, packed, positions, teacher)
    loss_of = losses.combined(recipe.losses)

    def judge_chunk(params: PyTree, drafts: DraftPositions, i: Array, size: int) -> PositionSums:
        hidden, teacher, label, weight = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, i, size, 1).reshape(-1, *x.shape[2:]), drafts
        )
        logits = shared_logits(model, params, hidden, target)
        teacher_logits = None
        if teacher is not None and target is not None:
            teacher_logits = jax.lax.stop_gradient(
                shared_logits(target.model, target.params, teacher, Target(model, params))
            )
        hits = jnp.argmax(logits, -1) == label
        loss = loss_of(logits, teacher_logits, label, weight, means)
        statistics = losses.sum_statistics(recipe.losses, logits, teacher_logits, weight)
        return PositionSums(jnp.sum(weight * loss), jnp.sum(weight * hits), jnp.sum(weight), statistics)

    return sum_in_chunks(judge_chunk, positions.shape[1], chunk, params, drafts)


def compute_loss(total: PositionSums) -> tuple[Array, StepReport]:
    """Return (float32[], statistics) from the sums of a whole step."""
    count = jnp.maximum(total.weight, 1.0)
    loss, accuracy = total.loss / count, total.hits / count
    return loss, jax.lax.stop_gradient(StepReport(loss[None], accuracy[None], accuracy[None], total.weight))


def _gather_positions(
    model: Model, params: PyTree, target: Target | None, packed: PackedBatch, positions: Array, teacher: Array | None
) -> DraftPositions:
    tokens, text_start, loss_mask = (jnp.asarray(x) for x in packed[:3])
    size = tokens.shape[1]
    begin = jnp.maximum(positions, 0)
    along = lambda x, ahead: take_along(x, jnp.minimum(begin + ahead, size - 1).reshape(*begin.shape, *x.shape[2:]), 1)
    at_root = lambda hidden: take_along(hidden, jnp.minimum(begin + 1, size - 1)[:, :, None], 1)
    hidden = at_root(forward_packed(match_vocabulary(model, target), params, packed)[0].hidden)
    teacher = None if teacher is None else jax.lax.stop_gradient(at_root(teacher))
    label = along(tokens, 2)
    is_valid = (positions >= 0) & (begin + 2 < size) & along(loss_mask, 2) & (
        along(text_start, 2) == along(text_start, 0)
    )  # fmt: skip
    weight = (is_valid & (label < shared_vocab_size(model, target))).astype(jnp.float32)
    return DraftPositions(hidden, teacher, label, weight)


def shared_vocab_size(model: Model, other: Target | None) -> int:
    """Return the number of ids that both models have."""
    return model.vocab_size if other is None else min(model.vocab_size, other.model.vocab_size)


def shared_logits(model: Model, params: PyTree, hidden: Array, other: Target | None) -> Array:
    """Return float32[..., v], the logits of the ids that both models have."""
    if model.unembed is None:
        raise UsageError(f"{model.name} has no unembed, which training needs; give a model of specjax.models")
    return model.unembed(params, hidden)[..., : shared_vocab_size(model, other)]


def chain_acceptance(
    model: Model, params: PyTree, target: Target, packed: PackedBatch, depths: int, temperature: float = 0.0
) -> Array:
    """Return float32[B, T - 1, K], as `head_objective.chain_acceptance` for the rounds from all positions.

    An accepted draft is the text, so one pass over the text covers all positions and depths.
    """
    tokens, text_start, loss_mask = (jnp.asarray(x) for x in packed[:3])
    size = tokens.shape[1]
    hidden = forward_packed(match_vocabulary(model, target), params, packed)[0].hidden
    unembed = lambda x: shared_logits(model, params, x, target)
    if temperature:  # accepted[:, t] is the acceptance of token t as a draft
        log_p = _target_log_probabilities(target, packed, temperature)
        log_q = text_log_probabilities(unembed, hidden, tokens, temperature)
        log_q = jnp.where(tokens < shared_vocab_size(model, target), log_q, -jnp.inf)
        accepted = jnp.exp(jnp.minimum(log_q - log_p, 0.0))
    else:
        greedy = lambda x: jnp.argmax(unembed(x), -1)
        predicted = jax.lax.map(greedy, hidden[:, :-1].swapaxes(0, 1), batch_size=LOGIT_POSITIONS).swapaxes(0, 1)
        accepted = jnp.pad(predicted == tokens[:, 1:], ((0, 0), (1, 0))).astype(jnp.float32)
    column = jnp.arange(size - 1)[:, None] + 2 + jnp.arange(depths)  # [T - 1, K]
    ahead = lambda x: x[:, jnp.minimum(column, size - 1)]
    is_valid = (column < size) & ahead(loss_mask) & (ahead(text_start) == text_start[:, :-1, None])
    return jnp.where(is_valid, ahead(accepted), 0.0)


def _target_log_probabilities(target: Target, packed: PackedBatch, temperature: float) -> Array:
    """Return float32[B, T], the target's log-probability of each token of a packed batch."""
    hidden = forward_packed(target.model, target.params, packed)[0].hidden
    unembed = lambda x: shared_logits(target.model, target.params, x, None)
    return text_log_probabilities(unembed, hidden, jnp.asarray(packed.tokens), temperature)


@dataclasses.dataclass(frozen=True)
class OnPolicy:
    """DistillSpec's mix of data, for `train(..., replace_batch=)`. It needs one text per row.

    With probability `share` the draft model rewrites the responses of a batch with its current parameters. At 1
    training is entirely on-policy after the warm-up.
    """

    eos: tuple[int, ...]
    share: float = 0.5
    warmup: float = 0.1  # share of the steps, from the first on, that keep their batch, as early samples are useless
    temperature: float = 1.0
    seed: int = 0

    def __call__(self, step: int, steps: int, packed: PackedBatch, student: Target) -> PackedBatch:
        is_on_policy = np.random.default_rng([self.seed, step]).random() < self.share
        if not is_on_policy or step < self.warmup * steps:
            return packed
        key = jax.random.fold_in(jax.random.key(self.seed), step)
        return resample_responses(student, packed, key, eos=self.eos, temperature=self.temperature)


def resample_responses(
    student: Target, packed: PackedBatch, key: Array, *, eos: Sequence[int], temperature: float = 1.0
) -> PackedBatch:
    """Replace the responses of a batch by samples of the draft model.

    A sample ends at the end of its row at the latest. Its length is also limited by the positions that the draft model
    has left after the longest prompt. Rows without a response do not change.

    Raises: UsageError for rows with several texts.
    """
    tokens, text_start, loss_mask = (np.asarray(x) for x in packed[:3])
    size = tokens.shape[1]
    if ((text_start > 0) & loss_mask).any():
        raise UsageError("rows with several texts cannot be resampled; pack one per row (packs=False)")
    has_response = np.any(loss_mask, axis=1)
    prompt = np.where(has_response, np.maximum(np.argmax(loss_mask, 1), 1), 1).astype(np.int32)
    limit = int(min(size - prompt[has_response].min(initial=size - 1), student.model.max_positions - prompt.max()))
    result = gather(
        decode(
            student, autoregressive(), (tokens, prompt), key=key, max_new_tokens=limit, temperature=temperature,
            eos=list(eos), inputs=student.model.select_inputs(packed.inputs),
        )
    )  # fmt: skip
    column = np.arange(size)
    offset = column - prompt[:, None]
    samples = np.take_along_axis(np.asarray(result.tokens), np.clip(offset, 0, result.tokens.shape[1] - 1), 1)
    is_sample = (offset >= 0) & (offset < np.asarray(result.lengths)[:, None])
    end = np.minimum(prompt + np.asarray(result.lengths), size)[:, None]
    new_tokens = np.where(is_sample, samples, np.where(offset < 0, tokens, 0))
    replaced = new_tokens, np.where(column < end, 0, end), is_sample
    arrays = (
        np.where(has_response[:, None], new, old).astype(old.dtype)
        for new, old in zip(replaced, (tokens, text_start, loss_mask), strict=True)
    )
    return PackedBatch(*map(jnp.asarray, arrays))._replace(inputs=packed.inputs)
