"""Phases: what is seen and what is computed, counted by hand."""

import jax.numpy as jnp
import numpy as np

from specjax.diffusion.caches.phases import begin, plan
from specjax.diffusion.types import Canvas


def passes(order, outer, inner, refresh, prompt=1, new=6):
    """(columns seen, computed) of each pass behind the prompt; one of `order` is decided after each."""
    size = prompt + new + 1
    opened = np.array([[prompt <= i < prompt + new for i in range(size)]])
    behind = lambda x: [i - prompt for i in np.flatnonzero(x[0]).tolist() if i >= prompt]
    phase, columns_of_passes = None, []
    for column in order:
        tokens = jnp.array([prompt + new])
        canvas = Canvas(None, jnp.array(opened), jnp.array([prompt]), tokens, None, None, None)
        phase = begin(canvas) if phase is None else phase
        planned, phase = plan(canvas, phase, outer, inner, refresh)
        assert bool(planned.visible[0, 0]) and not bool(planned.visible[0, -1])
        columns_of_passes.append((behind(planned.visible), behind(planned.live)))
        opened[0, prompt + column] = False
    return columns_of_passes


def test_the_window_slides_and_the_buffer_stays_for_a_phase():
    """The card: W_ex = 4, W_in = 2, R = 3, from left to right."""
    near, all_six = [0, 1, 2, 3], [0, 1, 2, 3, 4, 5]
    assert passes(range(6), 4, 2, 3) == [
        (near, near), (near, [0, 1, 2]), (near, near),
        (all_six, all_six), (all_six, [3, 4, 5]), (all_six, [3, 4, 5]),
    ]  # fmt: skip


def test_a_phase_ends_early_where_an_active_column_was_not_seen():
    visible = [x for x, _ in passes([0, 1, 2, 3], 3, 2, 100)]
    assert visible == [[0, 1, 2], [0, 1, 2], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
