"""Reading compiled HLO, on short texts in the compiler's own form."""

from __future__ import annotations

import pytest

from specjax.costs.roofline import Kernel
from specjax.planning import hlo

CYCLES = 'backend_config={"window_config":{"estimated_cycles":"%d"}}'

LOOP = f"""HloModule jit_step, is_scheduled=true, entry_computation_layout={{(f32[8]{{0}})->f32[8]{{0}}}}

%fused (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0:T(256)}} parameter(0)
  ROOT %add.9 = f32[8]{{0:T(256)}} add(%p, %p)
}}

%body (state: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %one = s32[]{{:T(128)}} constant(1)
  %state = (s32[]{{:T(128)}}, f32[8]{{0:T(256)}}) parameter(0)
  %i = s32[]{{:T(128)}} get-tuple-element(%state), index=0
  %i.copy = s32[]{{:T(128)}} copy(%i)
  %x = f32[8]{{0:T(256)}} get-tuple-element(%state), index=1
  %fusion.1 = f32[8]{{0:T(256)}} fusion(%x), kind=kLoop, calls=%fused, {CYCLES % 100}
  %next = s32[]{{:T(128)}} add(%i.copy, %one)
  ROOT %out = (s32[]{{:T(128)}}, /*index=1*/f32[8]{{0:T(256)}}) tuple(%next, %fusion.1)
}}

%condition (state.1: (s32[], f32[8])) -> pred[] {{
  %limit = s32[]{{:T(128)}} constant(30)
  %state.1 = (s32[]{{:T(128)}}, f32[8]{{0:T(256)}}) parameter(0)
  %i.1 = s32[]{{:T(128)}} get-tuple-element(%state.1), index=0
  ROOT %lt = pred[]{{:T(512)}} compare(%i.1, %limit), direction=LT
}}

ENTRY %main (a: f32[8]) -> f32[8] {{
  %a = f32[8]{{0:T(256)}} parameter(0)
  %zero = s32[]{{:T(128)}} constant(0)
  %start = s32[]{{:T(128)}} copy(%zero)
  %fusion.2 = f32[8]{{0:T(256)}} fusion(%a), kind=kLoop, calls=%fused, {CYCLES % 7}
  %tuple.1 = (s32[]{{:T(128)}}, f32[8]{{0:T(256)}}) tuple(%start, %fusion.2)
  %while.1 = (s32[]{{:T(128)}}, f32[8]{{0:T(256)}}) while(%tuple.1), condition=%condition, body=%body
  ROOT %result = f32[8]{{0:T(256)}} get-tuple-element(%while.1), index=1
}}
"""


def one(lines: str, *, computations: str = "") -> hlo.Module:
    """A module whose entry has these lines, after other computations."""
    return hlo.parse(f"HloModule m\n\n{computations}\n\nENTRY %main () -> f32[] {{\n{lines}\n}}\n")


def test_cycles_of_a_loop_count_by_its_trips():
    totals = hlo.totals(hlo.parse(LOOP))
    assert totals.cycles == 7 + 30 * 100
    assert totals.flops == 31 * 8
    counter = (4 + 4) + (4 + 4 + 4) + (4 + 4 + 1)  # copied, raised, compared
    assert totals.hbm_bytes == 31 * 2 * 8 * 4 + 30 * counter + 8


