"""Sequential temperature scaling: the temperatures that made a confidence wrong are found, and order is kept."""

import numpy as np
from training_runs import head_of, target, texts

from specjax.training.measure.confidence_scaling import GRID, calibration_error, fit_temperatures, scale_confidence

sigmoid = lambda x: 1 / (1 + np.exp(-x))


def rounds(factors, count=20_000):
    """Return logits that are wrong by these factors per slot, and what is accepted: float[P, K] each."""
    rng = np.random.default_rng(0)
    true = rng.normal(1.0, 1.5, (count, len(factors)))
    return true * np.array(factors), (rng.uniform(size=true.shape) < sigmoid(true)).astype(float), sigmoid(true)


def errors(logits, accepted, temperatures):
    prefix = np.cumprod(sigmoid(logits / temperatures), 1)
    return [calibration_error(prefix[:, k], np.cumprod(accepted, 1)[:, k]) for k in range(logits.shape[1])]


def test_a_calibrated_confidence_stays_as_it_is():
    logits, _, chances = rounds((1.0, 1.0, 1.0))
    np.testing.assert_array_equal(fit_temperatures(logits, chances, np.ones(logits.shape, bool)), 1)


def test_each_slot_gets_its_own_temperature():
    factors = (2.0, 0.5, 3.0)
    logits, accepted, _ = rounds(factors)
    temperatures = fit_temperatures(logits, accepted, np.ones(logits.shape, bool))
    assert all(np.abs(np.log(temperatures / factors)) < 0.15)
    raw, scaled = errors(logits, accepted, np.ones(3)), errors(logits, accepted, temperatures)
    assert max(raw) > 0.05 and max(scaled) < 0.015
    assert set(temperatures.tolist()) <= set(GRID.astype(np.float32).tolist())


def test_tokens_that_the_text_does_not_have_do_not_count():
    logits, accepted, _ = rounds((2.0, 2.0))
    written = np.ones(logits.shape, bool)
    written[::2, 1] = False
    spoiled = np.where(written, accepted, 0.0)
    wanted = fit_temperatures(logits, accepted, written)
    np.testing.assert_array_equal(fit_temperatures(logits, spoiled, written), wanted)
    assert (fit_temperatures(logits, spoiled, np.ones(logits.shape, bool)) != wanted).any()


def test_a_head_gets_temperatures_from_texts_and_nothing_else_changes():
    head = head_of("dspark")
    scaled = scale_confidence(target(), head, texts(), rows=2, length=64)
    temperatures = np.asarray(scaled.params["confidence"]["temperatures"])
    assert temperatures.shape == (head.head.max_depth,) and (temperatures != 1).any()
    assert scaled.params["confidence"]["proj"] is head.params["confidence"]["proj"]
