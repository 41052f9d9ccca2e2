"""Training of a small diffusion model that drafts for an autoregressive target (`specjax.diffusion.drafters`).

Cheng et al.: DEER: Draft with Diffusion, Verify with Autoregressive Models (2025), arXiv 2512.15176.

The model starts from layers of the target, with full attention, and is trained on responses of the target. In stage I
random columns of the responses are masked (`specjax.training.objectives.masked`). Stage II masks what a drafter reads:
a text ends at a random column of its response, and R ~ Uniform{1, ..., num_tokens} masked columns follow. With
w_i = alpha^(R - i):

    minimise the sum over i = 1 ... R of -w_i log p(x_i | text, R masks) / sum of w_i

The columns after them are not read. The tokens next to the text thus have the largest weight.
Guarantee: none is needed, because the target verifies each draft.
Deviations: the authors begin with a code model of their own family. Here the start is a part of the target, so that
the vocabulary is the target's, and no separator follows the text. Stage I masks all columns of a response with one
rate, and does not cut it. R is at most the length of a draft.

    denoiser, losses = train_draft_denoiser(target, texts, mask_token=0, layers=4, num_tokens=8)
    drafter = specjax.make_drafter("deer", target, denoiser, num_tokens=8)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from specjax.arrays.modes import jit, with_standard_modes
from specjax.diffusion.forward import compute_logits
from specjax.diffusion.types import Denoiser
from specjax.errors import UsageError
from specjax.models import prune_layers
from specjax.models.variants.expanding import expand_target
from specjax.numerics.sampling import threefry
from specjax.numerics.validation import check_integer, check_range
from specjax.training.data.packing import PackedBatch, TrainingText, pack
from specjax.training.loop.trainer import train
from specjax.training.objectives.losses import cross_entropy
from specjax.training.objectives.masked import forward_views
from specjax.training.objectives.recipes import recipe_of
from specjax.types import Array, PyTree, Target

RATE = 3e-4
"""Our learning rate of a model that starts from layers of the target."""


def init_from_layers(target: Target, layers: int | None, mask_token: int) -> Denoiser:
    """Return a denoiser of full attention with some layers of the target, at equal distances from first to last.

    Quantised layers are expanded, because training changes them. The target that verifies stays quantised.

    Args: layers: their number; None: a quarter of all, rounded up.

    Raises: UsageError for a number of layers that the target does not have, or a token outside of its vocabulary.
    """
    total = target.model.capabilities.num_layers
    count = -(-total // 4) if layers is None else layers
    if not 1 <= count <= total:
        raise UsageError(f"layers must be from 1 to {total}, the layers of the target, not {count}")
    places = np.round(np.linspace(0, total - 1, count)).astype(int).tolist()
    model = expand_target(prune_layers(target, places))
    return Denoiser(model.model, model.params, mask_token)


@with_standard_modes
def train_draft_denoiser(
    target: Target,
    texts: Sequence[TrainingText],
    *,
    mask_token: int,
    layers: int | None = None,
    num_tokens: int = 32,
    epochs: int = 1,
    refine: int = 1,
    rows: int = 4,
    length: int = 512,
    seed: int = 0,
    alpha: float = 1.01,
    learning_rate: float = RATE,
) -> tuple[Denoiser, np.ndarray]:
    """Train a diffusion model that drafts `num_tokens` tokens per step.

    Args:
      texts: responses of the target. mask_token: a token that no text contains.
      layers: number of layers of the target from which it starts; None: a quarter.
      epochs, refine: passes over all texts in stage I and in stage II. rows, length: shape of a batch.
      alpha: ratio of the weights of two neighbouring columns in stage II.

    Returns: (the denoiser, float32[steps] losses of both stages).

    Raises: UsageError for settings out of range, and texts that contain the mask token or have no response.
    """
    for name, value in (("num_tokens", num_tokens), ("epochs", epochs), ("rows", rows)):
        check_integer(name, value)
    check_integer("refine", refine, 0)
    check_range("alpha", alpha, lambda x: (x > 0) & np.isfinite(x), "a number above 0")
    if any(mask_token in text.tokens for text in texts):
        raise UsageError(f"the texts contain token {mask_token}, so it cannot be the mask token; give another")
    denoiser, losses = init_from_layers(target, layers, mask_token), []
    denoiser = train(
        None, denoiser, texts, recipe=recipe_of("masked_diffusion", learning_rate=learning_rate), epochs=epochs,
        rows=rows, length=length, seed=seed, on_progress=lambda progress: losses.append(progress.loss),
    )  # fmt: skip
    batches = pack(list(texts), rows, length, one_per_row=True)
    state, key = optax.adamw(learning_rate).init(denoiser.params), threefry(seed)
    for step in range(refine * len(batches)):
        step_key = jax.random.fold_in(key, step)
        packed = batches[step % len(batches)]
        params, state, loss = _take_step(denoiser, packed, state, step_key, num_tokens, alpha, learning_rate)
        denoiser = denoiser.replace(params=params)
        losses.append(loss)
    return denoiser, np.asarray(losses, np.float32)


class SuffixMasks(NamedTuple):
    """Texts, one per row, that end in masked columns."""

    packed: PackedBatch  # the columns after the masked ones are texts of their own, which nothing else reads
    masked: Array  # bool[B, T]
    weight: Array  # float32[B, T], w_i in masked columns, else 0


def mask_suffix(packed: PackedBatch, num_tokens: int, alpha: float, key: Array) -> SuffixMasks:
    """Cut each text at a random column of its response, and mask up to `num_tokens` columns from there on."""
    text_start, loss_mask = jnp.asarray(packed.text_start), jnp.asarray(packed.loss_mask)
    batch, size = loss_mask.shape
    column, (cut_key, count_key) = jnp.arange(size), jax.random.split(key)
    scores = jnp.where(loss_mask, jax.random.uniform(cut_key, (batch, size)), -1.0)
    cut = jnp.argmax(scores, 1)[:, None]  # uniform over the columns of the response
    count = jax.random.randint(count_key, (batch, 1), 1, num_tokens + 1)
    end = jnp.minimum(cut + count, jnp.max(jnp.where(loss_mask, column + 1, 0), 1, keepdims=True))
    masked = loss_mask & (column >= cut) & (column < end)
    weight = jnp.where(masked, alpha ** (end - 1 - column).astype(jnp.float32), 0.0)
    return SuffixMasks(packed._replace(text_start=jnp.where(column < end, text_start, column)), masked, weight)


def suffix_loss(denoiser: Denoiser, view: SuffixMasks) -> Array:
    """Return float32[], the weighted mean of -log p over the masked columns."""
    hidden = forward_views(denoiser, view.packed, view.masked[:, None])[:, 0]
    loss = cross_entropy(compute_logits(denoiser, hidden), None, jnp.asarray(view.packed.tokens), view.masked)
    return jnp.sum(jnp.where(view.masked, view.weight * loss, 0.0)) / jnp.maximum(jnp.sum(view.weight), 1e-9)


@jit(static_argnums=(4, 5, 6))
def _take_step(
    denoiser: Denoiser, packed: PackedBatch, state: PyTree, key: Array, num_tokens: int, alpha: float, rate: float
) -> tuple[PyTree, PyTree, Array]:
    view = mask_suffix(packed, num_tokens, alpha, key)
    loss, gradient = jax.value_and_grad(lambda params: suffix_loss(denoiser.replace(params=params), view))(
        denoiser.params
    )
    updates, state = optax.adamw(rate).update(gradient, state, denoiser.params)
    return optax.apply_updates(denoiser.params, updates), state, loss
