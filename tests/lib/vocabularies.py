"""Small vocabularies of both kinds, for tests of tokenizers."""

from __future__ import annotations

from collections.abc import Iterable


def spm_vocabulary(words: Iterable[str] = (), control: Iterable[str] = (), user: Iterable[str] = ()) -> tuple:
    """Return pieces, types and scores of a SentencePiece vocabulary with all bytes and ASCII letters."""
    letters = sorted({*"▁.,!?[]<>/|'", *map(chr, range(48, 58)), *map(chr, range(65, 91)), *map(chr, range(97, 123))})
    letters += sorted({letter for word in words for letter in word} - set(letters))
    joined = dict.fromkeys(word[:n] for word in words for n in range(2, len(word) + 1))
    normal = [*letters, *joined]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *normal, *control, *user]
    types = [2, 3, 3, *[6] * 256, *[1] * len(normal), *[3] * len([*control]), *[4] * len([*user])]
    scores = [0.0] * 259 + [-float(i) for i in range(len(normal))] + [0.0] * (len(pieces) - 259 - len(normal))
    return pieces, types, scores


def byte_level_vocabulary(words: Iterable[str] = (), control: Iterable[str] = ()) -> tuple:
    """Return pieces, types and merges of a byte-level vocabulary that joins some ASCII words letter by letter."""
    from tokenizers import pre_tokenizers

    pieces, merges = sorted(pre_tokenizers.ByteLevel.alphabet()), []
    for word in (word.replace(" ", "Ġ") for word in words):
        for n in range(1, len(word)):
            if word[: n + 1] not in pieces:
                pieces.append(word[: n + 1])
                merges.append(f"{word[:n]} {word[n]}")
    return [*pieces, *control], [1] * len(pieces) + [3] * len([*control]), merges