@pytest.mark.parametrize(
    ("old", "new", "trips"),
    [
        ("direction=LT", "direction=LE", 31),
        ("constant(1)", "constant(4)", 8),
        ("copy(%zero)", "copy(%missing)", None),
        ("constant(0)", "constant(10)", 20),
        ("add(%i.copy, %one)", "multiply(%i.copy, %one)", None),
        ("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"5"}}', 5),
        ("compare(%i.1, %limit), direction=LT", "compare(%limit, %i.1), direction=GT", 30),
        ("direction=LT", "direction=NE", None),
    ],
)
def test_trip_counts(old, new, trips):
    assert old in LOOP
    module = hlo.parse(LOOP.replace(old, new))
    assert hlo.trip_count(module, "main", module.computations["main"]["while.1"]) == trips
    assert len(hlo.dynamic_loops(module)) == (trips is None)
    expected = trips if trips is not None else 3
    assert hlo.totals(module, lambda loop: 3).cycles == 7 + expected * 100


def test_of_a_conditional_the_dearest_branch_counts():
    branch = (
        "%{0} (p.{0}: f32[8]) -> f32[8] {{\n  %p.{0} = f32[8]{{0}} parameter(0)\n"
        "  ROOT %r.{0} = f32[8]{{0}} negate(%p.{0}), {1}\n}}\n"
    )
    module = one(
        "  %which = s32[] parameter(0)\n  %x = f32[8]{0} parameter(1)\n"
        "  ROOT %c = f32[8]{0} conditional(%which, %x, %x), branch_computations={%narrow, %wide}",
        computations=branch.format("narrow", CYCLES % 5) + "\n" + branch.format("wide", CYCLES % 50),
    )
    assert hlo.totals(module).cycles == 50
    assert hlo.totals(module, taken=lambda conditional: 0.1).cycles == pytest.approx(0.1 * 50 + 0.9 * 5)
    assert hlo.totals(module, taken=lambda conditional: 0.0).cycles == 5


def test_of_a_conditional_the_branch_counts_in_which_its_scope_is_named():
    """Though the other one is dearer: that of a few columns may be, which have to be padded."""
    name = 'metadata={{op_name="jit(step)/renewal/cond{}"}}'.format
    branch = (
        "%{0} (p.{0}: f32[8]) -> f32[8] {{\n  %p.{0} = f32[8]{{0}} parameter(0)\n"
        "  ROOT %r.{0} = f32[8]{{0}} negate(%p.{0}), {1}, {2}\n}}\n"
    )
    branches = ("few", CYCLES % 50, name("/branch_0_fun/neg")), ("many", CYCLES % 5, name("/branch_1_fun/renewal/neg"))
    module = one(
        "  %which = s32[] parameter(0)\n  %x = f32[8]{0} parameter(1)\n"
        f"  ROOT %c = f32[8]{{0}} conditional(%which, %x, %x), branch_computations={{%few, %many}}, {name('')}",
        computations="\n".join(branch.format(*words) for words in branches),
    )
    assert [hlo.totals(module, taken=lambda _, share=share: share).cycles for share in (1.0, 0.0)] == [5, 50]


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", 4),
        ("[2,4]<=[8]", 4),
        ("mesh['axis_0'=1,'axis_1'=8] {'axis_1'}", 8),
        ("mesh['x'=2,'y'=4] {'x','y'}", 8),
        ("mesh['x'=8] {'x':(2)4}", 4),
    ],
)
def test_collectives_and_their_groups(groups, size):
    module = one(
        "  %x = bf16[2,4096]{1,0} parameter(0)\n"
        f"  ROOT %r = bf16[2,4096]{{1,0}} all-reduce(%x), channel_id=1, replica_groups={groups}, to_apply=%add"
    )
    (collective,) = hlo.totals(module).collectives
    assert (collective.kind, collective.count, collective.group, collective.bytes) == (
        "all-reduce",
        1,
        size,
        2 * 4096 * 2,
    )
    assert collective.wire_bytes == 2 * (size - 1) / size * 2 * 4096 * 2


def test_an_asynchronous_gather_counts_once():
    module = one(
        "  %x = f32[128]{0} parameter(0)\n"
        "  %s = (f32[128]{0}, f32[512]{0}) all-gather-start(%x), replica_groups={{0,1,2,3}}, dimensions={0}\n"
        "  ROOT %d = f32[512]{0} all-gather-done(%s)"
    )
    (collective,) = hlo.totals(module).collectives
    assert (collective.kind, collective.count, collective.bytes, collective.wire_bytes) == (
        "all-gather",
        1,
        512 * 4,
        3 * 128 * 4,
    )


SLICED = """%sliced (p0: bf16[30,8,128], p1: s32[]) -> bf16[8,128] {
  %p0 = bf16[30,8,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %p1 = s32[]{:T(128)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  %retiled = bf16[30,8,128]{2,1,0:T(8,128)(2,1)} copy(%p0)
  %slice = bf16[1,8,128]{2,1,0:T(8,128)(2,1)} dynamic-slice(%retiled, %p1, %zero, %zero), dynamic_slice_sizes={1,8,128}
  ROOT %b = bf16[8,128]{1,0:T(8,128)(2,1)} bitcast(%slice)
}
"""


def test_a_fusion_reads_only_the_layer_that_it_slices_out_of_the_stack():
    for space, written in (("", 8 * 128 * 2), ("S(1)", 0)):  # on-chip memory is free
        module = one(
            "  %w = bf16[30,8,128]{2,1,0:T(8,128)(2,1)} parameter(0)\n  %i = s32[]{:T(128)S(6)S(1)} parameter(1)\n"
            f"  ROOT %f = bf16[8,128]{{1,0:T(8,128)(2,1){space}}} fusion(%w, %i), kind=kLoop, calls=%sliced",
            computations=SLICED,
        )
        assert hlo.totals(module).hbm_bytes == 8 * 128 * 2 + written


