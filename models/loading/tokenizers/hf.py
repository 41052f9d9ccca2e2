"""Tokenizers of Hugging Face folders."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from specjax.errors import UsageError
from specjax.files.untrusted import check_folder, first_line, quote, read_bytes, read_json_object
from specjax.models.loading.families.config_fields import POSITIONS, ConfigFields
from specjax.models.loading.tokenizers.byte_level import (
    GPT2_RULE,
    QWEN2_RULE,
    PieceToken,
    build_byte_level,
    check_merges,
    read_merges,
)
from specjax.models.loading.tokenizers.companions import (
    Companions,
    place_pieces,
    read_companions,
    read_templates,
    warn_of_unread_settings,
)
from specjax.models.loading.tokenizers.expansion_limit import MAX_EXPANSION, expansion_factor
from specjax.models.loading.tokenizers.spm import BYTE, Spm
from specjax.models.loading.tokenizers.spm_file import read_spm_file
from specjax.models.loading.tokenizers.tokenizer import UNMISTAKABLE_END_TOKENS, LibraryCodec, Tokenizer, end_ids

MAX_MISSING_IDS = 1 << 20  # unused ids below the highest one

LIBRARY_FILE, SPM_FILE, VOCABULARY, MERGES = "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt"

VOCABULARY_RULES = {"Qwen2Tokenizer": QWEN2_RULE, "DreamTokenizer": QWEN2_RULE, "GPT2Tokenizer": GPT2_RULE}
"""Rules that split text, by the `tokenizer_class` of a folder with vocab.json and merges.txt."""
MODEL_CLASSES = {"qwen2": "Qwen2Tokenizer", "qwen3": "Qwen2Tokenizer", "Dream": "DreamTokenizer"}
"""Tokenizers of folders that do not give a class, by `model_type`."""

MAX_LIBRARY_BYTES = 1 << 28
NO_MERGES = re.compile(rb'"merges"\s*:\s*\[\s*\]')


def from_folder(folder: Path) -> Tokenizer:
    """Build the tokenizer from tokenizer.json, tokenizer.model or vocab.json, and its companions.

    Warns: CheckpointWarning that names the fields of tokenizer_config.json that are not read and can change token ids.

    Raises: UsageError if the folder lacks a file that its kind of tokenizer needs, or has one that is not supported.
    """
    check_folder(folder)
    companions = read_companions(folder)
    for file, read in ((LIBRARY_FILE, _read_library), (SPM_FILE, _read_spm), (VOCABULARY, _read_vocabulary)):
        if (folder / file).exists():
            codec, names = read(folder, companions)
            break
    else:
        raise UsageError(_explain_missing(folder))
    warn_of_unread_settings(companions, codec)
    pieces, control = _pieces(codec, folder)
    end_tokens = [pieces.index(names["eos_token"])] if names.get("eos_token") in pieces else []
    for file in ("generation_config.json", "config.json"):
        config = ConfigFields(read_json_object(folder / file) or {}, str(folder / file))
        end_tokens += _eos_ids(config if config.is_stated("eos_token_id") else config.subfields("text_config"))
    template, named = read_templates(folder, companions.settings)
    return Tokenizer(codec, pieces, end_ids(pieces, control, end_tokens), template, names, named)


def _explain_missing(folder: Path) -> str:
    """Return one sentence about a folder without a tokenizer that can be read."""
    for name, form in ((MERGES, "merges without vocab.json"), ("tekken.json", "a tokenizer in Mistral's own format")):
        if (folder / name).exists():
            return f"{folder} has {name}, {form}, which is not enough; download the tokenizer.json of the same model"
    files = f"{LIBRARY_FILE}, {SPM_FILE}, or {VOCABULARY} with {MERGES}"
    return f"{folder} has no tokenizer ({files}); download the whole repository"


def _eos_ids(config: ConfigFields) -> list[int]:
    """Read one id, several or none."""
    several = isinstance(config.value("eos_token_id"), list)
    eos = config.array("eos_token_id", int) if several else [config.size("eos_token_id", None, minimum=0)]
    ids = [i for i in eos if i is not None]
    if not all(0 <= i <= POSITIONS for i in ids):
        raise UsageError(f"{config.where} has {config.prefix}eos_token_id {quote(ids)}, which must be token ids")
    return ids


def _rows(folder: Path) -> int | None:
    """Return the number of rows of the model's embedding; None if its config does not give it."""
    config = read_json_object(folder / "config.json") or {}
    texts = config.get("text_config")
    for fields in (config, texts if isinstance(texts, dict) else {}):
        for name in ("embedding_size", "vocab_size"):
            if type(fields.get(name)) is int:
                return fields[name]
    return None


