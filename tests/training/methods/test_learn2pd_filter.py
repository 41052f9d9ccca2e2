"""Learn2PD's filter: what the oracle sees, and that a filter learns when it is right."""

import jax
import jax.numpy as jnp
import numpy as np
import toy_denoisers as toys

from specjax.training import TrainingText
from specjax.training.data.packing import pack
from specjax.training.methods import learn2pd_filter


def replayed(answer, sure, best=None):
    text = TrainingText((9, 9, *answer), 2)
    (packed,) = pack([text], 1, 10, one_per_row=True)
    return learn2pd_filter.replay(toys.frozen([0.9, 0.9, *sure], best), packed, 4)


def test_the_oracle_takes_what_is_right_in_one_pass_and_copies_what_never_will_be():
    sure = np.linspace(0.9, 0.2, 8)
    pairs = replayed((2, 3, 4, 5, 6, 7, 8, 9), sure)
    taken = jnp.any(pairs.counted, 2)[0]
    assert np.flatnonzero(taken).tolist() == [0, 4] and bool(jnp.all(pairs.correct[:, taken]))
    np.testing.assert_allclose(pairs.confidence[0, [0, 4]], sure.reshape(2, 4), rtol=1e-5)
    wrong = replayed((2, 0, 4, 5, 6, 7), sure)  # the second block ends behind the text
    assert np.flatnonzero(jnp.any(wrong.counted, 2)[0]).tolist() == [0, 1, 4]
    assert wrong.correct[0, :2].tolist() == [[True, False, True, True]] * 2
    assert wrong.counted[0, 4].tolist() == [True, True, False, False]


def test_a_filter_learns_where_right_ends():
    rng = np.random.default_rng(0)
    sure = rng.uniform(size=(64, 4, 4)).astype(np.float32)
    pairs = learn2pd_filter.FilterExamples(jnp.asarray(sure), jnp.asarray(sure > 0.6), jnp.ones((64, 4, 4), bool))
    fitted = learn2pd_filter.fit_filter(pairs, jax.random.key(0), steps=1500)
    opinion = np.asarray(fitted(pairs.confidence)) > 0
    assert np.mean(opinion == (sure > 0.6)) > 0.95 and float(learn2pd_filter.compute_loss(fitted, pairs)) < 0.2