def test_a_slice_that_is_fetched_ahead_moves_itself_and_not_what_it_is_cut_from():
    for space, written in (("", 8 * 128 * 2), ("S(1)", 0)):
        module = one(
            "  %w = bf16[30,8,128]{2,1,0:T(8,128)(2,1)} parameter(0)\n"
            "  ROOT %s = ((bf16[30,8,128]{2,1,0:T(8,128)(2,1)}), "
            f"bf16[1,8,128]{{2,1,0:T(8,128)(2,1){space}}}, s32[]{{:S(2)}}) slice-start(%w), "
            "slice={[3:4], [0:8], [0:128]}"
        )
        assert hlo.totals(module).hbm_bytes == 8 * 128 * 2 + written


def test_a_fusion_that_converts_all_of_an_operand_reads_all_of_it():
    conversion = """%whole (p0: bf16[30,128]) -> f32[30,128] {
  %p0 = bf16[30,128]{1,0} parameter(0)
  ROOT %c = f32[30,128]{1,0} convert(%p0)
}
"""
    module = one(
        "  %w = bf16[30,128]{1,0} parameter(0)\n"
        "  ROOT %f = f32[30,128]{1,0:T(8,128)S(1)} fusion(%w), kind=kLoop, calls=%whole",
        computations=conversion,
    )
    assert hlo.totals(module).hbm_bytes == 30 * 128 * 2


def test_an_update_in_place_writes_only_the_update():
    update = """%update (p0: bf16[4,1024,128], p1: bf16[4,8,128], p2: s32[]) -> bf16[4,1024,128] {
  %p0 = bf16[4,1024,128]{2,1,0} parameter(0)
  %p1 = bf16[4,8,128]{2,1,0} parameter(1)
  %p2 = s32[]{S(1)} parameter(2)
  %zero = s32[] constant(0)
  ROOT %u = bf16[4,1024,128]{2,1,0} dynamic-update-slice(%p0, %p1, %zero, %p2, %zero)
}
"""
    module = one(
        "  %c = bf16[4,1024,128]{2,1,0} parameter(0)\n  %n = bf16[4,8,128]{2,1,0} parameter(1)\n"
        "  %i = s32[]{S(1)} parameter(2)\n"
        "  ROOT %f = bf16[4,1024,128]{2,1,0} fusion(%c, %n, %i), kind=kLoop, calls=%update",
        computations=update,
    )
    assert hlo.totals(module).hbm_bytes == 2 * 4 * 8 * 128 * 2


@pytest.mark.parametrize(
    ("line", "products"),
    [
        ("f32[16,32]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={1}", 16 * 32 * 64),
        ("f32[16,32]{1,0} convolution(%x, %w), dim_labels=bf_oi->bf", 16 * 32 * 64),
    ],
)
def test_flops_of_dots(line, products):
    module = one(f"  %x = bf16[16,64]{{1,0}} parameter(0)\n  %w = bf16[32,64]{{1,0}} parameter(1)\n  ROOT %d = {line}")
    assert hlo.totals(module).flops == 2 * products


@pytest.mark.parametrize(
    ("dtype", "precision", "share"),
    [
        ("f32", "operand_precision={highest,highest}", 1),
        ("f32", "operand_precision={high,high}", 0),
        ("f32", "", 0),
        ("bf16", "operand_precision={highest,highest}", 0),
    ],
)
@pytest.mark.parametrize("form", ["dot", "library"])
def test_products_of_float32_numbers_are_counted_apart(dtype, precision, share, form):
    """The TPU compiler writes them in fusions, and the CUDA compiler also as library calls."""
    arrays = f"  %x = {dtype}[16,64]{{1,0}} parameter(0)\n  %w = {dtype}[32,64]{{1,0}} parameter(1)\n"
    if form == "dot":
        dims = "lhs_contracting_dims={1}, rhs_contracting_dims={1}"
        inner = (
            f"%inner () -> f32[16,32] {{\n{arrays}  ROOT %d = f32[16,32]{{1,0}} dot(%x, %w), {dims}, {precision}\n}}\n"
        )
        module = one(
            f"{arrays}  ROOT %f = f32[16,32]{{1,0}} fusion(%x, %w), kind=kOutput, calls=%inner", computations=inner
        )
    else:
        names = [f'"{name.upper()}"' for name in precision[precision.find("{") + 1 : -1].split(",") if precision]
        config = (
            f'{{"lhs_contracting_dimensions":["1"],"precision_config":{{"operand_precision":[{",".join(names)}]}}}}'
        )
        module = one(
            f"{arrays}  ROOT %c = (f32[16,32]{{1,0}}, s8[64]{{0}}) custom-call(%x, %w), "
            f'custom_call_target="__cublas$lt$matmul", backend_config={{"gemm_backend_config":{config}}}'
        )
    totals = hlo.totals(module)
    assert (totals.flops, totals.float32_flops) == (2 * 16 * 32 * 64, share * 2 * 16 * 32 * 64)


