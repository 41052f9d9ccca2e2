"""The loss of a step is one function of its texts: chunks and accumulated batches do not change it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from tiers import exhaustive
from training_runs import head_of, recipe, target, texts

from specjax.training.data.packing import PackedBatch, choose_round_starts, pack
from specjax.training.loop.trainer import train
from specjax.training.objectives import losses
from specjax.training.objectives.trainables import (
    StepBatch,
    _add_noise,
    build_objective,
    compute_loss,
    text_lengths,
)
from specjax.training.objectives.unroll import TargetActivations


def batch_of(rows: int = 4) -> StepBatch:
    (packed,) = pack(texts(), rows, 32)
    return StepBatch(packed, choose_round_starts(packed, 24), jax.random.split(jax.random.key(0), rows))


@functools.partial(jax.jit, static_argnames=("recipe", "chunk", "parts", "kind"))
def loss_and_gradient(kind, recipe, params, target, batch, chunk=None, parts=1):
    trainable = head_of(kind) if kind != "model" else toy.tiny_llama(seed=1, layers=1)
    objective = build_objective(trainable)
    loss = lambda params: compute_loss(objective, recipe, params, target, batch, chunk, parts)
    return jax.value_and_grad(loss, has_aux=True)(params)


@pytest.mark.parametrize(
    ("kind", "losses", "noise"),
    [
        ("medusa", (("tvd++", 1.0), ("lk_hybrid", 0.5)), 0.0),
        exhaustive("eagle3", (("lk_hybrid", 1.0),), 0.1),
        exhaustive("model", (("tvd++", 1.0),), 0.0),
    ],
)
def test_chunks_and_accumulated_batches_change_nothing(kind, losses, noise):
    """The batch statistics of TVD++ and of the hybrid are those of the whole step."""
    batch, rule = batch_of(), recipe("medusa" if kind == "model" else kind, losses=losses, noise=noise, depths=2)
    params = (toy.tiny_llama(seed=1, layers=1) if kind == "model" else head_of(kind)).params
    (value, report), gradient = loss_and_gradient(kind, rule, params, target(), batch)
    for chunk, parts in ((8, 1), (None, 2), (8, 4)):
        (other, other_report), other_gradient = loss_and_gradient(kind, rule, params, target(), batch, chunk, parts)
        assert float(other) == pytest.approx(float(value), rel=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6), gradient, other_gradient)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), report, other_report)


def test_statistics_of_a_part_alone_would_differ():
    """The test above can fail: the two halves of a batch have other means."""
    rng = np.random.default_rng(0)
    draft, teacher = (jnp.asarray(rng.normal(size=(8, 6)) * scale, jnp.float32) for scale in (1.0, 3.0))
    label, weight = jnp.zeros(8, jnp.int32), jnp.ones(8)
    loss = losses.LOSSES["lk_hybrid"]
    per_row = loss(draft, teacher, label, weight)
    half = jnp.concatenate([loss(draft[i], teacher[i], label[i], weight[i]) for i in (slice(4), slice(4, 8))])
    assert np.abs(np.asarray(per_row - half)).max() > 1e-3
    mean = jnp.mean(losses.acceptance_rate(draft, teacher))
    np.testing.assert_allclose(loss(draft[:4], teacher[:4], label[:4], weight[:4], mean), per_row[:4], rtol=1e-6)


def test_noise_is_scaled_by_the_length_of_each_text():
    """EAGLE's uniform noise of half width a 512 / T, with T the length of the text and not of the row."""
    text_start = np.zeros((2, 64), np.int32)
    text_start[0, 16:], text_start[0, 48:], text_start[1, 64:] = 16, 48, 64
    packed = PackedBatch(np.zeros((2, 64), np.int32), text_start, np.ones((2, 64), bool))
    np.testing.assert_array_equal(text_lengths(packed)[0], [16] * 16 + [32] * 32 + [16] * 16)
    features = jnp.zeros((2, 64, 2000))
    noisy = _add_noise(TargetActivations(features, features, None), packed, 0.1, jax.random.split(jax.random.key(0), 2))
    reach = np.abs(np.asarray(noisy.features)).max(-1)
    np.testing.assert_allclose(reach, 0.1 * 512 / np.asarray(text_lengths(packed)), rtol=0.01)


def test_a_run_that_accumulates_is_that_of_as_many_rows():
    run = lambda **shape: train(
        target(), head_of("medusa"), texts(), recipe=recipe("medusa"), length=32, epochs=3, **shape
    )
    alone, together = run(rows=4), run(rows=2, accumulate=2)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), alone.params, together.params)
