"""Byte-level BPE: tokenizers of the library `tokenizers` from a vocabulary, merges and the rule that splits text first.

A vocabulary and merges do not define a tokenizer. The same text is split by other rules in each family, and a GGUF file
or a folder with vocab.json only names the rule.
"""

# ruff: noqa: RUF001, the patterns name letters of many scripts

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from specjax.errors import UsageError
from specjax.files.untrusted import quote


class SplitRule(NamedTuple):
    """A rule that splits text before it is merged, and the settings that always come with it."""

    patterns: tuple[str, ...]  # applied in order; each of them separates its matches from the text between them
    whole_words: bool = False  # a split text that is in the vocabulary is one token, whatever the merges
    bos: bool = False  # a text begins with bos unless the file denies it
    nfc: bool = False  # Unicode is composed first


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SIGNS_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_SIGNS}|{_SPACES}"
_SEED = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"


def _split_cases(suffix: str) -> str:
    """Return a pattern of words that also ends a word where a capital follows a small letter."""
    start = r"[^\r\n\p{L}\p{N}]?"
    return rf"{start}{_UPPER}*{_LOWER}+{suffix}|{start}{_UPPER}+{_LOWER}*{suffix}"


_TEKKEN = rf"{_split_cases('')}|\p{{N}}|{_SIGNS_AND_SLASHES}|{_SPACES}"
_GPT4O = rf"{_split_cases(_CONTRACTIONS + '?')}|\p{{N}}{{1,3}}|{_SIGNS_AND_SLASHES}|{_SPACES}"

# The letters with case of DeepSeek's first tokenizer. No Unicode property has the same members.
_DEEPSEEK_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝ"
    "Ὗ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛ"
    "Ꜣ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_CJK = "[一-龥ࠀ-一가-\ud7ff]+"
_DEEPSEEK3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _SPACES
)

QWEN2_RULE = SplitRule((_QWEN2,), nfc=True)
GPT2_RULE = SplitRule((_GPT2,))
_LLAMA3_RULE = SplitRule((_LLAMA3,), whole_words=True, bos=True)

SPLIT_RULES: dict[str, SplitRule] = {
    "qwen2": QWEN2_RULE,
    "tekken": SplitRule((_TEKKEN,), whole_words=True, bos=True),
    "seed-coder": SplitRule((_SEED,)),
    "deepseek-coder": SplitRule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    "deepseek-llm": SplitRule(
        (r"[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _CJK, r"\p{N}")
    ),
    "deepseek-v3": SplitRule((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3_WORDS)),
    "default": SplitRule((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}
"""Rules by the name in `tokenizer.ggml.pre`. The patterns are those of the models' tokenizer.json. Names, bos and whole
words follow llama.cpp.
"""
for _names, _rule in (
    ("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2", _LLAMA3_RULE),
    ("dbrx smaug-bpe glm4 chatglm-bpe", SplitRule((_LLAMA3,))),
    ("deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open", SplitRule((_QWEN2,))),
    ("gpt-4o llama4 kanana2", SplitRule((_GPT4O,))),
    ("gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 mpt olmo jais trillion granite-docling", GPT2_RULE),
    ("smollm starcoder refact command-r codeshell exaone minerva-7b", SplitRule((r"\p{N}", _GPT2))),
):
    SPLIT_RULES |= dict.fromkeys(_names.split(), _rule)


class PieceToken(NamedTuple):
    """A token that is matched in the text before any merging."""

    piece: str
    special: bool  # a control token, which decoded text omits


def build_byte_level(
    ids: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    rule: SplitRule,
    added: Iterable[PieceToken],
    *,
    bos: str | None,
    eos: str | None,
) -> Any:
    """Return a `tokenizers.Tokenizer`.

    Args:
      ids: the vocabulary. merges: in the order of their priority.
      added: tokens that are matched in the text before any merging.
      bos, eos: pieces to put before and after a text; None: nothing.
    """
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

    backend = tokenizers.Tokenizer(models.BPE(vocab=dict(ids), merges=list(merges), ignore_merges=rule.whole_words))
    splits = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in rule.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    if rule.nfc:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([tokenizers.AddedToken(t.piece, normalized=False, special=t.special) for t in added])
    prefix, suffix = ([] if piece is None else [piece] for piece in (bos, eos))
    if prefix or suffix:
        backend.post_processor = processors.TemplateProcessing(
            single=[*prefix, "$A", *suffix],
            special_tokens=[(piece, backend.token_to_id(piece)) for piece in {*prefix, *suffix}],
        )
    return backend


def read_merges(lines: Iterable[str], ids: Mapping[str, int], where: str) -> list[tuple[str, str]]:
    """Return the merges "left right" as pairs. Raises: UsageError for a merge of pieces that the vocabulary lacks."""
    merges = []
    for line in lines:
        left, _, right = line.partition(" ")
        if left not in ids or right not in ids or left + right not in ids:
            raise UsageError(
                f"{where} has the merge {quote(line)} of pieces that its vocabulary lacks; download it again"
            )
        merges.append((left, right))
    return merges


def check_merges(has_merges: bool, pieces: Iterable[str], where: str, name: str) -> None:
    """Check that a vocabulary with pieces of several letters has merges, which alone lead to them.

    Args:
      has_merges: whether it has any. pieces: the vocabulary without tokens that are matched before any merging.
      where: the file. name: the list of merges in it.

    Raises: UsageError if it has none.
    """
    if not has_merges and any(len(piece) > 1 for piece in pieces):
        raise UsageError(
            f"{where} lacks {name}, and without merges all text falls into single letters; download the complete model"
        )
