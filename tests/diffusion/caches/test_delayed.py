"""The delayed cache: which columns a pass computes, counted by hand."""

import jax.numpy as jnp
import numpy as np

from specjax.diffusion.caches.delayed import plan
from specjax.diffusion.types import Canvas, Window

MASK, SIZE, PROMPT = 9, 8, 2


def computed(order, refresh=None, suffix="frozen", width=3):
    """Return the (computed, kept) columns of each pass over three columns behind a prompt of two, decided one a pass in
    this order."""
    tokens = np.array([[5, 6] + [1] * (SIZE - PROMPT)])
    opened = np.array([[False] * PROMPT + [True] * 4 + [False] * 2])  # the window and one column behind it
    of, passes = np.full((1, SIZE), -1), []
    for step, column in enumerate([*order, None]):
        canvas = Canvas(tokens, jnp.array(opened), jnp.array([PROMPT]), jnp.array([6]), None, None, None)
        shown = np.where(opened, MASK, tokens)
        window = Window(jnp.array([PROMPT]), None, None, width)
        planned = plan(canvas, window, jnp.array(shown), jnp.array(of), jnp.array([step]), refresh, suffix)
        passes.append(tuple(np.flatnonzero(x[0]).tolist() for x in (planned.live, planned.stored)))
        of = np.where(planned.stored, shown, of)
        if column is not None:
            opened[0, PROMPT + column] = False
    return passes


ALL = list(range(6))


def test_what_was_decided_is_computed_once_more_and_kept():
    """The card: decided in the order 2, 0, 1. Column 2 is kept as the pass 1 computed it, from its token."""
    full_pass = (ALL, ALL)
    assert computed([2, 0, 1]) == [full_pass, full_pass, ([2, 3], [2]), ([3], [3])]
    assert computed([2, 0, 1], suffix="fresh") == [full_pass, full_pass, ([2, 3, 5], [2]), ([3, 5], [3])]
    assert computed([2, 0, 1], refresh=3) == [full_pass, full_pass, ([2, 3], [2]), full_pass]
    assert computed([2, 0, 1], refresh=1) == [full_pass] * 4
