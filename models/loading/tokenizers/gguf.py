"""Tokenizers from the metadata of GGUF files.

They are built from the vocabulary itself. Conversion with `transformers` takes 6 to 20 s, and splits SmolLM2's text by
the rule of GPT-2.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.loading.families.config_fields import ConfigFields
from specjax.models.loading.families.unread_fields import ANY, warn_of_unread
from specjax.models.loading.tokenizers.byte_level import (
    SPLIT_RULES,
    PieceToken,
    build_byte_level,
    check_merges,
    read_merges,
)
from specjax.models.loading.tokenizers.spm import SPACE, Spm
from specjax.models.loading.tokenizers.tokenizer import UNMISTAKABLE_END_TOKENS, LibraryCodec, Tokenizer, end_ids

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # tokenizer.ggml.token_type
HIDDEN = (CONTROL, UNKNOWN)  # types of tokens that decoded text omits
ATOMIC = (CONTROL, UNKNOWN, USER_DEFINED)  # types of tokens that are matched in a text before any merging

NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # names in templates: names in the format
DEFAULT_IDS: dict[str, dict[str, int]] = {"gpt2": {}, "llama": {"unknown": 0, "bos": 1, "eos": 2}}
"""Ids of special tokens that a file of a type need not give."""

TEMPLATE = "tokenizer.chat_template"

NEUTRAL: dict[str, Any] = {
    # the vocabulary for libraries that need no other field, and rules that this kind of vocabulary does not use
    **dict.fromkeys(("merges", "pre", "scores", "token_type_count"), ANY),
    # names of tokens that the text of a prompt writes itself
    **{
        f"{name}_token_id": ANY
        for name in ("cls", "mask", "sep", "seperator", "prefix", "suffix", "middle", "fim_pre", "fim_suf", "fim_mid",
                     "fim_pad", "fim_rep", "fim_sep")
    },
    "add_sep_token": False, "add_space_prefix": False, "normalizer.lowercase": False, "precompiled_charsmap": [],
    "remove_extra_whitespaces": False,
}  # fmt: skip
"""Fields of `tokenizer.ggml` that need no reader with this value."""


class SpecialIds(NamedTuple):
    """Ids of tokens with a role; None for roles that the vocabulary has no token for."""

    bos: int | None
    eos: int | None
    unknown: int | None
    padding: int | None
    ends: tuple[int, ...]  # tokens that end a turn or a text, as the file gives them


def from_metadata(meta: dict, where: str) -> Tokenizer:
    """Build the tokenizer from the metadata of a GGUF file."""
    fields = ConfigFields(meta, where, "tokenizer.ggml.")
    kind = fields.text("model", "none")
    tokens = fields.array("tokens", str)
    if not tokens:
        raise UsageError(f"{where} has no tokenizer, so it is not a complete model; use another file")
    if kind not in DEFAULT_IDS:
        raise UsageError(
            f"{where} has a tokenizer of type {quote(kind)}, which specjax does not support (only gpt2, llama)"
        )
    pieces = _pieces(tokens)
    special = _special_ids(fields, kind, len(pieces))
    types = _types(fields, pieces, special)
    codec = (_byte_level if kind == "gpt2" else _sentencepiece)(fields, pieces, types, special)
    warn_of_unread(fields, neutral=NEUTRAL)
    used = len(pieces)
    while used and types[used - 1] == UNUSED:  # rows that pad the embedding
        used -= 1
    roles = {f"{name}_token": getattr(special, field) for name, field in NAMED.items()}
    named = {name: meta[key] for key in meta if (name := key.removeprefix(f"{TEMPLATE}.")) != key}
    vocab = tuple(pieces[:used])
    return Tokenizer(
        codec,
        vocab,
        end_ids(vocab, [i for i, t in enumerate(types) if t == CONTROL], special.ends),
        meta.get(TEMPLATE),
        {name: pieces[i] for name, i in roles.items() if i is not None},
        named,
    )


def _special_ids(fields: ConfigFields, kind: str, count: int) -> SpecialIds:
    """Read the ids of the tokens with a role in a vocabulary of `count` tokens."""
    defaults = DEFAULT_IDS[kind]
    ends = {name: fields.size(f"{name}_token_id", None, minimum=0) for name in ("eos", "eot", "eom")}
    ids: dict[str, int | None] = {}
    for name in NAMED.values():
        options = {"maximum": count - 1} if name in defaults else {}
        token_id = fields.size(f"{name}_token_id", defaults.get(name, count), minimum=0, **options)
        ids[name] = token_id if token_id < count else None
    return SpecialIds(**ids, ends=tuple(i for i in ends.values() if i is not None))


def _types(fields: ConfigFields, pieces: list[str], special: SpecialIds) -> list[int]:
    """Return the type of each token. Tokens that end a turn are control tokens, also where a file types them as text.

    Raises: UsageError for a file with a chat template but without types, because its control tokens are then unknown.
    """
    types = list(fields.array("token_type", int, len(pieces)))
    if not types:
        if fields.values.get(TEMPLATE) is not None:
            raise UsageError(
                f"{fields.where} lacks tokenizer.ggml.token_type, so the control tokens of its chat template are "
                "unknown; use another file"
            )
        types = [NORMAL] * len(pieces)
        for i in (special.bos, special.eos, special.padding, *special.ends):
            if i is not None and i < len(pieces):
                types[i] = CONTROL
    for i, piece in enumerate(pieces):
        if types[i] in (NORMAL, USER_DEFINED) and piece in UNMISTAKABLE_END_TOKENS:
            types[i] = CONTROL
    return types


def _pieces(tokens: list[str]) -> list[str]:
    """Return the vocabulary. Gemma files write runs of spaces as spaces, but the merges need ▁."""
    return [SPACE * len(p) if p and not p.strip(" ") else p for p in tokens]


def _sentencepiece(fields: ConfigFields, pieces: list[str], types: list[int], special: SpecialIds) -> Spm:
    atomic = frozenset(i for i, t in enumerate(types) if t in ATOMIC)
    add_bos, add_eos = fields.flag("add_bos_token", True), fields.flag("add_eos_token", False)
    return Spm(
        tuple(pieces),
        _scores(fields, len(pieces)),
        atomic=atomic,
        hidden=frozenset(i for i, t in enumerate(types) if t in HIDDEN),
        unknown=special.unknown or 0,
        bos=special.bos if add_bos else None,
        eos=special.eos if add_eos else None,
        dummy_prefix=fields.flag("add_space_prefix", True),
        right_strip=frozenset(i for i in atomic if pieces[i] not in PHI3_PLAIN) if _is_phi3(fields) else frozenset(),
    )


def _scores(fields: ConfigFields, count: int) -> tuple[float, ...]:
    """Return the score of each piece.

    Gemma's scores do not follow the training order of its merges. The order of the vocabulary does.
    """
    if str(fields.values.get("general.architecture", "")).startswith("gemma"):
        return tuple(-float(i) for i in range(count))
    scores = fields.array("scores", (int, float), count)
    if not scores or any(math.isnan(score) for score in scores):
        problem = "has token scores that are not numbers" if scores else "lacks tokenizer.ggml.scores"
        raise UsageError(f"{fields.where} {problem}, so text cannot be tokenized; use another file")
    return tuple(scores)


PHI3_PLAIN = ("<unk>", "<s>", "<|endoftext|>")
"""Control tokens of Phi-3 that leave the spaces after them. All its others remove these, which GGUF cannot express."""


def _is_phi3(fields: ConfigFields) -> bool:
    """Return True for Phi-3, by the architecture or, for files in Llama's layout, by the name of the model."""
    texts = [str(fields.values.get(f"general.{name}", "")).lower() for name in ("architecture", "name")]
    return any("phi3" in text or "phi-3" in text for text in texts)


