"""Meshes of `jax.make_mesh`, whose axes are Explicit by default: converted, or refused in one sentence."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from toy import tiny_llama

import specjax
from specjax import UsageError, decode, drafters, parallel, stream

ROWS = np.array([[1, 2, 3, 1, 2], [4, 5, 4, 0, 0]], np.int32), np.array([5, 3], np.int32)
OPTIONS = {"key": 0, "max_new_tokens": 6, "temperature": 0.8}
DRAFTER = drafters.prompt_lookup(2)


@pytest.fixture(scope="module")
def mesh():
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
    assert AxisType.Explicit in mesh.axis_types, "the reason for these tests"
    return mesh


@pytest.fixture(scope="module")
def expected():
    return decode(tiny_llama(layers=1), DRAFTER, ROWS, **OPTIONS).to_lists()


def test_a_target_is_sharded_over_it(mesh, expected):
    target = specjax.shard(tiny_llama(layers=1), mesh)
    assert decode(target, DRAFTER, ROWS, **OPTIONS).to_lists() == expected
    rows, keys = parallel.spread_rows(mesh, *ROWS, OPTIONS["key"])
    assert decode(target, DRAFTER, rows, **OPTIONS | {"key": keys}).to_lists() == expected
    with jax.set_mesh(mesh), pytest.raises(UsageError, match="a mesh with explicit axes is active"):
        decode(target, DRAFTER, ROWS, **OPTIONS)


def test_arrays_on_it_are_converted(mesh, expected):
    """Prompts, parameters and settings, in `decode` and `stream`."""
    place = lambda tree, *spec: jax.device_put(tree, NamedSharding(mesh, PartitionSpec(*spec)))
    good = tiny_llama(layers=1)
    target, rows = specjax.Target(good.model, place(good.params)), place(ROWS, "data")
    options = OPTIONS | {"temperature": place(np.full(2, 0.8, np.float32), "data")}
    assert decode(target, DRAFTER, rows, **options).to_lists() == expected
    texts = [[], []]
    for step in stream(target, DRAFTER, rows, **options):
        for text, new in zip(texts, step.tokens, strict=True):
            text += new
    assert texts == expected


def test_traced_arrays_on_it_are_refused(mesh):
    rows = jax.device_put(ROWS, NamedSharding(mesh, PartitionSpec("data")))
    run = lambda target, *rows: decode(target, DRAFTER, rows, **OPTIONS)
    with pytest.raises(UsageError, match="inside of jit, arrays on a mesh with explicit axes are not supported"):
        jax.jit(run)(tiny_llama(layers=1), *rows)
