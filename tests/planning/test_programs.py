"""Trip counts that the planner assumes, on programs compiled for this machine."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from toy import tiny_llama

from specjax import trees
from specjax.arrays import scopes
from specjax.arrays.branching import narrow_or_wide
from specjax.planning import hlo
from specjax.planning.programs import named, shares, trips_of_scopes
from specjax.types import Context, Stream, Sublayers


def test_the_loop_over_draft_passes_is_told_from_those_within():
    def program(table, matrix):
        root = jnp.zeros(1, jnp.int32)

        def feed(memory, frontier):
            blocks = frontier.tokens[0, 0] % 3 + 1  # as attention over a cache whose length is data
            return memory, jax.lax.fori_loop(0, blocks, lambda i, x: x @ matrix, table[frontier.tokens])

        context = Context(root[:, None], root + 1)
        return trees.grow(trees.chain(4), feed, (), root, table[root], None, context, root + 4)[0].tree.tokens

    module = hlo.parse(jax.jit(program).lower(jnp.ones((8, 8)), jnp.eye(8)).compile().as_text())
    trips = named(trips_of_scopes(3), lambda loop: 99.0)
    # Of quick compilation gathers are loops, too, since jax 0.12.
    loops = [loop for loop in hlo.dynamic_loops(module) if '/while"' in loop.instruction.attributes]
    assert [(loop.depth, trips(loop)) for loop in loops] == [(0, 3.0), (1, 99.0)]


def test_of_a_rounds_two_passes_the_wide_one_is_counted():
    """And neither as often as attention has blocks: that made every method with a width of 1 dear."""
    step = lambda factor: lambda x: (x @ x * factor, x[0])
    program = lambda x: narrow_or_wide(x[0, 0] > 0, step(2.0), step(3.0), x)
    module = hlo.parse(jax.jit(program).lower(jnp.eye(64)).compile().as_text())
    trips = named(trips_of_scopes(3), lambda loop: 99.0)
    assert [trips(loop) for loop in hlo.dynamic_loops(module)] == [0.0, 1.0]


def test_layers_that_are_skipped_are_known_in_the_loop_over_a_stack():
    """Each is a branch of one and the same loop, whose program does not say how often it is taken."""
    target = tiny_llama(stacked=True)
    layers = jnp.ones((1, target.model.capabilities.num_layers), bool)

    def some(params, x, runs):
        cache = target.model.init_cache(params, None, 1, 8)
        zeros, mask = jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1, 1), bool)
        layers = Sublayers(runs, runs)
        return target.model.forward(params, Stream(x), cache, positions=zeros, mask=mask, layers=layers)[0].hidden

    x = target.model.embed(target.params, jnp.zeros((1, 1), jnp.int32))
    module = hlo.parse(jax.jit(some).lower(target.params, x, layers).compile().as_text())
    conditionals = [i for _, i, _ in hlo.walk(module) if i.opcode == "conditional"]
    assert conditionals and {shares({scopes.SUBLAYER: 0.25})(i) for i in conditionals} == {0.25}
