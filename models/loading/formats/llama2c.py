"""The `.bin` files of llama2.c (version 0: seven integers, then float32), and their tokenizer files.

Format: https://github.com/karpathy/llama2.c, export.py `legacy_export` and tokenizer.py `export`.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path

from specjax.errors import UsageError
from specjax.files.untrusted import check_file, read_bytes
from specjax.models.llama import LlamaConfig
from specjax.models.loading.families import llama
from specjax.models.loading.families.config_fields import LAYERS, ROWS, WIDTH
from specjax.models.loading.tensors.assembly import Checkpoint
from specjax.models.loading.tensors.tensors import TensorLocation
from specjax.models.loading.tokenizers.spm import SPACE, Spm
from specjax.models.loading.tokenizers.tokenizer import Tokenizer

HEADER = struct.Struct("<7i")
BOS, EOS, FIRST_BYTE = 1, 2, 3


def read(file: Path, **options) -> Checkpoint:
    """Parse a model file. `options`: dtype, cache_dtype, name, and those of `storage_options`."""
    check_file(file)
    with open(file, "rb") as handle:
        head = handle.read(HEADER.size)
    size = file.stat().st_size
    fields = HEADER.unpack(head) if len(head) == HEADER.size else (0,) * 7
    width, hidden, layers, heads, kv_heads, vocab, positions = fields
    tied, vocab = vocab > 0, abs(vocab)
    possible = 0 < kv_heads <= heads <= width <= WIDTH and positions > 0
    possible &= 0 < layers <= LAYERS and 0 < hidden <= ROWS and 0 < vocab <= ROWS
    if not possible or width % (2 * heads) or heads % kv_heads:
        raise UsageError(f"{file} is not a llama2.c model (version 0, float32); give a .gguf file or a model folder")
    config = LlamaConfig(
        vocab_size=vocab,
        width=width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width // heads,
        mlp_width=hidden,
        norm_eps=1e-5,
        tied=tied,
        max_positions=positions,
        **options,
    )
    tensors, end = _table(file, config)
    if end != size:
        raise UsageError(f"{file} is not a complete llama2.c model: it has {size:,} bytes and its header needs {end:,}")
    return Checkpoint(file, config, tensors, llama.stored_gguf(config, "llama"))


def _table(file: Path, c: LlamaConfig) -> tuple[dict[str, TensorLocation], int]:
    """Return the tensors in file order, under their GGUF names, and the end of the last one.

    GGUF files permute q and k in the same way.
    """
    kv_width = c.num_kv_heads * c.head_dim
    per_layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (c.width,),
        "attn_q": (c.width, c.width),
        "attn_k": (kv_width, c.width),
    }
    per_layer |= {"attn_v": (kv_width, c.width), "attn_output": (c.width, c.width), "ffn_norm": (c.width,)}
    per_layer |= {
        "ffn_gate": (c.mlp_width, c.width),
        "ffn_down": (c.width, c.mlp_width),
        "ffn_up": (c.mlp_width, c.width),
    }
    order: list[tuple[str, tuple[int, ...]]] = [("token_embd.weight", (c.vocab_size, c.width))]
    for name, shape in per_layer.items():
        order += [(f"blk.{i}.{name}.weight", shape) for i in range(c.num_layers)]
    order += [("output_norm.weight", (c.width,))]
    order += [("", (c.max_positions, c.head_dim))]  # cosines and sines
    if not c.tied:
        order += [("output.weight", (c.vocab_size, c.width))]
    tensors, at = {}, HEADER.size
    for name, shape in order:
        tensors[name] = TensorLocation(file, at, shape, "F32")
        at += 4 * math.prod(shape)
    del tensors[""]
    return tensors, at


def read_tokenizer(model: Path, vocab_size: int) -> Tokenizer:
    """Read the tokenizer in the folder of a model: `tok512.bin` for 512 tokens, else `tokenizer.bin`."""
    candidates = [model.parent / f"tok{vocab_size}.bin", model.parent / "tokenizer.bin"]
    file = next((c for c in candidates if c.exists()), None)
    if file is None:
        raise UsageError(f"{model} needs its tokenizer {candidates[0].name} (or tokenizer.bin) in the same folder")
    data, at = read_bytes(file), 4
    pieces, scores = [], []
    try:
        for _ in range(vocab_size):
            score, length = struct.unpack_from("<fi", data, at)
            at += 8
            if length < 0 or math.isnan(score):
                raise struct.error("invalid piece")
            pieces.append(data[at : at + length].decode("utf-8").replace(" ", SPACE))
            scores.append(score)
            at += length
        if at > len(data):
            raise struct.error("past the end")
    except (struct.error, UnicodeDecodeError):
        raise UsageError(
            f"{file} is not a llama2.c tokenizer of {vocab_size} tokens; use the one that the model was trained with"
        ) from None
    pieces[:FIRST_BYTE] = ["<unk>", "<s>", "</s>"]
    codec = Spm(
        tuple(pieces),
        tuple(scores),
        atomic=frozenset(),
        hidden=frozenset((0, BOS, EOS)),
        unknown=0,
        bos=BOS,
        dummy_prefix=True,
    )
    return Tokenizer(codec, tuple(pieces), (EOS,))
