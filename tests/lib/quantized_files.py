"""Quantised files that are written here from the papers and the libraries' documentation, in float64.

Every function rounds or invents numbers, packs them, and returns the tensors by the last parts of their names, with the
matrix float64[O, I] that they stand for.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np

KINDS = {
    "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int8": "I8", "uint8": "U8", "int32": "I32", "int64": "I64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
NF4 = np.array(
    [-1, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0, 0.0795803, 0.1609302, 0.2461123,
     0.3379152, 0.4407098, 0.5626170, 0.7229568, 1], np.float32,
)  # fmt: skip
FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
AWQ_OUTPUTS = [0, 2, 4, 6, 1, 3, 5, 7]


def write(file: Path, tensors: dict[str, np.ndarray]) -> Path:
    """Write a safetensors file, also with dtypes that the library cannot write from NumPy."""
    header, data = {}, b""
    for name, array in tensors.items():
        array = np.asarray(array)
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": KINDS[array.dtype.name], "shape": array.shape, "data_offsets": [len(data), len(data) + len(raw)]
        }  # fmt: skip
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return file


def packed(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Pack each row of numbers [n, count] into words int32[n, words], as one long number of each row."""
    words = -(-numbers.shape[1] * bits // 32)
    rows = [sum(int(x) << (bits * i) for i, x in enumerate(row)).to_bytes(4 * words, "little") for row in numbers]
    return np.stack([np.frombuffer(row, "<i4") for row in rows])


def grouped(weight, group, low, high, symmetric, order=None, float16=True):
    """Round each group of inputs to whole numbers from `low` to `high`.

    Returns: numbers [O, I], zero points and scales [O, G], and the matrix.
    """
    outputs, inputs = weight.shape
    group = inputs if group == -1 else group
    order = np.arange(inputs) // group if order is None else order
    scales, zeros = np.zeros((2, outputs, inputs // group))
    for g in range(inputs // group):
        columns = weight[:, order == g]
        if symmetric:
            scales[:, g] = np.abs(columns).max(1) / ((high - low) // 2)
            zeros[:, g] = (high + low + 1) // 2
        else:
            minimum, maximum = np.minimum(columns.min(1), 0), np.maximum(columns.max(1), 0)
            scales[:, g] = (maximum - minimum) / (high - low)
            zeros[:, g] = np.clip(np.rint(low - minimum / scales[:, g]), low + 1, high)
    scales = scales.astype(np.float16 if float16 else np.float32).astype(np.float64)
    numbers = np.clip(np.rint(weight / scales[:, order] + zeros[:, order]), low, high)
    return numbers.astype(int), zeros.astype(int), scales, scales[:, order] * (numbers - zeros[:, order])


def gptq(weight, bits=4, group=16, symmetric=False, version="gptq", order=None, stored_zero=None, dynamic=None):
    numbers, zeros, scales, matrix = grouped(weight, group, 0, 2**bits - 1, symmetric, order)
    stored = zeros - (version == "gptq") if stored_zero is None else np.full_like(zeros, stored_zero)
    tensors = {
        "qweight": packed(numbers, bits).T,
        "qzeros": packed(stored.T, bits),
        "scales": scales.T.astype(np.float16),
    }
    if order is not None or group != -1:
        inputs = weight.shape[1]
        tensors["g_idx"] = (np.arange(inputs) // group if order is None else order).astype(np.int32)
    config = {
        "quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": order is not None,
        "checkpoint_format": version, "dynamic": dynamic, "damp_percent": 0.1, "meta": {"quantizer": ["x"]},
    }  # fmt: skip
    return tensors, matrix, config


def awq(weight, group=16):
    numbers, zeros, scales, matrix = grouped(weight, group, 0, 15, False)
    mixed = lambda x: packed(x.reshape(-1, 8)[:, AWQ_OUTPUTS], 4).reshape(len(x), -1)
    tensors = {"qweight": mixed(numbers.T), "qzeros": mixed(zeros.T), "scales": scales.T.astype(np.float16)}
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return tensors, matrix, config


def compressed_config(form, activations=None, **weights):
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": scheme},
        "ignore": ["lm_head", "re:.*gate"], "quantization_status": "compressed", "kv_cache_scheme": None,
    }  # fmt: skip


def pack_quantized(weight, bits=4, group=16, symmetric=True, order=None):
    half = 2 ** (bits - 1)
    numbers, zeros, scales, matrix = grouped(weight, group, -half, half - 1, symmetric, order, float16=False)
    tensors = {
        "weight_packed": packed(numbers + half, bits), "weight_scale": scales.astype(np.float32),
        "weight_shape": np.array(weight.shape),
    }  # fmt: skip
    if not symmetric:
        tensors["weight_zero_point"] = packed((zeros + half).T, bits).T
    if order is not None:
        tensors["weight_g_idx"] = order.astype(np.int32)
    strategy = {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    config = compressed_config(
        "pack-quantized", num_bits=bits, type="int", symmetric=symmetric, actorder=order is not None, **strategy
    )
    return tensors, matrix, config


INT8_PER_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}


def int_quantized(weight, symmetric=True, strategy="channel", activations=INT8_PER_TOKEN):
    rows = weight.reshape(1, -1) if strategy == "tensor" else weight
    numbers, zeros, scales, matrix = grouped(rows, -1, -128, 127, symmetric, float16=False)
    tensors = {"weight": numbers.reshape(weight.shape).astype(np.int8), "weight_scale": scales.astype(np.float32)}
    if strategy == "tensor":
        tensors["weight_scale"] = tensors["weight_scale"].reshape(1)
    if not symmetric:
        tensors["weight_zero_point"] = zeros.astype(np.int8)
    config = compressed_config(
        "int-quantized", activations, num_bits=8, type="int", symmetric=symmetric, strategy=strategy
    )
    return tensors, matrix.reshape(weight.shape), config


def float8(weight, block, dtype=ml_dtypes.float8_e4m3fn, scale_dtype=np.float32):
    """Round tiles of `block` numbers. Return values, scales of tiles, and the matrix."""
    grid = [-(-size // width) for size, width in zip(weight.shape, block, strict=True)]
    values, scales, matrix = np.zeros(weight.shape, dtype), np.zeros(grid, scale_dtype), np.zeros(weight.shape)
    for i in range(grid[0]):
        for j in range(grid[1]):
            place = np.s_[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            scale = np.abs(weight[place]).max() / float(ml_dtypes.finfo(dtype).max)
            scales[i, j] = 2 ** np.ceil(np.log2(scale)) if scale_dtype is ml_dtypes.float8_e8m0fnu else scale
            values[place] = (weight[place] / float(scales[i, j])).astype(dtype)
            matrix[place] = values[place].astype(np.float64) * float(scales[i, j])
    return values, scales, matrix


FLOAT8_PER_TOKEN = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token"}


def float_quantized(weight, strategy="channel", block=(32, 16), activations=FLOAT8_PER_TOKEN, form="float-quantized"):
    block = {"tensor": weight.shape, "channel": (1, weight.shape[1]), "block": block}[strategy]
    values, scales, matrix = float8(weight, block)
    scales = scales.reshape(1) if strategy == "tensor" else scales
    extra = {"block_structure": list(block)} if strategy == "block" else {}
    activations = activations and activations | ({"strategy": "group"} if strategy == "block" else {})
    config = compressed_config(form, activations, num_bits=8, type="float", symmetric=True, strategy=strategy, **extra)
    return {"weight": values, "weight_scale": scales}, matrix, config


def fp8(weight, block=(128, 128), scale_dtype=np.float32, dtype=ml_dtypes.float8_e4m3fn):
    values, scales, matrix = float8(weight, block, dtype, scale_dtype)
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(block), "fmt": "e4m3"}
    return {"weight": values, "weight_scale_inv": scales}, matrix, config


def state(kind, shape, block, **nested):
    text = {"quant_type": kind, "shape": list(shape), "dtype": "bfloat16", "blocksize": block, **nested}
    return np.frombuffer(json.dumps(text).encode(), np.uint8)


def nf4(weight, block=64, twice=False, kind="nf4"):
    table = NF4 if kind == "nf4" else np.concatenate([FP4_VALUES, -FP4_VALUES]).astype(np.float32) / np.float32(6)
    flat = np.pad(weight.reshape(-1), (0, -weight.size % block)).reshape(-1, block)
    scales = np.abs(flat).max(1).astype(np.float32)
    nested = {}
    if twice:
        codes = np.linspace(-1, 1, 256).astype(np.float32)
        offset = float(np.float32(scales.mean()))
        differences = np.pad(scales - offset, (0, -len(scales) % 4)).reshape(-1, 4)  # small blocks, to have several
        largest = np.abs(differences).max(1).astype(np.float32)
        nested_codes = np.abs(differences[..., None] / largest[:, None, None] - codes).argmin(-1)
        scales = (codes[nested_codes].astype(np.float64) * largest[:, None] + offset).reshape(-1)[: len(scales)]
        nested = {"nested_blocksize": 4, "nested_dtype": "float32", "nested_offset": offset}
    codes_of_weights = np.abs(flat[..., None] / scales[:, None, None] - table).argmin(-1)
    matrix = (table[codes_of_weights].astype(np.float64) * scales[:, None]).reshape(-1)[: weight.size]
    numbers = codes_of_weights.reshape(-1)[: weight.size + weight.size % 2].astype(np.uint8)
    tensors = {
        "weight": (numbers[::2] << 4 | numbers[1::2])[:, None], "weight.quant_map": table,
        f"weight.quant_state.bitsandbytes__{kind}": state(kind, weight.shape, block, **nested),
        "weight.absmax": np.asarray(scales, np.float32),
    }  # fmt: skip
    if twice:
        tensors |= {
            "weight.absmax": nested_codes.reshape(-1)[: len(scales)].astype(np.uint8), "weight.nested_absmax": largest,
            "weight.nested_quant_map": codes,
        }  # fmt: skip
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    return tensors, matrix.reshape(weight.shape), config


def bnb_int8(weight):
    largest = np.abs(weight).max(1).astype(np.float32)
    numbers = np.rint(weight / largest[:, None].astype(np.float64) * 127)
    tensors = {"weight": numbers.astype(np.int8), "SCB": largest, "weight_format": np.uint8(0)}
    return tensors, numbers * largest[:, None].astype(np.float64) / 127, {
        "quant_method": "bitsandbytes", "load_in_8bit": True,
    }  # fmt: skip


def mxfp4(weight, names=("weight_blocks", "weight_scales"), config=None):
    groups = weight.reshape(len(weight), -1, 32)
    exponents = np.floor(np.log2(np.abs(groups).max(-1))).astype(int) - 2
    scaled = groups / 2.0 ** exponents[..., None]
    codes = np.abs(np.abs(scaled)[..., None] - FP4_VALUES).argmin(-1)
    matrix = (np.sign(scaled) * FP4_VALUES[codes] * 2.0 ** exponents[..., None]).reshape(weight.shape)
    codes = (codes + 8 * (scaled < 0)).astype(np.uint8)
    blocks = codes[..., ::2] | codes[..., 1::2] << 4
    tensors = {names[0]: blocks, names[1]: (exponents + 127).astype(np.uint8)}
    return tensors, matrix, config or {"quant_method": "mxfp4"}


def mxfp4_compressed(weight):
    config = compressed_config(
        "mxfp4-pack-quantized", num_bits=4, type="float", symmetric=True, strategy="group", group_size=32
    )
    tensors, matrix, _ = mxfp4(weight, ("weight_packed", "weight_scale"))
    return tensors | {"weight_packed": tensors["weight_packed"].reshape(len(weight), -1)}, matrix, config
