"""Folders of T5 1.1 and Flan-T5 in ONNX: encoder.onnx and decoder.onnx with weights in floats or in int8.

The graphs are not run. The module of a matrix is in the name of the node that reads it, as torch writes it:
"/.../block.0/layer.0/SelfAttention/q/MatMul". Quantised weights (onnxruntime's `quantize_dynamic`) become floats, and
the products of activations that those graphs round to int8 are products of floats here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from specjax.errors import UsageError, optional_import
from specjax.files.untrusted import check_file
from specjax.models.loading.families.config_fields import ROWS, ConfigFields
from specjax.models.loading.families.seq2seq import t5
from specjax.models.loading.tensors.assembly import Checkpoint
from specjax.models.loading.tensors.tensors import LazyTensor, StoredArray

FILES = {"encoder": "encoder.onnx", "decoder": "decoder.onnx"}
PRODUCTS = "MatMul", "MatMulInteger"
TABLES = "Gather"
EMBEDDINGS = "shared", "embed_tokens"
BIAS = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"


def is_folder(folder: Path) -> bool:
    """Return True for a folder with both graphs, and without a config of Hugging Face."""
    return all((folder / name).exists() for name in FILES.values()) and not (folder / "config.json").exists()


def read(folder: Path, **options) -> Checkpoint:
    """Parse a folder. `options`: dtype, cache_dtype, name, and those of `storage_options`.

    Raises: UsageError for the graphs of another model, and if the library onnx is missing.
    """
    tensors: dict[str, StoredArray] = {}
    for part, name in FILES.items():
        file = folder / name
        tensors |= {_full_name(part, path): tensor for path, tensor in _read_tensors(file)}
    shape = lambda name: _shape(folder, tensors, name)
    stem = "encoder.block.0.layer"
    (inner, width), (_, heads) = shape(f"{stem}.0.SelfAttention.q.weight"), shape(f"encoder.{BIAS}")
    if inner % heads:
        raise UsageError(f"{folder} has {heads} heads, which do not divide {inner}; give another folder")
    fields = {
        "model_type": "t5",
        "vocab_size": shape("shared.weight")[0],
        "d_model": width,
        "d_kv": inner // heads,
        "d_ff": shape(f"{stem}.1.DenseReluDense.wi_0.weight")[0],
        "num_layers": _count_blocks(tensors, "encoder"),
        "num_decoder_layers": _count_blocks(tensors, "decoder"),
        "num_heads": heads,
        "relative_attention_num_buckets": shape(f"encoder.{BIAS}")[0],
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
    }
    config = t5.config_from_hf(ConfigFields(fields, str(folder)), **options)
    unused = t5.unused_hf(config)
    return Checkpoint(folder, config, tensors, t5.stored_hf(config, "t5"), lambda name: name in unused)


def _shape(folder: Path, tensors: dict[str, StoredArray], name: str) -> tuple[int, int]:
    """Return the shape of a matrix. Raises: UsageError if the graphs lack it."""
    if name not in tensors or len(tensors[name].shape) != 2:
        raise UsageError(
            f"{folder} has no matrix {name}, so it is no T5 1.1 or Flan-T5 in ONNX; give its Hugging Face folder"
        )
    rows, columns = tensors[name].shape
    return rows, columns


def _count_blocks(tensors: dict[str, StoredArray], part: str) -> int:
    return next(n for n in range(ROWS) if f"{part}.block.{n}.layer.0.layer_norm.weight" not in tensors)


def _full_name(part: str, path: str) -> str:
    """Return the name of a tensor in a checkpoint of Hugging Face."""
    module = path.rpartition(".")[0].rpartition(".")[2]
    if module in EMBEDDINGS:
        return "shared.weight" if part == "decoder" else "encoder.embed_tokens.weight"
    if module == "lm_head":
        return "lm_head.weight"
    start = next((place for word in ("block.", "final_layer_norm") if (place := path.find(word)) >= 0), 0)
    return f"{part}.{path[start:]}"


def _read_tensors(file: Path) -> Iterator[tuple[str, LazyTensor]]:
    """Yield the names and the weights [out, in] of the matrices, tables and norms of a graph."""
    check_file(file)
    with optional_import("onnx", f"{file} needs"):
        import onnx
    try:
        graph = onnx.load(str(file)).graph
    except Exception as error:  # protobuf has errors of its own
        raise UsageError(f"{file} is no graph that the library onnx reads; download it again") from error
    stored = {tensor.name: tensor for tensor in graph.initializer}
    for name, tensor in stored.items():
        if name.endswith("layer_norm.weight"):
            yield name, _lazy(file, stored, tensor, False)
    for node in graph.node:
        if node.op_type not in (*PRODUCTS, TABLES):
            continue
        for name in node.input:
            if name in stored and len(stored[name].dims) == 2:
                module = ".".join(node.name.split("/")[1:-1])
                yield f"{module}.weight", _lazy(file, stored, stored[name], node.op_type in PRODUCTS)


def _lazy(file: Path, stored: dict[str, Any], tensor: Any, transposed: bool) -> LazyTensor:
    """Return the reader of a tensor. Codes of a tensor NAME_quantized have NAME_scale and NAME_zero_point."""
    from onnx import numpy_helper

    stem = tensor.name.removesuffix("_quantized")

    def rows(start: int, stop: int) -> np.ndarray:
        values = numpy_helper.to_array(tensor)
        part = (values[:, start:stop].T if transposed else values[start:stop]).astype(np.float32)
        if stem == tensor.name:
            return part
        # One scale for all, or one for each output.
        scale, offset = (
            np.reshape(numpy_helper.to_array(stored[f"{stem}_{kind}"]).astype(np.float32), (-1, 1))
            for kind in ("scale", "zero_point")
        )
        pick = lambda x: x[start:stop] if len(x) > 1 else x
        return (part - pick(offset)) * pick(scale)

    shape = tuple(tensor.dims)
    return LazyTensor(file, shape[::-1] if transposed else shape, rows)
