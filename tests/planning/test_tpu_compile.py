"""The planner with the real TPU compiler, on programs small enough to compile in seconds."""

from __future__ import annotations

import dataclasses
import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tpu
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console

from specjax import compile_report, plan
from specjax.configs.qwen3_5_0_8b import qwen3_5
from specjax.costs.chips import CHIPS
from specjax.files.sizes import GIB, MIB
from specjax.models import LlamaConfig
from specjax.models.experts.routing import Routing
from specjax.models.experts.sizes import MixtureSizes
from specjax.planning import hlo, training_report
from specjax.planning.compiler import build, compile_programs, needed_bytes
from specjax.planning.inputs.topologies import parse_topology
from specjax.planning.programs import keys_of
from specjax.planning.reports.tables import show_plan, show_report, show_training
from specjax.planning.workload import make_workload
from specjax.training.objectives.recipes import recipe_of

pytestmark = pytest.mark.tpu_compile

TINY = LlamaConfig(
    vocab_size=2048, width=256, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=64, mlp_width=512,
    max_positions=4096, dtype="bfloat16", stacked=True, name="tiny",
)  # fmt: skip


@pytest.fixture(autouse=True)
def libtpu(monkeypatch, tmp_path):
    tpu.devices()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


EVERY_GENERATION = ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")


def compiled(function, *shapes, spec=None, topology="v5e:2x2"):
    """Compile for the whole of the slice (spec: of the first argument), else for one of its devices."""
    devices = tpu.devices(topology)
    mesh = Mesh(np.array(devices if spec else devices[:1]), ("model",))
    place = lambda shape, spec: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
    arguments = [place(shape, spec if spec and not i else PartitionSpec()) for i, shape in enumerate(shapes)]
    return jax.jit(function).lower(*arguments).compile()


def test_trip_counts_multiply_in_a_real_program():
    """The cycles of a scan grow with its length, by what its body costs each time."""

    def scan(length):
        def body(x, _):
            return jnp.tanh(x @ x), None

        return lambda x: jax.lax.scan(body, x, None, length=length)[0]

    cycles, flops = [], []
    for length in (4, 8, 16):
        module = hlo.parse(compiled(scan(length), (1024, 1024)).as_text())
        loops = [i for _, i, _ in hlo.walk(module) if i.opcode == "while"]
        assert [hlo.trip_count(module, module.entry, loop) for loop in loops] == [length]
        totals = hlo.totals(module)
        cycles.append(totals.cycles)
        flops.append(totals.flops)
    assert cycles[2] - cycles[1] == 2 * (cycles[1] - cycles[0]) > 0
    assert flops[0] == pytest.approx(4 * 2 * 1024**3, rel=0.01)
    assert flops[2] == pytest.approx(4 * flops[0], rel=1e-3)


def test_a_loop_that_depends_on_the_data_is_asked_for():
    def function(x, limit):
        return jax.lax.while_loop(lambda c: c[0] < limit[0, 0], lambda c: (c[0] + 1, c[1] @ c[1]), (jnp.bfloat16(0), x))

    module = hlo.parse(compiled(function, (512, 512), (1, 1)).as_text())
    (loop,) = hlo.dynamic_loops(module)
    assert (loop.depth, loop.index, loop.siblings, loop.trips) == (0, 0, 1, None)
    once, often = (hlo.totals(module, lambda loop, n=n: n).flops for n in (1, 10))
    assert often == pytest.approx(10 * once, rel=0.01)


@pytest.mark.parametrize("topology", EVERY_GENERATION)
def test_figures_of_chips_are_those_of_the_compiler(topology):
    """Memory, cores of a device, and the clock: a product that keeps the matrix units busy is near the peak."""
    chip = parse_topology(topology).chip
    assert {device.num_cores for device in tpu.devices(topology)} == {chip.cores}
    with pytest.raises(Exception, match="RESOURCE_EXHAUSTED") as refused:
        compiled(lambda x: (x * 2, x * 3), (400_000, 300_000), topology=topology)
    assert f"available HBM ({chip.hbm_bytes / GIB:.2f}G)" in str(refused.value)
    assert needed_bytes(str(refused.value)) > chip.hbm_bytes
    product = compiled(lambda a, b: a @ b, (8192, 8192), (8192, 8192), topology=topology)
    totals = hlo.totals(hlo.parse(product.as_text()))
    assert 0.6 < totals.flops / chip.peak_flops / (totals.cycles / chip.clock) < 1.0


