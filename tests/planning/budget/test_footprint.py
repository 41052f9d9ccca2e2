"""The bytes of a footprint beside those of the compiler and of a real run."""

from __future__ import annotations

import dataclasses
import gc

import jax
import pytest
import tpu
from toy import tiny_llama

from specjax import decode
from specjax.drafters import prompt_lookup
from specjax.engine.prepare import Settings, prepare
from specjax.engine.run import start, step
from specjax.models import LlamaConfig
from specjax.planning.budget import frontier
from specjax.planning.budget.footprint import footprint_of
from specjax.planning.compiler import build
from specjax.planning.inputs.topologies import describe_devices
from specjax.planning.memory import slots_of
from specjax.planning.workload import make_workload

MIB = 1 << 20
TINY = LlamaConfig(
    vocab_size=2048, width=256, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=128, mlp_width=512,
    max_positions=4096, dtype="bfloat16", stacked=True, name="tiny",
)  # fmt: skip


def live_bytes():
    gc.collect()
    return sum(x.nbytes for x in jax.live_arrays())


@pytest.fixture
def old_objects_apart():
    """Collections look at the objects of this test only: among those of all tests the test took 62 to 180 s, not 10."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def test_a_run_of_a_plan_stays_within_it(monkeypatch, old_objects_apart):
    """The arrays that live between the steps of the largest batch that fits, with its tree and the longest prompt."""
    monkeypatch.setattr(frontier, "describe_devices", lambda topology: jax.devices()[:1])
    config = tiny_llama(vocab=2048).model.config
    batches = frontier.memory_frontier(
        config, "v5e:1x1", 4 * MIB, [64], acceptance=(0.7, 0.1), widths=(1, 2, 4, 8), dtype="float32",
        max_new_tokens=16,
    )[64]  # fmt: skip
    with_trees = [row for rows in batches for row in rows if row.name == "prompt_lookup" and row.num_nodes > 1]
    row = with_trees[-1]
    assert row.batch > 1 and row.needed_bytes <= 4 * MIB
    start_bytes = live_bytes()
    target = tiny_llama(vocab=2048)
    drafter = prompt_lookup(row.num_nodes - 1)
    prompts = [[1 + n % 50] * row.longest_context for n in range(row.batch)]
    job = prepare(target, drafter, prompts, Settings(), key=0, max_new_tokens=16)
    state, is_done, peak = start(job), False, 0
    while not is_done:
        state, _, ended = step(job.parts, state)
        is_done = bool(ended)
        peak = max(peak, live_bytes() - start_bytes)
    assert 0.3 * 4 * MIB < peak <= 4 * MIB
    expected = decode(target, None, prompts[:1], key=0, max_new_tokens=16).to_lists()
    assert state.tokens[0, len(prompts[0]) : int(state.length[0])].tolist() == expected[0]


@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    "options",
    [
        {"target": TINY, "topology": "v5e:1x1", "context": 1024, "batch": 16},
        pytest.param(
            {"target": "llama3_8b", "topology": "v5e:2x4", "context": 2048, "batch": 16}, marks=pytest.mark.slow
        ),
        pytest.param(
            {"target": "llama3_8b", "topology": "v5e:2x4", "context": 2048, "batch": 64, "head": "eagle3"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["tiny", "8b", "8b with a head"],
)
def test_a_footprint_is_that_of_the_compiler(options):
    """It is within 5 % of the larger of both programs: arguments, results and temporaries without aliases."""
    tpu.devices()
    work = make_workload(**options)
    footprint = footprint_of(work, describe_devices(work.topology))
    built, _ = build(work)
    nodes = built.arguments.job.parts.drafter.num_nodes
    totals = []
    for program in built.programs[:2]:
        memory = program.compiled().memory_analysis()
        totals.append(
            memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
            - memory.alias_size_in_bytes
        )  # fmt: skip
    assert footprint.total(slots_of(work, work.context, nodes), nodes) == pytest.approx(max(totals), rel=0.05)


def test_a_head_reads_the_states_of_some_layers():
    """Three layers of EAGLE-3 and a spare place, for a chunk of each row."""
    work = make_workload("llama3_8b", "v5e:1x1", batch=8, context=1024, head="eagle3")
    plain = dataclasses.replace(work, head=None, method="autoregressive")
    devices = jax.devices()[:1]
    with_head, without = (footprint_of(one, devices) for one in (work, plain))
    assert with_head.draft_chunk == 4 * 8 * 128 * 4096 * 2 and without.draft_chunk == 0