def test_flops_of_a_batched_dot_written_as_a_dilated_window():
    """The form that the compiler gives attention: the batch is a spatial dimension whose window meets itself only."""
    module = one(
        "  %q = bf16[3,5,64]{2,1,0} parameter(0)\n  %k = bf16[3,100,64]{2,1,0} parameter(1)\n"
        "  ROOT %d = f32[3,5,100]{2,1,0} convolution(%q, %k), window={size=3 stride=2 lhs_dilate=3}, "
        "dim_labels=0bf_0oi->0bf"
    )
    assert hlo.totals(module).flops == 2 * 3 * 5 * 100 * 64


def test_a_kernel_counts_by_its_authors_estimate():
    module = one(
        "  %k = bf16[32,8,1280,128]{3,2,1,0} parameter(0)\n"
        '  ROOT %c = bf16[1,16,128]{2,1,0} custom-call(%k), custom_call_target="tpu_custom_call", '
        'backend_config={"custom_call_config":{"body":"abc","cost_estimate":{"flops":"10485760",'
        '"transcendentals":"20480","bytes_accessed":"655360"}}}'
    )
    totals = hlo.totals(module)
    assert totals.kernels == Kernel(1, 10485760, 655360)
    assert totals.hbm_bytes == 655360


@pytest.mark.parametrize(
    ("source", "result", "copies"),
    [
        ("3,2,1,0:T(8,128)", "3,2,1,0:T(8,128)", 1),
        ("3,2,1,0:T(8,128)", "2,3,1,0:T(8,128)", 1),
        ("3,2,1,0:T(8,128)", "2,3,1,0:T(8,128)S(1)", 1),
        ("3,2,1,0:T(8,128)", "3,2,1,0:T(8,128)S(1)", 0),
        ("3,2,1,0:T(8,128)S(1)", "3,2,1,0:T(8,128)", 0),
    ],
)
def test_a_change_of_order_is_a_copy_and_a_move_to_or_from_chip_memory_is_none(source, result, copies):
    for kind in ("copy", "copy-start"):
        module = one(
            f"  %c = bf16[2,8,4096,128]{{{source}}} parameter(0)\n  ROOT %k = bf16[2,8,4096,128]{{{result}}} {kind}(%c)"
        )
        assert len(hlo.findings(module, large=frozenset({("bf16", (2, 8, 128, 4096))}))) == copies


def test_findings():
    cache = "bf16[2,8,4096,128]{3,2,1,0}"
    module = one(
        "  %l = f32[4,1000]{1,0} parameter(0)\n"
        f"  %c = {cache} parameter(1)\n"
        "  %s = f32[4,1000]{1,0} sort(%l), dimensions={1}, to_apply=%lt\n"
        f"  %copy.1 = {cache} copy(%c)\n"
        f"  %copy.2 = {cache[:-1]}:T(8,128)S(1)}} copy(%c)\n"  # a prefetch, not a copy in HBM
        '  %h = f32[] custom-call(%l), custom_call_target="xla_ffi_python_cpu_callback"\n'
        '  ROOT %g = f32[] custom-call(%l), custom_call_target="Sharding"'
    )
    large = frozenset({("bf16", (2, 8, 128, 4096))})
    by_kind = {f.kind: f for f in hlo.findings(module, vocab_size=1000, large=large)}
    assert {kind: f.count for kind, f in by_kind.items()} == {"vocabulary_sort": 1, "host_call": 1, "copy": 1}
    assert by_kind["copy"].bytes == 2 * 8 * 4096 * 128 * 2
    assert "1000" in by_kind["vocabulary_sort"].sentence
    assert not hlo.findings(module, vocab_size=999)[1:]  # another vocabulary: the host call only


