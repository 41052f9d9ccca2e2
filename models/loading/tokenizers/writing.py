"""Tokenizers to Hugging Face folders, where there are no files of theirs to copy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specjax.errors import UsageError
from specjax.models.loading.tokenizers.spm import SPACE, Spm
from specjax.models.loading.tokenizers.tokenizer import LibraryCodec, Tokenizer


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """tokenizer.json and tokenizer_config.json. Returns: what config.json is to say of tokens. Raises: OSError."""
    codec = tokenizer.codec
    if isinstance(codec, Spm):
        backend = to_library_tokenizer(codec)
    elif isinstance(codec, LibraryCodec):
        backend = codec.backend
    else:
        raise UsageError(f"a tokenizer of {type(codec).__name__} cannot be written; give a model folder that has one")
    settings: dict[str, Any] = {**tokenizer.names, "tokenizer_class": "PreTrainedTokenizerFast"}
    if isinstance(tokenizer.chat_template, str):
        settings["chat_template"] = tokenizer.chat_template
    (folder / "tokenizer.json").write_text(backend.to_str(pretty=True), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    found = {"eos_token_id": list(tokenizer.eos)}
    return found | {
        f"{name}_id": tokenizer.vocab.index(piece)
        for name, piece in tokenizer.names.items()
        if name in ("bos_token", "pad_token") and piece in tokenizer.vocab
    }


def to_library_tokenizer(spm: Spm) -> Any:
    """The same vocabulary for the library `tokenizers`, as `transformers` converts SentencePiece's.

    Control tokens are found in a text too, a space that begins a text stands for the one that is put before it, and
    where scores are equal the order of two merges may be another.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors

    ids = {piece: i for i, piece in reversed(list(enumerate(spm.pieces)))}
    merges = sorted(_merges(spm, ids))
    unknown = spm.pieces[spm.unknown]
    model = models.BPE(
        vocab=ids, merges=[(left, right) for *_, left, right in merges], unk_token=unknown, byte_fallback=True
    )
    backend = tokenizers.Tokenizer(model)
    first = "first" if spm.dummy_prefix else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme=first, split=False)
    strip = [decoders.Strip(" ", 1, 0)] if spm.dummy_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    added = [
        tokenizers.AddedToken(spm.pieces[i], normalized=False, special=i in spm.hidden)
        for i in sorted(spm.whole | spm.hidden)
    ]
    backend.add_tokens(added)
    before, behind = ([] if i is None else [spm.pieces[i]] for i in (spm.bos, spm.eos))
    if before or behind:
        backend.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *behind], special_tokens=[(p, ids[p]) for p in {*before, *behind}]
        )
    return backend


def _merges(spm: Spm, ids: dict[str, int]) -> Iterator[tuple[float, int, int, str, str]]:
    """(-score, place, cut, left, right): every way of a piece to come of two others."""
    for piece, i in ids.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ids and right in ids:
                yield -spm.scores[i], i, cut, left, right
