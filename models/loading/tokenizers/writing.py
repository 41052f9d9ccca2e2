"""Writer of tokenizers to Hugging Face folders, for tokenizers without files to copy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specjax.errors import UsageError
from specjax.models.loading.tokenizers.spm import SPACE, Spm
from specjax.models.loading.tokenizers.tokenizer import LibraryCodec, Tokenizer


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """Write tokenizer.json and tokenizer_config.json. Return the token ids for config.json. Raises: OSError."""
    codec = tokenizer.codec
    if isinstance(codec, Spm):
        backend = to_library_tokenizer(codec)
    elif isinstance(codec, LibraryCodec):
        backend = codec.backend
    else:
        raise UsageError(
            f"a tokenizer of type {type(codec).__name__} cannot be written; give a model folder with a tokenizer"
        )
    settings: dict[str, Any] = {**tokenizer.names, "tokenizer_class": "PreTrainedTokenizerFast"}
    templates = {"default": tokenizer.chat_template, **tokenizer.named_templates}
    texts = [{"name": name, "template": text} for name, text in templates.items() if isinstance(text, str)]
    if texts:
        settings["chat_template"] = texts if tokenizer.named_templates else tokenizer.chat_template
    (folder / "tokenizer.json").write_text(backend.to_str(pretty=True), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    token_ids = {"eos_token_id": list(tokenizer.eos)}
    return token_ids | {
        f"{name}_id": tokenizer.vocab.index(piece)
        for name, piece in tokenizer.names.items()
        if name in ("bos_token", "pad_token") and piece in tokenizer.vocab
    }


def to_library_tokenizer(spm: Spm) -> Any:
    """Convert a vocabulary to the library `tokenizers`, like `transformers` converts those of SentencePiece.

    There are three differences. Control tokens are also found in plain text. A space at the start of a text replaces
    the one that is put before it. Merges with equal scores may have another order.
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
    scheme = ("first" if spm.first_only else "always") if spm.dummy_prefix else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme, split=False)
    strip = [decoders.Strip(" ", 1, 0)] if spm.dummy_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    added = [
        tokenizers.AddedToken(
            spm.pieces[i],
            normalized=False,
            special=i in spm.hidden,
            lstrip=i in spm.left_strip,
            rstrip=i in spm.right_strip,
        )
        for i in sorted(spm.atomic | spm.hidden)
    ]
    backend.add_tokens(added)
    prefix, suffix = ([] if i is None else [spm.pieces[i]] for i in (spm.bos, spm.eos))
    if prefix or suffix:
        backend.post_processor = processors.TemplateProcessing(
            single=[*prefix, "$A", *suffix], special_tokens=[(p, ids[p]) for p in {*prefix, *suffix}]
        )
    return backend


def _merges(spm: Spm, ids: dict[str, int]) -> Iterator[tuple[float, int, int, str, str]]:
    """Yield (-score, index, cut, left, right) for every way to build a piece from two others."""
    for piece, i in ids.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ids and right in ids:
                yield -spm.scores[i], i, cut, left, right
