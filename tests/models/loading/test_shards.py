"""Weights read directly into their shards equal those that `shard` places."""

import functools

import jax
import numpy as np
import pytest

import specjax
from specjax.models import load
from specjax.models.loading.tensors import assembly
from specjax.models.loading.tensors.tensors import TensorLocation


def check(source, mesh, over=None, **options):
    ours = load(source, mesh=mesh, over=over, **options)[0]
    theirs = specjax.shard(load(source, **options)[0], mesh, over)
    assert ours.model is theirs.model
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), ours.params, theirs.params)
    jax.tree.map(
        lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim) or pytest.fail(), ours.params, theirs.params
    )
    return ours


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("axes", [{"model": 8}, {"data": 2, "layer": 2, "model": 2}, {"sequence": 2, "model": 4}])
def test_permuted_heads_and_repeated_ones(axes, stacked, data):
    """stories260K has 8 query and 4 key/value heads, both permuted."""
    ours = check(data / "stories260K" / "stories260K.bin", specjax.mesh(**axes), stacked=stacked, dtype="bfloat16")
    layers = ours.params["layers"] if stacked else ours.params["layers"][0]
    k = layers["attention"]["k"]["weight"]
    assert k.addressable_shards[0].data.size < k.size


@pytest.mark.parametrize("over", [(), ("layer",)])
def test_a_part_of_the_mesh(over, data):
    check(data / "stories260K" / "stories260K.bin", specjax.mesh(1, 4, layer=2), over)


def test_biases_and_a_head_of_its_own(tiny, tmp_path):
    folder = tiny.save(tiny.model("qwen2", tie_word_embeddings=False), tmp_path)
    check(folder, specjax.mesh(1, 4))


def test_only_rows_that_are_needed_are_read(tmp_path, monkeypatch):
    stored = np.arange(32, dtype=np.float32).reshape(16, 2)
    stored.tofile(tmp_path / "weights")
    tensor = TensorLocation(tmp_path / "weights", 0, (16, 2), "F32")
    read, read_rows = [], assembly.read_rows
    monkeypatch.setattr(assembly, "read_rows", lambda *args: read.append(args[1:]) or read_rows(*args))
    values = np.zeros((4, 1), np.float32)
    write = lambda rows, start, source, add=0.0: assembly._write_rows(
        [[((rows, slice(1, 2)), values)]],
        functools.partial(assembly._read_arrays, tensor, assembly.StoredTensor("weights", add=add)),
        start,
        start + 4,
        source,
    )
    for start in range(0, 16, 4):
        write(slice(6, 10), start, None)
    assert read == [(4, 8), (8, 12)]
    np.testing.assert_array_equal(values, stored[6:10, 1:])
    for start in range(0, 16, 4):  # reversed rows
        write(slice(0, 4), start, np.arange(15, -1, -1), 1.0)
    assert read[2:] == [(12, 16)]
    np.testing.assert_array_equal(values, stored[:11:-1, 1:] + 1)


@pytest.mark.parametrize("scheme", ["int8", "int4-weights"])
def test_quantised_matrices_are_split_with_their_scales(scheme, tiny, tmp_path):
    folder = tiny.save(tiny.model("llama", hidden_size=256, intermediate_size=512), tmp_path)
    sharded = check(folder, specjax.mesh(1, 4), quantize=scheme)
    down = sharded.params["layers"][0]["mlp"]["down"]["weight"]
    assert down.values.addressable_shards[0].data.shape == (256, 128)
    assert down.scales.addressable_shards[0].data.shape == (256, 1)
    decode = lambda target: specjax.decode(
        target, "autoregressive", [[1, 2, 3]], key=jax.random.key(0), max_new_tokens=4
    )
    np.testing.assert_array_equal(decode(sharded).tokens, decode(load(folder, quantize=scheme)[0]).tokens)
