"""Folders of Whisper models in the format of CTranslate2: model.bin in floats, config.json and a vocabulary.

Format: https://github.com/OpenNMT/CTranslate2, python/ctranslate2/specs/model_spec.py `Model._save`.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from specjax.errors import UsageError
from specjax.files.untrusted import check_file, parse_json, quote, read_text
from specjax.models.loading.families.config_fields import LAYERS, ConfigFields
from specjax.models.loading.tensors.assembly import Checkpoint, StoredTensor
from specjax.models.loading.tensors.tensors import StoredArray, TensorLocation, bytes_of
from specjax.models.seq2seq.config import WhisperConfig

FILE, VOCABULARIES = "model.bin", ("vocabulary.json", "vocabulary.txt")
VERSION, SPEC = 6, "WhisperSpec"
KINDS = {0: "F32", 1: "I8", 3: "I32", 4: "F16", 5: "BF16"}
"""Storage formats by the number of their type; 2 is int16."""
INT8, INT16 = 1, 2
GELU = 3
START = "<|startoftranscript|>"
UNREAD = "alignment_heads", "lang_ids", "suppress_ids", "suppress_ids_begin"
"""Fields of config.json that `specjax.speech` reads, or that align words."""
MAX_VARIABLES, MAX_RANK = 1 << 16, 4


def is_folder(folder: Path) -> bool:
    """Return True for a folder with a model of this format, and none of Hugging Face's."""
    return (folder / FILE).exists() and any((folder / name).exists() for name in VOCABULARIES)


def check_complete(folder: Path, fields: ConfigFields) -> None:
    """Raise a UsageError for a folder with the config of this format that lacks other files of it."""
    if not fields.has("model_type") and any(fields.has(name) for name in UNREAD):
        missing = FILE if not (folder / FILE).exists() else VOCABULARIES[0]
        raise UsageError(f"{folder} has a config of CTranslate2 and lacks {missing}; download the whole repository")


def read(folder: Path, fields: ConfigFields, **options) -> Checkpoint:
    """Parse a folder. `options`: dtype, cache_dtype, name, and those of `storage_options`.

    Raises: UsageError for another version or kind of model, and for quantised weights.
    """
    fields.skip(*UNREAD)
    file = folder / FILE
    tensors, scalars = _read_table(file)
    feed = "layer_0/ffn/linear_0/weight"
    needed = (
        "decoder/embeddings/weight", "encoder/conv1/weight", "decoder/position_encodings/encodings",
        "encoder/position_encodings/encodings", f"decoder/{feed}", f"encoder/{feed}",
    )  # fmt: skip
    missing = [name for name in needed if name not in tensors]
    if missing:
        raise UsageError(f"{file} lacks the tensor {missing[0]}, so the shape of the model is unknown")
    for name, value in (("decoder/pre_norm", 1), ("decoder/activation", GELU), ("decoder/scale_embeddings", 0)):
        if scalars.get(name, value) != value:
            raise UsageError(f"{file} has {name} {scalars[name]}, and Whisper has {value}; convert the model again")
    shape = lambda name: tensors[name].shape
    (vocab, width), (_, bins, _) = shape(needed[0]), shape(needed[1])
    heads, encoder_heads = (scalars.get(f"{part}/num_heads", 0) for part in ("decoder", "encoder"))
    if min(heads, encoder_heads) < 1 or width % heads or width % encoder_heads:
        raise UsageError(f"{file} has {heads} and {encoder_heads} heads, which must divide the width {width}")
    positions = shape(needed[2])[0]
    config = WhisperConfig(
        vocab_size=vocab, width=width, num_layers=_count_layers(tensors, "decoder"),
        encoder_layers=_count_layers(tensors, "encoder"), num_heads=heads, num_kv_heads=heads, head_dim=width // heads,
        encoder_heads=encoder_heads, mlp_width=shape(needed[4])[0],
        encoder_mlp_width=shape(needed[5])[0], mel_bins=bins, qkv_bias=True,
        key_bias=False, out_bias=True, feed_activation="gelu_exact", max_positions=positions,
        text_positions=positions, source_positions=shape(needed[3])[0],
        first_token=_first_token(folder), **options,
    )  # fmt: skip
    located: dict[str, StoredArray] = dict(tensors)
    return Checkpoint(folder, config, located, _stored(config))


def _count_layers(tensors: dict[str, TensorLocation], stack: str) -> int:
    """Return the number of layers of the encoder or the decoder."""
    count = sum(f"{stack}/layer_{layer}/ffn/linear_0/weight" in tensors for layer in range(LAYERS))
    if not count:
        raise UsageError(f"{FILE} has no layers of the {stack}; convert the model again")
    return count


