"""The file tokenizer.model of SentencePiece, a message of Protocol Buffers.

Format: https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto. A message is a list of
fields, each with a number and a wire type. Only the fields with a constant here change how text is split.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from specjax.errors import UsageError
from specjax.files.untrusted import read_bytes
from specjax.models.loading.tokenizers.spm import Spm

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types
PIECES, TRAINER, NORMALIZER = 1, 2, 3  # fields of the model
TEXT, SCORE, TYPE = 1, 2, 3  # fields of a piece
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # types of pieces
ALGORITHMS = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}

MODEL_TYPE, SUFFIX = 3, 24  # fields of the trainer
IDS = {"unk": 40, "bos": 41, "eos": 42, "pad": 43}
DEFAULT_IDS = {"unk": 0, "bos": 1, "eos": 2, "pad": -1}
CHARACTER_MAP, DUMMY_PREFIX, REMOVE_SPACES, ESCAPE_SPACES = 2, 3, 4, 5  # fields of the normalizer


class SpmFile(NamedTuple):
    """The contents of a tokenizer.model."""

    codec: Spm  # without bos and eos
    ids: dict[str, int]  # ids of the special tokens by role, such as "bos"


def read_spm_file(file: Path) -> SpmFile:
    """Read a file. Raises: UsageError for a file of another format, and for rules that `Spm` does not have."""
    contents = read_bytes(file)
    try:
        fields = list(_fields(contents))
        pieces = [_piece(value) for number, value in fields if number == PIECES]
        trainer, normalizer = (_last(fields, number) for number in (TRAINER, NORMALIZER))
    except (ValueError, TypeError, UnicodeDecodeError, struct.error):
        pieces = []
    if not pieces:
        raise UsageError(
            f"{file} is not a whole file of SentencePiece (files of tiktoken have that name too, and specjax does not "
            "read them); download the tokenizer.json of the same model"
        )
    _check_rules(trainer, normalizer, file)
    ids = {role: _signed(trainer.get(number, DEFAULT_IDS[role])) for role, number in IDS.items()}
    of_type = lambda *types: frozenset(i for i, (_, _, kind) in enumerate(pieces) if kind in types)
    unknown = min(of_type(UNKNOWN), default=0)
    codec = Spm(
        tuple(text for text, _, _ in pieces),
        tuple(score for _, score, _ in pieces),
        atomic=of_type(UNKNOWN, CONTROL, USER_DEFINED),
        hidden=of_type(UNKNOWN, CONTROL),
        unknown=unknown,
        dummy_prefix=bool(normalizer.get(DUMMY_PREFIX, 1)),
    )
    return SpmFile(codec, {role: i for role, i in ids.items() if 0 <= i < len(pieces)})


def _check_rules(trainer: dict[int, Any], normalizer: dict[int, Any], file: Path) -> None:
    algorithm = trainer.get(MODEL_TYPE, 1)
    problems = {
        f"the algorithm {ALGORITHMS.get(algorithm, algorithm)}": algorithm != 2,
        "a map of characters": bool(normalizer.get(CHARACTER_MAP)),
        "remove_extra_whitespaces": bool(normalizer.get(REMOVE_SPACES, 1)),
        "unescaped spaces": not normalizer.get(ESCAPE_SPACES, 1),
        "spaces as suffixes": bool(trainer.get(SUFFIX, 0)),
    }
    for problem, is_present in problems.items():
        if is_present:
            raise UsageError(
                f"{file} has {problem}, which specjax does not support; use a folder with the tokenizer.json of the "
                "same model"
            )


def _piece(message: bytes) -> tuple[str, float, int]:
    """Return the text, the score and the type of a piece."""
    fields = dict(_fields(message))
    score = struct.unpack("<f", fields[SCORE])[0] if SCORE in fields else 0.0
    if math.isnan(score):
        raise ValueError("a score that is no number")
    return fields.get(TEXT, b"").decode(), score, int(fields.get(TYPE, NORMAL))


def _last(fields: list[tuple[int, Any]], number: int) -> dict[int, Any]:
    """Return the fields of the last message with a number; none if it is absent."""
    messages = [value for field, value in fields if field == number]
    return dict(_fields(messages[-1])) if messages else {}


def _signed(value: int) -> int:
    """Return a number of 32 bits with its sign, which a varint writes with 64 bits."""
    return value - (1 << 64) if value >> 63 else value


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each field: an int for varints, else bytes."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, wire = key >> 3, key & 7
        if wire == VARINT:
            value, at = _varint(message, at)
            yield number, value
            continue
        length, at = _varint(message, at) if wire == BYTES else ({FIXED64: 8, FIXED32: 4}.get(wire, -1), at)
        if not number or not 0 <= length <= len(message) - at:
            raise ValueError("a field past the end")
        yield number, message[at : at + length]
        at += length


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Return a number in groups of seven bits, the lowest first, and the position after it."""
    value = 0
    for index in range(10):
        if at + index >= len(message):
            break
        byte = message[at + index]
        value |= (byte & 127) << 7 * index
        if byte < 128:
            return value, at + index + 1
    raise ValueError("a number past the end")