GPU = """HloModule jit_step, is_scheduled=true

%sliced (p: bf16[3,2048,1024], i: s32[]) -> bf16[1,2048,1024] {
  %p = bf16[3,2048,1024]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %less = pred[] compare(%i, %zero), direction=LT
  ROOT %slice = bf16[1,2048,1024]{2,1,0} dynamic-slice(%p, %i, %zero, %zero), dynamic_slice_sizes={1,2048,1024}
}

%product (w: bf16[2048,1024], x: bf16[1,1024]) -> bf16[2048] {
  %w = bf16[2048,1024]{1,0} parameter(0)
  %x = bf16[1,1024]{1,0} parameter(1)
  ROOT %dot = bf16[2048]{0} dot(%w, %x), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}

%scores (p.1: f32[8]) -> f32[8] {
  %p.1 = f32[8]{0} parameter(0)
  ROOT %exp = f32[8]{0} exponential(%p.1), metadata={op_name="jit(step)/tree_attention/while/body/exp"}
}

%body (state: (s32[], f32[8])) -> (s32[], f32[8]) {
  %state = (s32[], f32[8]{0}) parameter(0)
  %n = s32[] get-tuple-element(%state), index=0
  %y = f32[8]{0} get-tuple-element(%state), index=1
  %scored = f32[8]{0} fusion(%y), kind=kLoop, calls=%scores
  ROOT %out = (s32[], f32[8]{0}) tuple(%n, %scored)
}

%condition (state.1: (s32[], f32[8])) -> pred[] {
  %state.1 = (s32[], f32[8]{0}) parameter(0)
  %n.1 = s32[] get-tuple-element(%state.1), index=0
  ROOT %less.1 = pred[] compare(%n.1, %n.1), direction=LT
}

ENTRY %main (stack: bf16[3,2048,1024], a: f32[8]) -> f32[8] {
  %stack = bf16[3,2048,1024]{2,1,0} parameter(0)
  %a = f32[8]{0} parameter(1)
  %row = bf16[1,1024]{1,0} constant({...})
  %which = s32[] constant(2)
  %fusion-start = ((bf16[3,2048,1024], s32[]), bf16[1,2048,1024], u32[]) fusion-start(%stack, %which), calls=%sliced
  %fusion-done = bf16[1,2048,1024]{2,1,0} fusion-done(%fusion-start)
  %matrix = bf16[2048,1024]{1,0} bitcast(%fusion-done)
  %gemm = bf16[2048]{0} fusion(%matrix, %row), kind=kCustom, calls=%product
  %library = (f32[8]{0}, s8[4]{0}) custom-call(%gemm, %row), custom_call_target="__cublas$gemm"
  %start = (s32[], f32[8]{0}) tuple(%which, %a)
  %loop = (s32[], f32[8]) while(%start), condition=%condition, body=%body, metadata={op_name="tree_attention/while"}
  ROOT %last = f32[8]{0} copy(%a)
}
"""


def test_what_a_gpu_launches():
    """A slice, two products, a copy; per turn a kernel and the comparison, and the host reads once more."""
    module, trips = hlo.parse(GPU), lambda loop: 3.0
    assert hlo.count_kernels(module, trips) == hlo.KernelCounts(products=2, attention=3, other=1 + 1 + 3)
    (use,) = hlo.loop_uses(module, trips)
    assert use == hlo.LoopUse("tree_attention/while", 0, 1.0, 3.0, known=False)
    totals = hlo.totals(module, trips)
    assert totals.condition_reads == 4 and totals.instructions == 10
    layer = 2048 * 1024 * 2
    assert totals.hbm_bytes == pytest.approx(2 * layer + layer, rel=0.01), "read and written, and read by the product"


def test_a_slice_of_a_stack_is_found():
    large = frozenset({("bf16", (3, 1024, 2048))})
    (finding,) = hlo.findings(hlo.parse(GPU), large=large)
    assert (finding.kind, finding.count, finding.bytes) == ("slice", 1, 2048 * 1024 * 2)
    assert finding.sentence == "slices bf16[1,2048,1024] 1 times, 4 MB in total"
    (finding,) = hlo.findings(hlo.parse(GPU), large=frozenset({("bf16", (1024, 2048))}))
    assert finding.kind == "copy", "the whole array"
    computed = GPU.replace("dynamic-slice(%p, %i, %zero, %zero), dynamic_slice_sizes={1,2048,1024}", "exponential(%p)")
    assert not hlo.findings(hlo.parse(computed), large=large)