def _read_library(folder: Path, companions: Companions) -> tuple[LibraryCodec, dict[str, str]]:
    """Read tokenizer.json with the library `tokenizers`, and add the tokens that only its companions have."""
    import tokenizers

    file = folder / LIBRARY_FILE
    contents = read_bytes(file, MAX_LIBRARY_BYTES)
    try:
        backend = tokenizers.Tokenizer.from_buffer(contents)
    except Exception as error:  # the library raises bare Exception
        message = f"{file} is not a tokenizer that the tokenizers library can read ({first_line(error)})"
        raise UsageError(message) from None
    backend.no_truncation()
    backend.no_padding()
    factor = expansion_factor(backend)
    if factor > MAX_EXPANSION:
        raise UsageError(f"the rules of {file} can make a text {float(factor):.2g} times as long; use another")
    if isinstance(backend.model, tokenizers.models.BPE) and not backend.model.ignore_merges:
        added = {token.content for token in backend.get_added_tokens_decoder().values()}
        plain = (piece for piece in backend.get_vocab() if piece not in added and not BYTE.fullmatch(piece))
        check_merges(not NO_MERGES.search(contents), plain, str(file), "merges")
    _add_to_library(backend, companions, folder)
    return LibraryCodec(backend), companions.named(backend.get_vocab(), {})


def _add_to_library(backend: Any, companions: Companions, folder: Path) -> None:
    """Add tokens to a tokenizer of the library, or change how they are matched, as `transformers` does."""
    import tokenizers

    present = backend.get_added_tokens_decoder()
    flags = {token.content: token.__getstate__() for token in present.values()}
    changes = {
        content: {**state, "special": True} for content, state in flags.items() if content in UNMISTAKABLE_END_TOKENS
    }
    places = place_pieces(companions, backend.get_vocab(), _rows(folder))
    decides = companions.settings.get("added_tokens_decoder") is not None
    for entry, _ in places:
        if entry.piece in flags and (entry.id is None or not decides):
            continue  # only added_tokens_decoder takes precedence over tokenizer.json
        is_end = entry.piece in UNMISTAKABLE_END_TOKENS
        changes[entry.piece] = {
            "content": entry.piece, "special": entry.special or is_end, "lstrip": entry.left_strip,
            "rstrip": entry.right_strip, "normalized": entry.normalized, "single_word": entry.single_word,
        }  # fmt: skip
    changes = {content: state for content, state in changes.items() if flags.get(content) != state}
    backend.add_tokens([tokenizers.AddedToken(**state) for state in changes.values()])
    for entry, token_id in places:
        if backend.token_to_id(entry.piece) != token_id:
            raise UsageError(
                f"{companions.where} adds the token {quote(entry.piece)} to a vocabulary with gaps; use another folder"
            )