def _byte_level(fields: ConfigFields, pieces: list[str], types: list[int], special: SpecialIds) -> LibraryCodec:
    pre = fields.text("pre", None)
    if pre not in SPLIT_RULES:
        problem = "lacks tokenizer.ggml.pre" if pre is None else f"has a tokenizer with pre-tokenizer {quote(pre)}"
        raise UsageError(
            f"{fields.where} {problem}, so the rule that splits its text is unknown; use another file or the model's "
            "Hugging Face folder"
        )
    rule, typed_pieces = SPLIT_RULES[pre], list(zip(pieces, types, strict=True))
    ids = {piece: i for i, piece in reversed(list(enumerate(pieces)))}
    merges = read_merges(fields.array("merges", str), ids, fields.where)
    check_merges(
        bool(merges), (piece for piece, t in typed_pieces if t == NORMAL), fields.where, "tokenizer.ggml.merges"
    )
    add_bos, add_eos = fields.flag("add_bos_token", rule.bos), fields.flag("add_eos_token", False)
    backend = build_byte_level(
        ids,
        merges,
        rule,
        [PieceToken(piece, special=t in HIDDEN) for piece, t in typed_pieces if t in ATOMIC],
        bos=pieces[special.bos] if add_bos and special.bos is not None else None,
        eos=pieces[special.eos] if add_eos and special.eos is not None else None,
    )
    return LibraryCodec(backend)
