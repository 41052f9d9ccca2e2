"""The attention kernel for GPUs: its numbers by Pallas' interpreter, and its program by the CUDA compiler."""

from __future__ import annotations

import functools

import gpu as gpu_programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.pallas_kernels.tree_attention import gpu, reference, tree_attention

BATCH, HEADS, KV, DIM, SLOTS, NODES = 2, 4, 2, 64, 200, 5
SCALE = 0.125


def arrays(lengths=(130, 64), nodes=NODES, heads=HEADS, dim=DIM, dtype=jnp.bfloat16, seed=0):
    """A tree behind ragged rows. Slots beyond a row's length contain large numbers."""
    rng = np.random.default_rng(seed)
    parents = [-1, *(int(rng.integers(i)) for i in range(1, nodes))]
    among = np.eye(nodes, dtype=bool)
    for node in range(1, nodes):
        among[node] |= among[parents[node]]
    values = lambda *shape: rng.normal(size=shape)
    caches = [values(BATCH, KV, SLOTS, dim) for _ in range(2)]
    for row, length in enumerate(lengths):
        for cache in caches:
            cache[row, :, length:] = 1e3
    floats = values(BATCH, nodes, heads, dim), *(values(BATCH, KV, nodes, dim) for _ in range(2)), *caches
    length = np.asarray(lengths, np.int32)
    positions = (length[:, None] + among.sum(1) - 1).astype(np.int32)
    mask = np.broadcast_to(among, (BATCH, nodes, nodes))
    return *(jnp.asarray(x, dtype) for x in floats), jnp.asarray(length), jnp.asarray(positions), jnp.asarray(mask)


@functools.cache
def interpreted():
    """The kernel on a CPU, with the interpreter's check for races. Skips without one that transposes tiles."""
    if tuple(map(int, jax.__version__.split(".")[:2])) < (0, 11):
        pytest.skip("the interpreter of Mosaic GPU kernels transposes no tiles before JAX 0.11")
    import jax.experimental.pallas.mosaic_gpu as plgpu

    options = dict(scale=SCALE, parts=2, with_total=True, interpret=plgpu.InterpretGPUParams(detect_races=True))
    return jax.jit(functools.partial(gpu.tree_attention, **options))


def test_the_kernel_equals_the_reference():
    """Rows of several lengths, without a cache, and with a last tile that begins earlier, in one program."""
    kernel = interpreted()
    for lengths in ((130, 64), (0, 200), (1, 193)):
        inputs = arrays(lengths, seed=lengths[1])
        out, total = kernel(*inputs)
        exact = [x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in inputs]
        wanted, wanted_total = reference.tree_attention(*exact, scale=SCALE, with_total=True)
        np.testing.assert_allclose(out, wanted, atol=0.02)
        np.testing.assert_allclose(total, wanted_total, atol=0.02)
    other = [*exact[:-1], jnp.ones_like(exact[-1])]  # the tolerance sees a wrong mask and a wrong length
    assert np.abs(np.asarray(out - reference.tree_attention(*other, scale=SCALE))).max() > 0.1
    other = [*exact[:5], exact[5] - 1, *exact[6:]]
    assert np.abs(np.asarray(out - reference.tree_attention(*other, scale=SCALE))).max() > 0.02


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({"dtype": jnp.float32}, {}, "bfloat16"),
        ({"dim": 32}, {}, "64 or 128 numbers, not 32"),
        ({}, {"window": 5}, "no window"),
        ({}, {"softcap": 2.0}, "no softcap"),
    ],
)
def test_what_the_kernel_does_not_support(changes, options, words):
    with pytest.raises(NotImplementedError, match=words):
        tree_attention(*arrays(**changes), scale=SCALE, implementation="mosaic_gpu", **options)


def test_only_its_name_selects_it(monkeypatch):
    calls = []
    monkeypatch.setattr(gpu, "tree_attention", lambda q, *more, **options: calls.append(options) or q)
    tree_attention(*arrays(), scale=SCALE)
    assert not calls
    tree_attention(*arrays(nodes=3), scale=SCALE, implementation="mosaic_gpu")
    assert len(calls) == 1


@pytest.mark.gpu_compile
def test_the_kernel_compiles_for_an_h200():
    """Compile one token and a tree of 64 nodes, in the shapes of Llama 3 8B and SmolLM2: a single library call each."""
    shapes = dict(heads=32, kv_heads=8, dim=128, slots=4096), dict(heads=9, kv_heads=3, dim=64, slots=1000)
    jobs = [
        {"kind": "attention", "topology": "h200:1", "options": {"nodes": nodes, **shape}}
        for nodes in (1, 64)
        for shape in shapes
    ]
    for report in gpu_programs.reports(*jobs):
        assert report["calls"] == ["mosaic_gpu_v2"] and report["temporaries"] < 64 << 20, report
