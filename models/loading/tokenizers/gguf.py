"""Tokenizers from the metadata of GGUF files.

They are built from the vocabulary itself. Conversion with `transformers` takes 6 to 20 s, and splits SmolLM2's text by
the rule of GPT-2.
"""

from __future__ import annotations

import math

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.loading.families.config_fields import ConfigFields
from specjax.models.loading.tokenizers.spm import SPACE, Spm
from specjax.models.loading.tokenizers.tokenizer import LibraryCodec, Tokenizer, end_ids

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # tokenizer.ggml.token_type

NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # names in templates: names in the format

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
SPLITS = {"qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2}
SPLITS |= dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "smaug-bpe"), _LLAMA3)
"""Patterns that split text before byte-level merging, by `tokenizer.ggml.pre`. Others use the GPT-2 rule."""


def from_metadata(meta: dict, where: str) -> Tokenizer:
    """Build the tokenizer from the metadata of a GGUF file."""
    fields = ConfigFields(meta, where, "tokenizer.ggml.")
    kind = fields.text("model", "none")
    tokens = fields.array("tokens", str)
    if not tokens:
        raise UsageError(f"{where} has no tokenizer, so it is not a complete model; use another file")
    if kind not in ("gpt2", "llama"):
        raise UsageError(
            f"{where} has a tokenizer of type {quote(kind)}, which specjax does not support (only gpt2, llama)"
        )
    pieces = _pieces(tokens)
    types = fields.array("token_type", int, len(pieces)) or [NORMAL] * len(pieces)
    control = [i for i, t in enumerate(types) if t == CONTROL]
    codec = (_byte_level if kind == "gpt2" else _sentencepiece)(fields, pieces, types)
    used = len(pieces)
    while used and types[used - 1] == UNUSED:  # rows that pad the embedding
        used -= 1
    ends = (fields.size(f"{name}_token_id", None, minimum=0) for name in ("eos", "eot", "eom"))
    end_tokens = [i for i in ends if i is not None]
    ids = {name: _id(fields, key, len(pieces)) for name, key in NAMED.items()}
    names = {f"{name}_token": pieces[i] for name, i in ids.items() if i is not None}
    vocab = tuple(pieces[:used])
    return Tokenizer(codec, vocab, end_ids(vocab, control, end_tokens), meta.get("tokenizer.chat_template"), names)


def _id(fields: ConfigFields, name: str, count: int) -> int | None:
    """Return the id of a token with a role; None if the vocabulary of `count` tokens has none."""
    token_id = fields.size(f"{name}_token_id", count, minimum=0)
    return token_id if token_id < count else None


def _pieces(tokens: list[str]) -> list[str]:
    """Return the vocabulary. Gemma files write runs of spaces as spaces, but the merges need ▁."""
    return [SPACE * len(p) if p and not p.strip(" ") else p for p in tokens]


def _sentencepiece(fields: ConfigFields, pieces: list[str], types: list[int]) -> Spm:
    # Gemma's scores do not follow the training order of its merges. The order of the vocabulary does.
    by_order = str(fields.values.get("general.architecture", "")).startswith("gemma")
    scores = [] if by_order else fields.array("scores", (int, float), len(pieces))
    if any(math.isnan(score) for score in scores):
        raise UsageError(
            f"{fields.where} has token scores that are not numbers, so text cannot be tokenized; use another file"
        )
    highest = len(pieces) - 1
    bos, eos = (
        fields.size(f"{name}_token_id", i + 1, minimum=0, maximum=highest) for i, name in enumerate(("bos", "eos"))
    )
    return Spm(
        tuple(pieces),
        tuple(scores) if scores else tuple(-float(i) for i in range(len(pieces))),
        atomic=frozenset(i for i, t in enumerate(types) if t in (CONTROL, USER_DEFINED)),
        hidden=frozenset(i for i, t in enumerate(types) if t == CONTROL),
        unknown=fields.size("unknown_token_id", 0, minimum=0, maximum=highest),
        bos=bos if fields.flag("add_bos_token", True) else None,
        eos=eos if fields.flag("add_eos_token", False) else None,
        dummy_prefix=fields.flag("add_space_prefix", True),
    )


def _byte_level(fields: ConfigFields, pieces: list[str], types: list[int]) -> LibraryCodec:
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

    pre = fields.text("pre", "default")
    ids = {piece: i for i, piece in reversed(list(enumerate(pieces)))}
    merges = [_merge(text, ids, fields.where) for text in fields.array("merges", str)]
    llama3 = SPLITS.get(pre) == _LLAMA3
    backend = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=llama3))
    if pre in SPLITS:
        split = pre_tokenizers.Split(tokenizers.Regex(SPLITS[pre]), "isolated")
        splitters = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    elif pre in ("smollm", "gpt-2", "default"):
        digits = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
        splitters = [*digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    else:
        raise UsageError(
            f"{fields.where} has a tokenizer with pre-tokenizer {quote(pre)}, which specjax does not support"
        )
    backend.pre_tokenizer = pre_tokenizers.Sequence(splitters)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    added = [
        tokenizers.AddedToken(piece, normalized=False, special=t == CONTROL)
        for piece, t in zip(pieces, types, strict=True)
        if t in (CONTROL, USER_DEFINED)
    ]
    backend.add_tokens(added)
    bos, eos = (_id(fields, name, len(pieces)) for name in ("bos", "eos"))
    prefix = [pieces[bos]] if bos is not None and fields.flag("add_bos_token", llama3) else []
    suffix = [pieces[eos]] if eos is not None and fields.flag("add_eos_token", False) else []
    if prefix or suffix:
        backend.post_processor = processors.TemplateProcessing(
            single=[*prefix, "$A", *suffix], special_tokens=[(p, ids[p]) for p in {*prefix, *suffix}]
        )
    return LibraryCodec(backend)


def _merge(text: str, ids: dict[str, int], where: str) -> tuple[str, str]:
    """Return the two pieces that a merge rule joins."""
    left, _, right = text.partition(" ")
    if left not in ids or right not in ids or left + right not in ids:
        raise UsageError(f"{where} has the merge {quote(text)} of pieces that its vocabulary lacks; download it again")
    return left, right
