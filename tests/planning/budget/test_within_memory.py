"""Plans within a memory budget, with programs that are not compiled."""

from __future__ import annotations

import dataclasses
import io
import json
import re

import jax
import pytest
from rich.console import Console

from specjax import UsageError, planning
from specjax.cli import main
from specjax.cli.options.planning import parse_bytes
from specjax.drafters.making import make_drafter
from specjax.engine.prepare import Settings, prepare
from specjax.engine.run import start
from specjax.models import LlamaConfig, init_params, make_model
from specjax.planning import plan_within_memory
from specjax.planning.budget import frontier, within_memory
from specjax.planning.budget.footprint import Footprint, footprint_of
from specjax.planning.budget.table import show_memory_plan
from specjax.planning.memory import Memory, slots_of
from specjax.planning.records import MemoryUse, ProgramReport
from specjax.planning.workload import make_workload
from specjax.types import Target

MIB = 1 << 20
CONFIG = LlamaConfig(
    name="tiny", vocab_size=2048, width=64, mlp_width=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    max_positions=4096, dtype="float32",
)  # fmt: skip
ALWAYS = {"acceptance": (0.7, 0.1), "widths": (1, 2, 4, 8)}


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    """The workloads that a plan compiles, with the nodes of their step. Programs need `sizes[batch]` bytes, or 1."""
    works, sizes = [], {}

    def compile_programs(work, cache, notify, *, only, nodes=None):
        works.append((work, nodes))
        use = MemoryUse(sizes.get(work.batch, 1), 0, 0, 0, work.topology.chip.hbm_bytes)
        return [ProgramReport(name, True, memory=use) for name in only]

    monkeypatch.setattr(within_memory, "compile_programs", compile_programs)
    monkeypatch.setattr(frontier, "describe_devices", lambda topology: jax.devices()[:1])
    return works, sizes


def workload(**options):
    return make_workload(CONFIG, "v5e:1x1", **{"dtype": "float32", "context": 512} | options)


def plan(memory, **options):
    return plan_within_memory(CONFIG, "v5e:1x1", memory, **{"dtype": "float32", "context": 512} | ALWAYS | options)


@pytest.mark.parametrize("method", ["prompt_lookup", "token_recycling"])
def test_the_arrays_of_a_run_have_the_bytes_of_the_footprint(method):
    """Weights and the state between two steps, of real arrays."""
    work = workload(batch=3, context=200, max_new_tokens=60, method=method)
    footprint = footprint_of(work, jax.devices()[:1])
    target = Target(make_model(CONFIG), init_params(CONFIG, jax.random.key(0)))
    drafter = make_drafter(method, target)
    job = prepare(target, drafter, [[1] * 200] * 3, Settings(), key=0, max_new_tokens=60)
    state = start(job)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves((target.params, drafter.params, state)))
    terms = footprint.terms(state.tokens.shape[1], 1)
    assert sum(terms.values()) - terms["the arrays of a pass"] == pytest.approx(size, rel=0.01)
    assert terms["the drafter's state"] > 0 and terms["the weights"] > 0


def test_the_fastest_draft_that_fits_is_compiled(compiled):
    works, _ = compiled
    result = plan(64 * MIB)
    assert result.best is result.tried[0] and {work.batch for work, _ in works} == {result.best.draft.batch}
    assert result.best.draft.tokens_per_second == max(row.tokens_per_second for row in result.rows)
    batches = sorted({row.batch for row in result.rows})
    assert batches == [1 << i for i in range(len(batches))] and len(batches) > 2
    assert all(row.needed_bytes <= result.usable_bytes for row in result.rows if not row.reason)
    json.dumps(result.to_json(), allow_nan=False)


def test_a_draft_that_the_compiler_finds_too_large_gives_way_to_a_smaller_batch(compiled):
    _, sizes = compiled
    largest = plan(64 * MIB).best.draft.batch
    sizes[largest] = 65 * MIB
    result = plan(64 * MIB)
    assert result.tried[0].needed_bytes == 65 * MIB and result.best is result.tried[1]
    assert result.best.draft.batch == largest // 2
    sizes.update({1 << i: 65 * MIB for i in range(12)})
    nothing = plan(64 * MIB)
    assert nothing.best is None
    out = io.StringIO()
    show_memory_plan(nothing, Console(file=out, width=120))
    assert "too large" in out.getvalue() and "best:" not in out.getvalue()


def test_the_smallest_tree_keeps_the_speed(monkeypatch):
    """It is within 4 % of the fastest tree, and no fewer nodes of the list are."""
    free = lambda result: {row.name: row for row in result.rows if row.batch == 1}["token_recycling"]
    row = free(plan(64 * MIB))
    monkeypatch.setattr(frontier, "LOSS", 0.0)
    fastest = free(plan(64 * MIB))
    assert row.num_nodes <= row.fastest_nodes == fastest.num_nodes
    assert row.tokens_per_second >= 0.96 * fastest.tokens_per_second
    monkeypatch.setattr(frontier, "LOSS", 0.9)
    assert free(plan(64 * MIB)).num_nodes == 1 or free(plan(64 * MIB)).num_nodes <= row.num_nodes