def _first_token(folder: Path) -> int:
    """Return the id of the token that starts a transcript."""
    file = next(folder / name for name in VOCABULARIES if (folder / name).exists())
    text = read_text(file)
    pieces: Any = parse_json(text.encode(), file) if file.suffix == ".json" else text.split("\n")
    if not isinstance(pieces, list) or START not in pieces:
        raise UsageError(f"{file} lacks the token {START}; use the folder of a Whisper model")
    return pieces.index(START)


def _read_table(file: Path) -> tuple[dict[str, TensorLocation], dict[str, int]]:
    """Return the tensors of floats and the other numbers by name. Raises: UsageError for quantised weights."""
    check_file(file)
    size = file.stat().st_size
    tensors: dict[str, TensorLocation] = {}
    scalars: dict[str, int] = {}
    with open(file, "rb") as handle:
        version = _unpack(handle, "I")
        if version != VERSION:
            raise UsageError(f"{file} has version {version} of CTranslate2's format, and specjax reads {VERSION}")
        spec, _, count = _text(handle), _unpack(handle, "I"), _unpack(handle, "I")
        if spec != SPEC:
            raise UsageError(f"{file} is a model of the kind {quote(spec)}, and specjax reads {SPEC} in this format")
        if count > MAX_VARIABLES:
            raise UsageError(f"{file} states {count} variables, more than {MAX_VARIABLES}; download it again")
        for _ in range(count):
            name, rank = _text(handle), _unpack(handle, "B")
            shape = tuple(_unpack(handle, "I") for _ in range(min(rank, MAX_RANK + 1)))
            code, num_bytes = _unpack(handle, "B"), _unpack(handle, "I")
            offset, kind = handle.tell(), KINDS.get(code)
            elements = math.prod(shape)
            expected = 2 * elements if code == INT16 else bytes_of(kind, elements) if kind else -1
            if rank > MAX_RANK or num_bytes != expected or offset + num_bytes > size:
                raise UsageError(f"{file} has {quote(name)} with another size than its shape; download it again")
            if shape and code in (INT8, INT16):
                form = "int8" if code == INT8 else "int16"
                raise UsageError(f"{file} has weights of {form}; convert the model again with --quantization float16")
            if shape and kind is not None and kind != "I32":
                tensors[name] = TensorLocation(file, offset, shape, kind)
                handle.seek(num_bytes, 1)
            elif not shape and code in (INT8, INT16):
                scalars[name] = int(np.frombuffer(handle.read(num_bytes), {INT8: "<i1", INT16: "<i2"}[code])[0])
            else:
                handle.seek(num_bytes, 1)
    return tensors, scalars


def _unpack(handle: BinaryIO, form: str) -> int:
    return struct.unpack(f"<{form}", handle.read(struct.calcsize(form)))[0]


def _text(handle: BinaryIO) -> str:
    return handle.read(_unpack(handle, "H")).rstrip(b"\0").decode()


def _stored(c: WhisperConfig) -> dict[str, StoredTensor]:
    """Map parameter paths to tensors. Projections of the same input are joined in one tensor."""
    stored: dict[str, StoredTensor] = {}

    def norm(path: str, name: str) -> None:
        stored[f"{path}.weight"] = StoredTensor(f"{name}/layer_norm/gamma")
        stored[f"{path}.bias"] = StoredTensor(f"{name}/layer_norm/beta")

    def joined(paths: list[str], name: str) -> None:
        for place, path in enumerate(paths):
            rows = len(paths) * c.width if len(paths) > 1 else 0
            for part in ("weight", "bias"):
                first = place * c.width if rows else 0
                stored[f"{path}.{part}"] = StoredTensor(f"{name}/{part}", first=first, rows=rows)

    for path, stack in (("encoder.*", "encoder"), ("layers.*", "decoder")):
        layer = f"{stack}/layer_*"
        joined([f"{path}.attention.{part}" for part in "qkv"], f"{layer}/self_attention/linear_0")
        joined([f"{path}.attention.o"], f"{layer}/self_attention/linear_1")
        joined([f"{path}.mlp.up"], f"{layer}/ffn/linear_0")
        joined([f"{path}.mlp.down"], f"{layer}/ffn/linear_1")
        norm(f"{path}.attention_norm", f"{layer}/self_attention")
        norm(f"{path}.mlp_norm", f"{layer}/ffn")
    joined(["layers.*.source.q"], "decoder/layer_*/attention/linear_0")
    joined(["layers.*.source.k", "layers.*.source.v"], "decoder/layer_*/attention/linear_1")
    joined(["layers.*.source.o"], "decoder/layer_*/attention/linear_2")
    norm("layers.*.source_norm", "decoder/layer_*/attention")
    norm("norm", "decoder")
    norm("encoder_norm", "encoder")
    for name in ("conv1", "conv2"):
        joined([f"encoder_{name}"], f"encoder/{name}")
    return stored | {
        "embed.weight": StoredTensor("decoder/embeddings/weight"),
        "positions.table": StoredTensor("decoder/position_encodings/encodings"),
        "encoder_positions.table": StoredTensor("encoder/position_encodings/encodings"),
    }
