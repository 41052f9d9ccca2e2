"""The forms that run experts on a TPU, compiled by the TPU compiler."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.models.experts.routing import ExpertChoice
from specjax.models.experts.running import run_experts
from specjax.models.products import matmul
from specjax.numerics.quantized_array import WeightFormat
from specjax.planning.programs import compile_for, device_kind

pytestmark = pytest.mark.tpu_compile
EXPERTS, LAYERS, WIDTH, HIDDEN = 8, 20, 1024, 2048
PREFETCH = r"copy-(?:start|done)|custom-call\(%slice-done"
"""The compiler may move small arrays into on-chip memory, in the same layout, before a kernel reads them."""


def expert(weights, x):
    return matmul(matmul(x, weights[0]), weights[1], jnp.float32)


MESH = ("model",)


def array(*shape, dtype=jnp.bfloat16):
    place = NamedSharding(Mesh(np.array(tpu.devices()[:1]), MESH), PartitionSpec())
    return jax.ShapeDtypeStruct(shape, dtype, sharding=place)


def compiled(rows, weights, form=None, width=WIDTH):
    """Return the compiled program of rows [rows, width] with two experts each, in a layer of these weights."""
    mesh = Mesh(np.array(tpu.devices()[:1]), MESH)

    def run(x, experts, shares, weights, first):
        return run_experts(x, ExpertChoice(experts, shares), weights, EXPERTS, expert, form=form, first=first)

    choice = array(rows, 2, dtype=jnp.int32), array(rows, 2, dtype=jnp.float32)
    with device_kind(mesh), jax.default_matmul_precision("highest"):  # as in the library's programs
        lowered = jax.jit(run).lower(array(rows, width), *choice, weights, array(dtype=jnp.int32))
    return compile_for(mesh, lowered)


NARROW = 96
"""Width of experts whose rows would be padded, so that a TPU stores the second matrix by columns."""


@pytest.mark.parametrize(
    ("rows", "form", "hidden", "kernels"),
    [
        (1, None, HIDDEN, 0), (8, None, HIDDEN, 0), (300, None, HIDDEN, 0), (300, "grouped", HIDDEN, 2),
        (1, None, NARROW, 0), (8, None, NARROW, 0), (300, None, NARROW, 0),
    ],
)  # fmt: skip
def test_no_copy_of_the_experts_of_all_layers(rows, form, hidden, kernels):
    """The form "grouped" runs two kernels, which read their experts in the arrays of all layers."""
    count = EXPERTS * LAYERS
    weights = array(count, hidden, WIDTH), array(count, WIDTH, hidden)
    executable = compiled(rows, weights, form)
    assert executable.memory_analysis().temp_size_in_bytes < 16 << 20  # a transpose within a fusion takes no memory
    program = executable.as_text()
    assert program.count('custom_call_target="tpu_custom_call"') == kernels
    shapes = rf"({EXPERTS}|{count}),({hidden},{WIDTH}|{WIDTH},{hidden})"
    all_experts = rf"= bf16\[{shapes}\]\S* (?!parameter|get-tuple|bitcast|transpose|{PREFETCH})"
    assert not re.findall(all_experts + ".{60}", program)


FORMATS = {"int8": WeightFormat(inputs="int8"), "int8-weights": WeightFormat(), "mxfp4": WeightFormat(5, "int8", 32)}


@pytest.mark.parametrize(("name", "rows"), [(name, rows) for name in FORMATS for rows in (1, 16)] + [("int8", 300)])
def test_no_copy_of_a_quantised_expert(name, rows):
    """A kernel reads each matrix where it is. 1,088 inputs in groups of 32 do not fill whole tiles."""
    width = 1088
    shape = FORMATS[name].shapes((EXPERTS, width, width), "bfloat16")
    weights = jax.tree.map(lambda leaf: array(*leaf.shape, dtype=leaf.dtype), (shape, shape))
    program = compiled(rows, weights, width=width).as_text()
    assert program.count('custom_call_target="tpu_custom_call"') == 2
    moved = rf"= s8\[(?:1,|{EXPERTS},)?{width},{width}\]\S* (?!parameter|get-tuple|bitcast|{PREFETCH})"
    assert not re.findall(moved + ".{60}", program)