@pytest.mark.parametrize("topology", EVERY_GENERATION)
def test_a_kernel_may_use_the_memory_of_one_core(topology):
    """A megabyte less than a chip's figure is granted, one more is refused."""
    chip = parse_topology(topology).chip

    def kernel(x, out, scratch):
        scratch[0] = x[:]
        out[:] = scratch[0]

    def holding(size):
        scratch = [pltpu.VMEM((size // 2048, 8, 128), jnp.bfloat16)]
        limit = pltpu.CompilerParams(vmem_limit_bytes=256 * MIB)
        shape = jax.ShapeDtypeStruct((8, 128), jnp.bfloat16)
        return pl.pallas_call(kernel, out_shape=shape, scratch_shapes=scratch, compiler_params=limit)

    compiled(holding(chip.vmem_bytes - MIB), (8, 128), topology=topology)
    with pytest.raises(Exception, match=rf"exceed memory \(size={chip.vmem_bytes}\)"):
        compiled(holding(chip.vmem_bytes + MIB), (8, 128), topology=topology)


def test_a_sum_over_devices_is_found():
    program = compiled(lambda w, x: x @ w, (1024, 512), (8, 1024), spec=PartitionSpec("model", None))
    (collective,) = hlo.totals(hlo.parse(program.as_text())).collectives
    assert (collective.kind, collective.count, collective.group) == ("all-reduce", 1, 4)
    assert collective.bytes == 8 * 512 * 2


def test_report_on_a_tiny_model():
    names: list[str] = []
    options = {"draft": TINY, "tree": "2x1", "context": 256, "max_new_tokens": 32}
    report = compile_report(TINY, "v5e:2x2", on_step=names.append, **options)
    assert names == ["plain step", "prefill", "two_model step", "loop"] == [
        "plain step", *(p.name for p in report.programs if p.name != "plain step")
    ]  # fmt: skip
    assert report.compiles and report.inputs["model"] == 4 and not report.fits
    for program in report.programs:
        assert 0 < program.memory.total < program.memory.available
        assert 0 < program.seconds["roofline"] < program.seconds["schedule"]
        assert program.moved_bytes > 0 and program.flops > 0
        assert sum(entry["count"] for entry in program.collectives) > 0
    step, plain = report.program("two_model step"), report.program("plain step")
    # 2 sums per layer, and some for embedding, head and choice; each pass of the draft model has its own.
    assert plain.collectives[0]["count"] >= 2 * TINY.num_layers
    assert sum(e["count"] for e in step.collectives) > 2 * sum(e["count"] for e in plain.collectives)
    # The root's pass of the draft model, one more level, and one pass of the target, of whose two widths one runs; and
    # a choice of tokens on each level.
    assert plain.kernel_calls == TINY.num_layers
    assert step.kernel_calls == 3 * TINY.num_layers + 2
    assert report.cost_ratio["schedule"] > 1
    speedups = [row.schedule for row in report.speedups]
    assert speedups == sorted(speedups)
    assert report.speedups[0].tokens == pytest.approx(1 + 0.3 + 0.21 + 0.51 * 0.3)
    json.dumps(report.to_json(), allow_nan=False)
    shown = Console(file=io.StringIO(), width=200)
    show_report(report, shown)
    assert_names_its_clocks(shown, report)
    again = compile_report(TINY, "v5e:2x2", on_step=names.append, **options)
    assert again == report and len(names) == 4  # kept on disk


def test_a_learned_head_by_its_kind_alone():
    """The head's layer reads the last round's tokens, then one more level: two passes beside the target's."""
    options = {"head": "eagle3:draft_vocab_size=512", "num_draft_tokens": 2, "context": 256, "max_new_tokens": 32}
    work = make_workload(dataclasses.replace(TINY, num_layers=6), "v5e:2x2", **options)
    (step,) = compile_programs(work, cache=False, notify=lambda name: None, only=("step",))
    assert step.compiles and step.kernel_calls == 6 + 2 + 2  # a choice of tokens on each level
    assert not [finding for finding in step.findings if finding["kind"] == "copy"]


def test_a_tree_over_recurrent_layers_copies_no_state():
    """The sum over the path is fused with the decay of the state, so the state is read and written once."""
    hybrid = qwen3_5(
        "hybrid", width=256, num_layers=4, mlp_width=512, heads=(4, 2), delta_heads=(16, 32), dtype="bfloat16"
    )
    hybrid = dataclasses.replace(hybrid, vocab_size=2048, max_positions=4096)
    work = make_workload(hybrid, "v5e:1x1", context=256, max_new_tokens=32)
    (step,) = compile_programs(work, cache=False, notify=lambda name: None, only=("step",), nodes=16)
    state = 32 * 128 * 128 * 4  # bytes of a layer
    assert step.compiles and step.memory.aliased > 3 * state
    assert not step.findings
    large = build(work, 16)[0].programs[1].large
    assert ("f32", (1, 1, 32, 128, 128)) in large  # copies of states would be findings


def test_copies_of_a_draft_model_are_listed_too():
    """A stacked draft model on a GPU would slice all its weights out of the stack in every pass of a step."""
    work = make_workload(TINY, "v5e:2x2", model=1, draft=dataclasses.replace(TINY, mlp_width=8192))
    built, _ = build(work)
    draft = keys_of(built.arguments.draft.params) - keys_of(built.arguments.job.parts.target.params)
    assert draft and all(draft <= program.large for program in built.programs)


def test_a_mixture_of_narrow_experts_copies_none():
    """Experts of 768 units over eight devices are 96 wide, and their last matrix is stored by columns."""
    mixture = MixtureSizes(16, 768, Routing(2))
    work = make_workload(
        dataclasses.replace(TINY, num_heads=8, width=1024, experts=mixture), "v5e:2x4", context=512, max_new_tokens=32
    )
    for nodes in (1, 16):
        for program in compile_programs(work, False, lambda name: None, only=("step", "prefill"), nodes=nodes):
            assert program.compiles and program.memory.temporaries < 4 * MIB, program.name
            assert not [finding for finding in program.findings if finding["kind"] == "copy"]


@pytest.mark.exhaustive
def test_a_head_in_the_target_s_own_pass():
    """The guesses cost the choice of the likeliest tokens: no product with the target's head, no layer."""
    options = {"head": "ppd", "num_draft_tokens": 16, "context": 256, "max_new_tokens": 32}
    work = make_workload(dataclasses.replace(TINY, num_layers=6), "v5e:2x2", **options)
    (step,) = compile_programs(work, cache=False, notify=lambda name: None, only=("step",))
    assert step.compiles and step.kernel_calls == 6 + 1
    assert not [finding for finding in step.findings if finding["kind"] == "copy"]


def assert_names_its_clocks(shown, plan_result):
    """Both are columns of the table, and both are said to be good for something, in JSON too."""
    text = shown.file.getvalue()
    for clock, meaning in plan_result.to_json()["clocks"].items():
        lines = text.splitlines()
        (at, *_) = [i for i, line in enumerate(lines) if clock in line.split() and ":" not in line]
        assert "ms" in f"{lines[at]} {lines[at + 1]}".split()  # the unit may stand below the name
        assert f"{clock}: {meaning}" in text


def test_smollm2_on_one_chip():
    """The weights and the cache must be read once per step, and the compiler moves little more."""
    report = compile_report("smollm2_135m", "v5e:2x2", model=1, context=1024, cache=False)
    step = report.program("step")
    weights, cache = 134_515_008 * 2, 30 * 2 * 3 * 128 * 2  # heads of 64 fill the 128 lanes
    assert step.must_bytes == pytest.approx(weights + 1024 * cache)
    assert step.must_bytes <= step.moved_bytes < 1.5 * step.must_bytes
    assert step.flops >= 2 * (134_515_008 - 30 * 1216)
    assert step.memory.aliased >= 1024 * cache  # the cache is updated in place
    assert not step.collectives
    assert not step.findings
    loop = report.program("loop")
    assert loop.assumed["rounds"] == 128 and loop.seconds["schedule"] > 128 * 0.8 * step.seconds["schedule"]


def test_a_layer_of_a_plain_step_has_few_small_operations():
    """Each takes at least 1,800 cycles. Paddings of rows, and angles that each layer computed, were a dozen more."""
    built, _ = build(make_workload(dataclasses.replace(TINY, head_dim=128, joined=("qkv",)), "v5e:1x1"), 1)
    (program,) = (program for program in built.programs if program.name == "step")
    module = hlo.parse(program.compiled().as_text())
    in_layers = [i for _, i, times in hlo.walk(module, program.trips, program.taken) if times == 3 and i.cycles]
    assert len(in_layers) <= 24, [i.name for i in in_layers]
    assert not [i.name for i in in_layers if i.opcode == "pad"]


def test_weights_are_read_in_the_tiles_they_come_in():
    """On tpu7x the compiler would tile them anew at the start of each program, which takes their memory twice."""
    config = dataclasses.replace(TINY, width=1024, head_dim=128, mlp_width=8192)
    for model in (1, 2):
        job = make_workload(config, "tpu7x:2x2x1", model=model, context=256, max_new_tokens=32)
        for program in compile_programs(job, False, lambda _: None, only=("step", "loop")):
            assert program.memory.temporaries < 0.2 * program.memory.arguments, program.name
            assert not [finding for finding in program.findings if finding["kind"] == "copy"]


def test_int8_cache_moves_and_holds_half():
    """The int8 cache moves and holds half on one chip, with a batch and a context at which it counts; its slots are not
    copied."""
    config = dataclasses.replace(TINY, head_dim=128)  # narrower heads are laid out anew where a lone step begins
    options = {"model": 1, "batch": 8, "context": 3072, "max_new_tokens": 32}
    jobs = [make_workload(config, "v5e:2x2", cache_dtype=dtype, **options) for dtype in (None, "int8")]
    (plain,), (int8,) = (compile_programs(job, False, lambda _: None, only=("step",)) for job in jobs)
    vectors = 8 * 3072 * config.num_layers * 2 * config.num_kv_heads
    saved = vectors * (2 * config.head_dim - (config.head_dim + 4))
    assert plain.must_bytes - int8.must_bytes == pytest.approx(saved)
    assert plain.memory.arguments - int8.memory.arguments >= saved
    assert int8.kernel_calls == plain.kernel_calls == config.num_layers
    assert not int8.findings


@pytest.mark.exhaustive
def test_what_does_not_fit_is_a_result_with_what_would():
    wide = LlamaConfig(
        vocab_size=2048, width=8192, num_layers=10, num_heads=64, num_kv_heads=8, head_dim=128, mlp_width=65536,
        max_positions=8192, dtype="bfloat16", stacked=True, name="wide",
    )  # fmt: skip
    report = compile_report(wide, "v5e:2x2", model=2, context=256, max_new_tokens=16)
    step = report.program("step")
    assert not step.compiles and step.needed_bytes > CHIPS["v5e"].hbm_bytes
    assert "GiB" in step.reason and step.memory is None
    assert report.fits[0].change == "--model 4" and report.fits[0].needed_bytes < CHIPS["v5e"].hbm_bytes


def test_plan_proposes_a_tree():
    result = plan(TINY, "v5e:2x2", acceptance=(0.6, 0.2), widths=(1, 4, 8), model=1, context=256, max_new_tokens=32)
    assert [report.name for report in result.widths] == ["verify 1", "verify 4", "verify 8"]
    assert [report.flops for report in result.widths] == sorted(report.flops for report in result.widths)
    assert {choice.side for choice in result.choices} == {"schedule", "roofline"}
    assert all(choice.num_nodes in (4, 8) and choice.speedup > 1 for choice in result.choices)
    json.dumps(result.to_json(), allow_nan=False)
    shown = Console(file=io.StringIO(), width=200)
    show_plan(result, shown)
    assert_names_its_clocks(shown, result)


@pytest.mark.exhaustive
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_step_of_training_a_head_compiles_over_a_mesh(optimizer):
    """The loss covers half of the rows, and the optimizer state has the sharding of its parameters."""
    report = training_report(
        TINY, "v5e:2x2", head="eagle3:draft_vocab_size=512", rows=4, length=128, data=2, model=2,
        recipe=recipe_of("eagle3", depths=2, optimizer=optimizer),
    )  # fmt: skip
    program = report.program
    assert program.compiles, program.reason
    assert report.places == 4 * 64
    assert report.rate("roofline") >= report.rate("schedule") > 0
    assert program.memory.aliased >= 0.9 * program.memory.output, "the state is changed in place"
    assert {entry["kind"] for entry in program.collectives} >= {"all-reduce"}
    shown = io.StringIO()
    show_training(report, Console(file=shown, width=160))
    assert "a step of 4 rows of 128 tokens, with a loss on 256 of them and 2 drafts each" in shown.getvalue()
    assert report.to_json()["topology"] == "v5e:2x2"
