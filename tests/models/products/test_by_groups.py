"""Products by the kernel for groups, on the devices of a mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import mesh
from specjax.models import LlamaConfig
from specjax.models.layout import Layout
from specjax.models.products import by_groups
from specjax.numerics.quantized_array import QuantizedArray
from specjax.pallas_kernels.grouped_matmul import grouped_matmul

OUTPUTS, INPUTS, GROUP = 256, 512, 128


def matrix(has_offsets: bool) -> tuple[QuantizedArray, np.ndarray]:
    """A matrix in groups, and its weights in float64."""
    random = np.random.default_rng(0)
    values = random.integers(-7, 8, (OUTPUTS, INPUTS)).astype(np.int8)
    scales, offsets = random.random((2, OUTPUTS, INPUTS // GROUP)).astype(np.float32)
    weights = values * np.repeat(scales, GROUP, 1).astype(np.float64)
    if has_offsets:
        weights -= np.repeat(offsets, GROUP, 1).astype(np.float64)
    return QuantizedArray(values, scales, offsets if has_offsets else None), weights


@pytest.mark.parametrize(
    ("module", "data", "has_offsets"), [("gate", 1, True), ("down", 1, True), ("down", 2, False), ("gate", 2, False)]
)
def test_each_device_multiplies_its_part(module, data, has_offsets, monkeypatch):
    """Outputs are split for "gate", and inputs, whose sums are added, for "down"."""
    calls = []

    def spy(x, values, scales):
        calls.append(values.shape)
        return grouped_matmul(x, values, scales, interpret=True)

    monkeypatch.setattr(by_groups, "grouped_matmul", spy)
    weight, weights = matrix(has_offsets)
    layout = Layout(mesh(data, 2, devices=jax.devices()[: 2 * data]), ("data", "model"))
    params = {"layers": [{"mlp": {module: {"weight": jax.tree.map(jnp.asarray, weight)}}}]}
    params = jax.device_put(params, layout.params(params))
    x = np.random.default_rng(1).standard_normal((2, 3, INPUTS)).astype(np.float32)

    @jax.jit
    def multiply(params, x):
        [layer] = layout.with_shardings(params)["layers"]
        return by_groups.multiply_groups(x, layer["mlp"][module]["weight"])

    np.testing.assert_allclose(multiply(params, x), x.astype(np.float64) @ weights.T, rtol=1e-4, atol=1e-3)
    assert calls == [(OUTPUTS // 2, INPUTS) if module == "gate" else (OUTPUTS, INPUTS // 2)]


def test_parts_that_the_kernel_cannot_multiply():
    """Three groups cannot be split into two parts, and a part whose place is not defined has no kernel."""
    layout = Layout(mesh(1, 2, devices=jax.devices()[:2]), ("data", "model"))
    weight = QuantizedArray(jnp.zeros((256, 384), jnp.int8), jnp.zeros((256, 3)))
    [placed] = jax.tree.leaves(
        layout.with_shardings({"down": {"weight": weight}}), is_leaf=lambda leaf: isinstance(leaf, QuantizedArray)
    )
    assert by_groups.multiply_groups(jnp.zeros((1, 384)), placed) is None
    with jax.sharding.use_abstract_mesh(layout.mesh.abstract_mesh):
        assert by_groups.multiply_groups(jnp.zeros((1, 384)), weight) is None


TINY = LlamaConfig(
    vocab_size=2048, width=512, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=64, mlp_width=1024,
    max_positions=1024, dtype="bfloat16", stacked=True, name="tiny",
)  # fmt: skip


@pytest.mark.tpu_compile
def test_the_kernel_is_in_the_program_of_four_devices(monkeypatch, tmp_path):
    """A step on four devices calls it as often as a step on one, and moves a quarter of the weights."""
    from tpu import devices

    from specjax.planning.compiler import compile_programs
    from specjax.planning.workload import make_workload

    devices("v5e:2x2")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    step = functools.partial(compile_programs, cache=False, notify=lambda name: None, only=("step",))
    work = functools.partial(make_workload, TINY, "v5e:2x2", quantize="int4-weights", context=256, max_new_tokens=64)
    [one], [four] = step(work(model=1)), step(work(model=4))
    plain = make_workload(dataclasses.replace(TINY, stacked=False), "v5e:2x2", model=4, context=256, max_new_tokens=64)
    [floats] = step(plain)
    assert four.compiles and four.kernel_calls == one.kernel_calls
    assert four.kernel_calls - floats.kernel_calls == 7 * TINY.num_layers + 1