def test_the_longest_prompt_fits_and_a_longer_one_does_not():
    result = plan(4 * MIB)
    row = next(row for row in result.rows if row.name == "autoregressive" and row.batch == 2)
    work = workload(batch=2)
    footprint = footprint_of(work, jax.devices()[:1])
    total = lambda context: footprint.total(slots_of(work, context, 1), 1)
    assert 512 < row.longest_context < CONFIG.max_positions - work.max_new_tokens
    assert total(row.longest_context) <= result.usable_bytes < total(row.longest_context + 1)


def test_a_draft_model_needs_memory_for_its_weights():
    """It fits nowhere in a budget in which plain decoding just fits, and the reason names its largest term."""
    draft = dataclasses.replace(CONFIG, name="draft", num_layers=4, mlp_width=4096)
    result = plan(8 * MIB, draft=draft)
    rows = [row for row in result.rows if row.name == "draft"]
    assert rows and all(row.reason for row in rows)
    assert "the largest term is the draft's weights" in rows[0].reason
    larger = plan(64 * MIB, draft=draft)
    first = next(row for row in larger.rows if row.name == "draft")
    assert not first.reason
    assert first.needed_bytes > larger.rows[0].needed_bytes


@pytest.mark.parametrize("drafts", [{}, {"method": "aded"}])
def test_a_draft_without_an_option_for_its_size_is_compiled_by_its_nodes(compiled, drafts):
    """Neither an acceptance alone nor `aded` has an option for the size of its trees."""
    works, _ = compiled
    result = plan(64 * MIB, acceptance=(0.9, 0.05), **drafts)
    best = result.best.draft
    assert best.name == drafts.get("method", "given acceptance") and best.num_nodes > 1
    assert [nodes for _, nodes in works] == [None, best.num_nodes]
    assert drafts == {} or best.flags == "--method aded"


def test_the_longest_prompt_is_one_that_the_draft_model_reads():
    draft = dataclasses.replace(CONFIG, name="draft", max_positions=1024)
    row = next(row for row in plan(64 * MIB, draft=draft).rows if row.name == "draft")
    assert row.longest_context == 1024 - workload().max_new_tokens


def test_a_mixture_reads_the_experts_that_its_tokens_choose():
    """Qwen3-30B-A3B on an H200: 3.3 billion active parameters, then nearly all 30.5 billion with 64 rows."""
    nothing = Footprint(Memory(0, 0, 0.0, 0.0, 0, 0.0, 0.0), 0, 0.0, 0.0)
    work = make_workload("qwen3_30b_a3b", "h200:1")
    seconds = [
        frontier._seconds(dataclasses.replace(work, batch=batch), nothing, 1) * work.topology.chip.hbm_bandwidth
        for batch in (1, 64)
    ]
    assert seconds[0] == pytest.approx(2 * 3.3e9, rel=0.1)
    assert 2 * 25e9 < seconds[1] < 2 * 40e9


def test_a_batch_above_the_limit_is_refused():
    with pytest.raises(UsageError, match="--batch-size must be at most 4096"):
        plan(64 * MIB, batch=8192)


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        (1 * MIB, "the largest term is the weights with"),
        (20 << 30, "at most the 15.75 GiB of a v5e device"),
        (0, "must be above 0"),
    ],
)
def test_refused_budgets(memory, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        plan(memory)


def test_a_refusal_names_the_cache_of_a_long_prompt():
    with pytest.raises(UsageError, match="the largest term is the cache with"):
        plan(6 * MIB, context=3900, batch=8)


@pytest.mark.parametrize(
    ("text", "size"), [("16GiB", 16 << 30), ("1.5 GB", 1_500_000_000), ("800mib", 800 * MIB), ("2 KB", 2000)]
)
def test_sizes(text, size):
    assert parse_bytes(text, "--memory") == size


@pytest.mark.parametrize("text", ["", "12", "GiB", "-1GiB", "1e3MiB", "12 apples"])
def test_texts_that_are_no_sizes(text):
    with pytest.raises(UsageError, match="--memory must be a number with a unit"):
        parse_bytes(text, "--memory")


def test_command_line(capsys):
    """Only shapes of SmolLM2 are read."""
    words = ["plan", "--target", "smollm2_135m", "--topology", "v5e:1x1", "--memory", "1GiB"]
    assert exit_code([*words, "--context", "256", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["budget_bytes"] == 1 << 30 and result["fits"] and result["tried"][0]["draft"]["batch"] > 1
    assert exit_code([*words, "--fits"]) == 2
    assert "leave all but one out" in capsys.readouterr().err
    assert planning.MemoryPlan is within_memory.MemoryPlan


def exit_code(words):
    with pytest.raises(SystemExit) as ended:
        main(words)
    return ended.value.code
