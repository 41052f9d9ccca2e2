"""Tests of what is mixed in, and of thresholds that fall."""

import hand_made
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_denoisers as toys

import specjax
from specjax import UsageError
from specjax.diffusion import Canvas, forward, methods
from specjax.diffusion.caches import WHOLE
from specjax.diffusion.methods.iter_smooth import falling, smooth
from specjax.diffusion.types import Window
from specjax.types import Mixture


def test_open_columns_of_the_window_are_mixed_with_what_was_said_before():
    denoiser, size = toys.full(), 8
    start = jnp.array([2])
    column = jnp.arange(size)
    canvas = Canvas(
        column[None] + 1, (column >= 2)[None].at[0, 3].set(False), start, start + 6, start, start * 0, start * 0
    )

    @jax.jit
    def twice():
        memory, out = smooth(0.15, 0.02, 0.3, 63), []
        state = memory.init(denoiser, canvas, 4)
        for entered in (True, False, True):
            window = Window(start, jnp.array([entered]), jnp.array([True]), 4)
            output, state = memory.look(denoiser, state, canvas, window)
            out.append(forward.window_logits(denoiser, output))
        plain, _ = WHOLE.look(denoiser, WHOLE.init(denoiser, canvas, 4), canvas, window)
        p = jax.nn.softmax(out[0], -1)  # [1, 4, 64]
        table = jnp.eye(64)[forward.input_tokens(denoiser, canvas, column[None])]
        open_columns = canvas.open[0, 2:6]
        table = table.at[:, 2:6].add(jnp.where(open_columns[:, None], 0.17 * p, 0))
        mixture = Mixture(jnp.broadcast_to(jnp.arange(64), (1, size, 64)), table)
        hidden = denoiser.model.forward(
            denoiser.params, mixture, denoiser.model.init_cache(denoiser.params, None, 1, 1), positions=column[None],
            mask=jnp.ones((1, size, size), bool),
        )[0].hidden  # fmt: skip
        return out, forward.window_logits(denoiser, plain), forward.compute_logits(denoiser, hidden[:, 2:6])

    (first, second, again), plain, by_hand = (jax.tree.map(lambda x: x[..., :63], part) for part in twice())
    np.testing.assert_allclose(first, plain, atol=1e-5)
    np.testing.assert_allclose(again, plain, atol=1e-5)
    np.testing.assert_allclose(second, by_hand, atol=1e-4)
    assert np.abs(second - plain).max() > 0.01


def test_the_threshold_falls_to_tau():
    rule, taken, state = falling(0.9, 0.02), [], jnp.array([7])
    proposal = hand_made.proposal([[0.99, 0.97, 0.93, 0.85]], [[1, 2, 3, 4]], narrow=True)
    for i in range(9):
        take, _, state = rule.select(
            (), state, proposal, hand_made.window([[True] * 4], entered=i == 0), jnp.ones(1, int)
        )
        taken.append(len(hand_made.places(take)[0]))
    assert taken == [1, 1, 2, 2, 3, 3, 3, 3, 3]  # 1, .98, .96, .94, .92, .9, .9 ...


def test_with_nothing_mixed_in_it_is_the_base():
    denoiser, settings = toys.full(), {"key": 1, "max_new_tokens": 12}
    method = methods.iter_smooth(denoiser, tau=1.1, first=0.0, step=0.0, max_share=0.0)
    ours, plain = (specjax.denoise(denoiser, m, [[1, 2, 3]], **settings) for m in (method, "llada"))
    assert ours.to_lists() == plain.to_lists() and ours.decided_at.tolist() == plain.decided_at.tolist()


def test_what_it_refuses():
    for denoiser, words in ((toys.causal(), "full attention"), (toys.frozen([0.5]), "reads mixtures")):
        with pytest.raises(UsageError, match=words):
            methods.iter_smooth(denoiser)
    with pytest.raises(UsageError, match="from 1 to 63"):
        methods.iter_smooth(toys.full(), words=64)
