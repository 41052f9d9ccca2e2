"""SpecDec++'s head: its loss, the best that it can say, what it is shown, and that it learns beside a frozen draft."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from toy_models import alike

from specjax import Target, UsageError
from specjax.models.heads.acceptance import AcceptanceHead, AcceptanceLayer, init_acceptance
from specjax.training.data.packing import PackedBatch, TrainingText, pack
from specjax.training.loop.trainer import train
from specjax.training.objectives import losses
from specjax.training.objectives.recipes import recipe_of
from specjax.training.objectives.stopping import (
    StoppingExamples,
    calibrate,
    compute_loss,
    init_stopping,
    make_examples,
    sample_proposals,
    sum_losses,
)


@functools.cache
def target():
    return toy.tiny_llama(layers=2)


@functools.cache
def draft():
    return alike(target(), 0.3)


@functools.cache
def texts() -> list[TrainingText]:
    rng = np.random.default_rng(0)
    return [TrainingText(tuple(rng.integers(0, 64, 30).tolist()), 4) for _ in range(8)]


def constant(accepted, weight=None) -> StoppingExamples:
    """Features that say nothing."""
    accepted = jnp.asarray(accepted)[None]
    weight = jnp.ones_like(accepted) if weight is None else jnp.asarray(weight)[None]
    return StoppingExamples(jnp.zeros((*accepted.shape, 4)), accepted, weight)


def says(log_odds: float) -> AcceptanceHead:
    return AcceptanceHead((), AcceptanceLayer(jnp.zeros((2, 4)), jnp.array([0.0, log_odds])))


def test_an_untrained_head_has_even_odds():
    assert float(init_acceptance(4).acceptance(jnp.ones(4))) == 0.5


def test_hard_labels_of_weight_one_are_cross_entropy():
    """T9 (c)."""
    value, report = compute_loss(sum_losses(says(np.log(4.0)), constant([1.0, 0.0, 1.0]), rejection_weight=1.0))
    assert float(value) == pytest.approx(-(2 * np.log(0.8) + np.log(0.2)) / 3, rel=1e-5)
    assert float(report.accuracy[0]) == pytest.approx(2 / 3) and report.tokens == 3


def test_the_best_constant_is_that_of_the_closed_form_and_calibration_undoes_the_weight():
    """T9 (e): mean acceptance .8 and w = 6: 0.8 / (0.8 + 6 * 0.2) = .4."""
    examples = constant([1.0, 0.9, 0.5, 0.8, 0.8])
    head_of = lambda odds: AcceptanceHead((), AcceptanceLayer(jnp.zeros((2, 4)), odds))
    slope = jax.grad(lambda odds: compute_loss(sum_losses(head_of(odds), examples))[0])
    odds = lambda chance: jnp.log(jnp.array([1 - chance, chance]))
    np.testing.assert_allclose(slope(odds(0.4)), 0, atol=1e-6)
    assert abs(slope(odds(0.45))[1]) > 1e-3
    best = head_of(odds(0.4))
    assert float(calibrate(best).acceptance(jnp.zeros(4))) == pytest.approx(0.8, rel=1e-5)


def found_of(tokens, threshold) -> StoppingExamples:
    return examples_of(draft().params, target().params, tokens, threshold)


@jax.jit
def examples_of(draft_params, target_params, tokens, threshold) -> StoppingExamples:
    packed = pack(texts()[:2], 2, 30)[0]._replace(tokens=tokens)
    teacher = Target(target().model, target_params)
    return make_examples(draft().model, draft_params, teacher, packed, jax.random.key(1), threshold)


def test_what_was_not_proposed_has_no_gradient():
    """T9 (f)."""
    examples = found_of(pack(texts()[:2], 2, 30)[0].tokens, 0.5)
    weight = jnp.ones((2, 32)) * jnp.array([[0.1], [0.3]])
    head = AcceptanceHead((), AcceptanceLayer(weight, jnp.zeros(2)))
    slope = jax.jit(jax.grad(lambda features: compute_loss(sum_losses(head, examples._replace(features=features)))[0]))
    moved = np.abs(np.asarray(slope(examples.features))).sum(-1) > 0
    np.testing.assert_array_equal(moved, np.asarray(examples.weight) > 0)
    inside = np.arange(30) >= 4
    assert not examples.weight[:, ~inside].any() and 0.2 < float(examples.weight[:, inside].mean()) < 0.8


def test_proposals_are_drawn_from_the_draft_and_accepted_by_the_ratio():
    """The proposal behind token x of a table follows q's row of x, and its acceptance is p / q of what was drawn
    there."""
    p, q = (toy.markov(rows) for rows in (toy.TARGET_ROWS, toy.DRAFT_ROWS))
    vocab = len(toy.TARGET_ROWS)
    tokens = np.random.default_rng(0).integers(0, vocab, (40, 100)).astype(np.int32)
    packed = PackedBatch(tokens, np.zeros_like(tokens), np.ones(tokens.shape, bool))
    run = jax.jit(lambda key: sample_proposals(q.model, q.params, p, packed, key))
    token, accepted = map(np.asarray, run(jax.random.key(0)))
    previous, drawn = tokens[:, :-1].ravel(), token[:, 1:].ravel()
    expected = np.minimum(toy.TARGET_ROWS[previous, drawn] / toy.DRAFT_ROWS[previous, drawn], 1)
    np.testing.assert_allclose(accepted[:, 1:].ravel(), expected, rtol=1e-4)
    for x in range(vocab):
        counts = np.bincount(drawn[previous == x], minlength=vocab)
        assert toy.chi_square(counts, toy.DRAFT_ROWS[x].astype(np.float64)) > 1e-3
    np.testing.assert_array_equal(token[:, 0], tokens[:, 0])


def test_a_head_reads_its_own_token_and_none_behind_it():
    tokens = np.array(pack(texts()[:2], 2, 30)[0].tokens)
    features = found_of(tokens, 1.1).features
    other = tokens.copy()  # the arrays of a program under way may be those that it was given
    other[:, 10] = (other[:, 10] + 1) % 64
    changed = np.abs(np.asarray(found_of(other, 1.1).features - features)).max(-1) > 1e-6
    assert not changed[:, :10].any() and changed[:, 10:].all()


def test_it_learns_what_the_draft_proposes_too_often_and_the_draft_stays():
    """R7, R8: tokens 0 are accepted at .25, others nearly always; the head tells them by the features behind them."""
    rng = np.random.default_rng(0)
    rows = np.tile([0.5, *[0.5 / 7] * 7], (8, 1)) * rng.uniform(0.8, 1.2, (8, 8))
    rows = (rows / rows.sum(1, keepdims=True)).astype(np.float32)
    draft_model, truth = toy.markov(rows), toy.markov(np.full((8, 8), 1 / 8, np.float32))
    some = [TrainingText(tuple(rng.integers(0, 8, 40).tolist()), 4) for _ in range(16)]
    start, recipe = init_stopping(draft_model, 1), recipe_of("specdec++", learning_rate=3e-2)
    fitted = train(truth, start, some[:8], recipe=recipe, rows=8, length=40, epochs=40)
    np.testing.assert_array_equal(fitted.params["draft"], draft_model.params)
    examples = make_examples(draft_model.model, draft_model.params, truth, pack(some[8:], 8, 40)[0], jax.random.key(2))
    proposed = np.asarray(examples.weight) > 0
    predicted, accepted = (
        np.asarray(calibrate(fitted.head).acceptance(examples.features))[proposed],
        examples.accepted[proposed],
    )
    assert np.corrcoef(predicted, accepted)[0, 1] > 0.9
    assert float(np.mean(predicted)) == pytest.approx(float(np.mean(accepted)), abs=0.1)
    with pytest.raises(UsageError, match="leave held_out empty"):
        train(truth, start, some, held_out=some, rows=16, length=40)


def test_the_weighted_loss_is_that_of_the_card():
    loss, share = losses.acceptance_weighted(jnp.array([0.3]), jnp.array([0.8]))
    assert float(loss[0]) == pytest.approx(-6 * 0.2 * np.log(0.7) - 0.8 * np.log(0.3), rel=1e-5)
    assert float(share[0]) == pytest.approx(2.0)
