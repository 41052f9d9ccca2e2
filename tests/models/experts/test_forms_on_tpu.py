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
from specjax.planning.programs import compile_for, device_kind

pytestmark = pytest.mark.tpu_compile
EXPERTS, LAYERS, WIDTH, HIDDEN = 8, 20, 1024, 2048


def expert(weights, x):
    return matmul(matmul(x, weights[0]), weights[1], jnp.float32)


@pytest.mark.parametrize(("rows", "form", "kernels"), [(1, None, 0), (8, None, 0), (300, None, 0), (300, "grouped", 2)])
def test_no_copy_of_the_experts_of_all_layers(rows, form, kernels):
    """The form "grouped" runs two kernels, which read their experts in the arrays of all layers."""
    mesh = Mesh(np.array(tpu.devices()[:1]), ("model",))
    place = NamedSharding(mesh, PartitionSpec())
    array = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    def run(x, experts, shares, weights, first):
        return run_experts(x, ExpertChoice(experts, shares), weights, EXPERTS, expert, form=form, first=first)

    count = EXPERTS * LAYERS
    weights = array(count, HIDDEN, WIDTH), array(count, WIDTH, HIDDEN)
    choice = array(rows, 2, dtype=jnp.int32), array(rows, 2, dtype=jnp.float32)
    with device_kind(mesh):
        lowered = jax.jit(run).lower(array(rows, WIDTH), *choice, weights, array(dtype=jnp.int32))
    program = compile_for(mesh, lowered).as_text()
    assert program.count('custom_call_target="tpu_custom_call"') == kernels
    shapes = rf"({EXPERTS}|{count}),({HIDDEN},{WIDTH}|{WIDTH},{HIDDEN})"
    all_experts = rf"= bf16\[{shapes}\]\S* (?!parameter|get-tuple|bitcast)"
    assert not re.search(all_experts, program)
