"""Trip counts that the planner assumes, on programs compiled for this machine."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
from toy import tiny_llama

from specjax import trees
from specjax.arrays import scopes
from specjax.arrays.branching import narrow_or_wide
from specjax.engine.prefill import in_chunks
from specjax.models import LlamaConfig
from specjax.models.experts.routing import Routing
from specjax.models.experts.sizes import MixtureSizes
from specjax.planning import hlo
from specjax.planning.inputs.topologies import parse_topology
from specjax.planning.programs import in_chunks_of, named, shares, trips_of_scopes, turns_of_experts
from specjax.planning.workload import Workload
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


SIZES = MixtureSizes(64, 24, Routing(2))
MIXTURE = LlamaConfig(
    vocab_size=64, width=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_width=48, experts=SIZES
)


def test_each_pass_has_the_experts_of_its_tokens():
    """A chunk of the prompt has 512 or 128 tokens per row, a verification its nodes, and a draft the nodes of a level.

    These were the experts of the step's nodes everywhere.
    """
    work = Workload(MIXTURE, parse_topology("v5e:1x1"))
    turns = turns_of_experts(work, 4)
    blocks = sum(1 - (1 - 2 / 64) ** 512 for _ in range(64))  # an expert with more than 256 of 512 rows is rare
    assert turns["experts"] == SIZES.expected_experts(4)
    assert abs(turns["experts_wide_chunk"] - blocks) < 1e-6
    assert turns["experts_chunk"] == SIZES.expected_experts(128)
    rows = turns_of_experts(dataclasses.replace(work, batch=8, data=2), 4, 2)
    assert rows["experts"] == SIZES.expected_experts(16) and rows["experts_draft"] == SIZES.expected_experts(8)
    dense = dataclasses.replace(MIXTURE, experts=None)
    assert turns_of_experts(dataclasses.replace(work, target=dense), 4) == {}
    drafts = dataclasses.replace(work, draft=dataclasses.replace(MIXTURE, experts=SIZES._replace(routing=Routing(4))))
    assert turns_of_experts(drafts, 4, 1)["experts_draft"] == 4
    assert turns_of_experts(dataclasses.replace(drafts, target=dense), 4, 1)["experts_draft"] == 4


def test_loops_over_experts_are_told_apart_by_the_pass_around_them():
    """Stacked layers are a loop between the pass and its experts."""

    def experts(x, number):
        with jax.named_scope(scopes.EXPERTS):
            return jax.lax.fori_loop(0, number, lambda i, x: jnp.tanh(x @ x), x)

    def layers(x, number):
        return jax.lax.scan(lambda x, _: (experts(x, number), None), x, None, length=2)[0]

    def program(x, number):
        x = in_chunks(lambda start, size, x: layers(x + size, number), x, number, 16, 8)
        with jax.named_scope(scopes.LEVELS):
            x = jax.lax.fori_loop(0, number, lambda i, x: layers(x, number), x)
        return layers(x, number)

    module = hlo.parse(jax.jit(program).lower(jnp.eye(32), jnp.int32(3)).compile().as_text())
    turns = {"experts": 1.5, "experts_wide_chunk": 2.5, "experts_chunk": 3.5, "experts_draft": 4.5}
    trips = named(trips_of_scopes(3), lambda loop: 99.0, turns)
    loops = [loop for loop in hlo.dynamic_loops(module) if "/experts/while" in loop.instruction.attributes]
    assert sorted(map(trips, loops)) == [1.5, 2.5, 3.5, 4.5]
    without_drafts = named(trips_of_scopes(3), lambda loop: 99.0, {"experts": 1.5})
    assert {without_drafts(loop) for loop in loops} == {1.5}


def test_a_chunk_reads_a_part_of_the_cache():
    """The estimate of the attention kernel counts all slots. Others, and steps, use it as it is."""
    used = in_chunks_of(0.25)
    call = lambda name: SimpleNamespace(attributes=f'op_name="jit(start)/{name}/while/body/{scopes.ATTENTION}/x"')
    assert used(call(scopes.WIDE_CHUNKS)) == used(call(scopes.CHUNKS)) == 0.25
    assert used(call("step")) == used(SimpleNamespace(attributes=f'op_name="{scopes.CHUNKS}/while/matmul"')) == 1.0