def _read_spm(folder: Path, companions: Companions) -> tuple[Spm, dict[str, str]]:
    """Read tokenizer.model, and add the tokens that only its companions have."""
    file = read_spm_file(folder / SPM_FILE)
    pieces, settings = list(file.codec.pieces), companions.settings
    ids = {piece: i for i, piece in reversed(list(enumerate(pieces)))}
    names = companions.named(ids, {f"{role}_token": pieces[i] for role, i in file.ids.items()})
    places = place_pieces(companions, ids, _rows(folder))
    pieces += [entry.piece for entry, i in places if i >= len(file.codec.pieces)]
    ids |= {entry.piece: i for entry, i in places}
    is_set = lambda name, default: default if type(settings.get(name)) is not bool else settings[name]
    add_bos, add_eos = is_set("add_bos_token", True), is_set("add_eos_token", False)
    codec = dataclasses.replace(
        file.codec,
        pieces=tuple(pieces),
        scores=file.codec.scores + (0.0,) * (len(pieces) - len(file.codec.pieces)),
        atomic=file.codec.atomic | {i for _, i in places},
        hidden=file.codec.hidden
        | {i for entry, i in places if entry.special or entry.piece in UNMISTAKABLE_END_TOKENS},
        left_strip=frozenset(i for entry, i in places if entry.left_strip),
        right_strip=frozenset(i for entry, i in places if entry.right_strip),
        bos=ids.get(names.get("bos_token", "")) if add_bos else None,
        eos=ids.get(names.get("eos_token", "")) if add_eos else None,
        dummy_prefix=file.codec.dummy_prefix and is_set("add_prefix_space", True),
        first_only=not is_set("legacy", True),
    )
    return codec, names


def _read_vocabulary(folder: Path, companions: Companions) -> tuple[LibraryCodec, dict[str, str]]:
    """Read vocab.json and merges.txt by the rule of the tokenizer's class."""
    model_type = str((read_json_object(folder / "config.json") or {}).get("model_type"))
    name = companions.class_name or MODEL_CLASSES.get(model_type, f"of the model type {model_type}")
    if name not in VOCABULARY_RULES:
        raise UsageError(
            f"{folder} has {VOCABULARY} and {MERGES} of the tokenizer {quote(name)}, and specjax never runs code of a "
            "model to learn how that splits text; download the tokenizer.json of the same model"
        )
    if not (folder / MERGES).exists():
        raise UsageError(
            f"{folder} has {VOCABULARY} without {MERGES}, and without merges all text falls into single letters; "
            "download the whole repository"
        )
    ids = read_json_object(folder / VOCABULARY) or {}
    if sorted(map(repr, ids.values())) != sorted(map(repr, range(len(ids)))):
        raise UsageError(f"{folder / VOCABULARY} does not number its {len(ids)} pieces from 0; download it again")
    lines = read_bytes(folder / MERGES, MAX_LIBRARY_BYTES).decode().split("\n")
    rules = (line.rstrip("\r") for i, line in enumerate(lines) if i or not line.startswith("#version"))
    merges = read_merges(filter(None, rules), ids, str(folder / MERGES))
    names = companions.named(ids, {})
    special = {piece for piece in (*names.values(), *(entry.piece for entry in companions.added))}
    check_merges(bool(merges), (piece for piece in ids if piece not in special), str(folder / MERGES), "merges")
    bos, eos = (
        names.get(f"{role}_token") if companions.settings.get(f"add_{role}_token") is True else None
        for role in ("bos", "eos")
    )
    added = [PieceToken(entry.piece, entry.special) for entry, _ in place_pieces(companions, ids, _rows(folder))]
    backend = build_byte_level(ids, merges, VOCABULARY_RULES[name], added, bos=bos, eos=eos)
    _add_to_library(backend, companions, folder)
    return LibraryCodec(backend), companions.named(backend.get_vocab(), {})


def _pieces(codec: LibraryCodec | Spm, folder: Path) -> tuple[tuple[str, ...], Iterable[int]]:
    """Return the pieces of a vocabulary by id, and the ids of its control tokens."""
    if isinstance(codec, Spm):
        return codec.pieces, codec.hidden
    by_piece = codec.backend.get_vocab(with_added_tokens=True)
    highest = max(by_piece.values(), default=-1)
    if highest >= len(by_piece) + MAX_MISSING_IDS:
        raise UsageError(f"{folder} has {len(by_piece)} tokens but the token id {highest}; download it again")
    pieces = [""] * (highest + 1)
    for piece, i in by_piece.items():
        pieces[i] = piece
    return tuple(pieces), [i for i, token in codec.backend.get_added_tokens_decoder().items() if token.special]
