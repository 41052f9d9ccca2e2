"""Trip counts that the planner assumes, on programs compiled for this machine."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax import trees
from specjax.engine.one_of import narrow_or_wide
from specjax.planning import hlo
from specjax.planning.programs import _named
from specjax.types import Context


def test_the_loop_over_draft_passes_is_told_from_those_within():
    def program(table, matrix):
        root = jnp.zeros(1, jnp.int32)

        def feed(memory, frontier):
            blocks = frontier.tokens[0, 0] % 3 + 1  # as attention over a cache whose length is data
            return memory, jax.lax.fori_loop(0, blocks, lambda i, x: x @ matrix, table[frontier.tokens])

        context = Context(root[:, None], root + 1)
        return trees.grow(trees.chain(4), feed, (), root, table[root], None, context, root + 4)[0].tree.tokens

    module = hlo.parse(jax.jit(program).lower(jnp.ones((8, 8)), jnp.eye(8)).compile().as_text())
    trips = _named(3, lambda loop: 99.0)
    assert [(loop.depth, trips(loop)) for loop in hlo.dynamic_loops(module)] == [(0, 3.0), (1, 99.0)]


def test_of_a_rounds_two_passes_the_wide_one_is_counted():
    """And neither as often as attention has blocks: that made every method with a width of 1 dear."""
    step = lambda factor: lambda x: (x @ x * factor, x[0])
    program = lambda x: narrow_or_wide(x[0, 0] > 0, step(2.0), step(3.0), x)
    module = hlo.parse(jax.jit(program).lower(jnp.eye(64)).compile().as_text())
    trips = _named(3, lambda loop: 99.0)
    assert [trips(loop) for loop in hlo.dynamic_loops(module)] == [0.0, 1.0]
