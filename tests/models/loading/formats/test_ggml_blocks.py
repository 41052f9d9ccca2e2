"""Blocks of GGML against gguf's own dequantiser, to the bit."""

import dataclasses

import jax
import numpy as np
import pytest
from gguf_files import write

from specjax.errors import UsageError
from specjax.models import load
from specjax.models.loading.formats import ggml_blocks
from specjax.models.loading.formats.ggml_blocks import LAYOUTS, quantized_tensor
from specjax.models.loading.tensors.tensors import TensorLocation, block_size, read_quantized_rows, read_rows
from specjax.models.storage import num_bytes, stored_format
from specjax.numerics.quantized_array import QuantizedArray, expand_rows

gguf = pytest.importorskip("gguf")

ROWS, INPUTS = 48, 512


def random_blocks(kind, file):
    """Write random bytes as a matrix of `kind`, with scales in float16 that are finite, and return its location."""
    rng = np.random.default_rng(3)
    elements, size = block_size(kind)
    blocks = rng.integers(0, 256, (ROWS * INPUTS // elements, size), np.uint8)
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "MXFP4": ()}.get(kind, (0,))
    places += (2,) if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else ()
    for place in places:
        halves = rng.normal(size=(len(blocks), 1)).astype("<f2")
        halves[::7] = [[0.0], [-0.0], [6e-8], [6e4], [-1.0]][rng.integers(5)]
        blocks[:, place : place + 2] = halves.view(np.uint8)
    file.write_bytes(b"header  " + blocks.tobytes())
    return TensorLocation(file, 8, (ROWS, INPUTS), kind), blocks


def as_bits(x):
    return np.asarray(x, np.float32).view(np.uint32)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_blocks_expand_to_the_bits_of_gguf(kind, tmp_path):
    location, blocks = random_blocks(kind, tmp_path / "weights")
    wanted = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind]).reshape(ROWS, INPUTS)
    tensor = quantized_tensor("w", location)
    np.testing.assert_array_equal(as_bits(read_rows(tensor, 0, ROWS)), as_bits(wanted))
    rows = tensor.rows(5, 17)  # a chunk
    np.testing.assert_array_equal(as_bits(expand_rows(rows)), as_bits(wanted[5:17]))
    for platform in ("cpu", "tpu"):  # the dtype of each platform holds all values
        form = stored_format(tensor.form, platform)
        read = read_quantized_rows(tensor, 0, ROWS, form)
        shapes = jax.tree.map(lambda x: (x.shape, x.dtype), form.shapes((ROWS, INPUTS), "float32"))
        assert jax.tree.map(lambda x: (x.shape, x.dtype), dataclasses.replace(read, dtype_name="float32")) == shapes
        np.testing.assert_array_equal(as_bits(expand_rows(read)), as_bits(wanted))


def test_a_scale_that_is_not_finite_is_refused(tmp_path):
    location, blocks = random_blocks("Q4_K", tmp_path / "weights")
    blocks[40, :2] = np.array([np.inf], "<f2").view(np.uint8)
    location.file.write_bytes(b"header  " + blocks.tobytes())
    tensor = quantized_tensor("blk.0.w", location)
    rows_per_block = INPUTS // 256
    assert np.isfinite(read_rows(tensor, 0, 40 // rows_per_block)).all()
    with pytest.raises(UsageError, match=r'weights has a scale in "blk.0.w" that is not finite'):
        read_rows(tensor, 0, ROWS)


def test_vectors_and_other_kinds_stay_as_they_are(tmp_path):
    for location in (
        TensorLocation(tmp_path, 0, (64,), "Q8_0"),
        TensorLocation(tmp_path, 0, (4, 64), "F16"),
        TensorLocation(tmp_path, 0, (4, 256), "TQ2_0"),
    ):
        assert quantized_tensor("w", location) is location


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q5_0"])
def test_a_file_that_is_kept_quantised_has_the_logits_of_the_expanded_one(kind, tiny, texts, tmp_path):
    model = tiny.model("llama", hidden_size=64, intermediate_size=64, head_dim=16, vocab_size=96)
    file = write(model, tmp_path / "model.gguf", kind=kind)
    expanded, small = (load(file, keep_quantized=keep)[0] for keep in (False, True))
    assert isinstance(small.params["embed"]["weight"], QuantizedArray)
    assert num_bytes(small.params) < 0.5 * num_bytes(expanded.params)
    ours, _, _ = tiny.ours(small, texts)
    wanted, _, _ = tiny.ours(expanded, texts)
    assert max(np.abs(a - b).max() for a, b in zip(ours, wanted, strict=True)) <= 1e-5
    for part in ("q", "o"):  # rows of q are permuted
        matrices = [target.params["layers"][0]["attention"][part]["weight"] for target in (small, expanded)]
        np.testing.assert_array_equal(as_bits(matrices[0].expand()), as_bits(matrices[1]))


def test_another_order_of_nibbles_is_detected(tmp_path, monkeypatch):
    """The comparison with gguf fails if neighbours of a byte are neighbours of the row."""
    location, blocks = random_blocks("Q4_0", tmp_path / "weights")
    monkeypatch.setattr(ggml_blocks, "_nibbles", lambda data: ggml_blocks._fields(data, 4, 1))
    wanted = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q4_0).reshape(ROWS, INPUTS)
    assert (read_rows(quantized_tensor("w", location), 0, ROWS) != wanted).mean() > 0.5
