"""Tokenizers from the metadata of GGUF files.

Built from the vocabulary itself: the way through `transformers` takes 6 to 20 s, and cuts SmolLM2's text as GPT-2's.
"""

from __future__ import annotations

from specjax.errors import UsageError
from specjax.models.loading.spm import SPACE, Spm
from specjax.models.loading.tokenizer import LibraryCodec, Tokenizer, end_ids

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # tokenizer.ggml.token_type

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
SPLITS = {"qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2}
SPLITS |= dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "smaug-bpe"), _LLAMA3)
"""How text is cut before byte-level merging, by `tokenizer.ggml.pre`; besides the GPT-2 rule."""


def from_metadata(meta: dict, where: str) -> Tokenizer:
    """From the metadata of a GGUF file."""
    kind = meta.get("tokenizer.ggml.model")
    if not meta.get("tokenizer.ggml.tokens"):
        raise UsageError(f"{where} holds no tokenizer, so it is not a whole model")
    if kind not in ("gpt2", "llama"):
        raise UsageError(f'{where} has a tokenizer of type "{kind}", which specjax does not support (only gpt2, llama)')
    pieces = _pieces(meta)
    types = meta.get("tokenizer.ggml.token_type") or [NORMAL] * len(pieces)
    control = [i for i, t in enumerate(types) if t == CONTROL]
    codec = (_byte_level if kind == "gpt2" else _sentencepiece)(meta, pieces, types, where)
    used = len(pieces)
    while used and types[used - 1] == UNUSED:  # rows that only pad the embedding
        used -= 1
    stated = [meta[key] for key in (f"tokenizer.ggml.{n}_token_id" for n in ("eos", "eot", "eom")) if key in meta]
    names = {
        f"{name}_token": pieces[meta[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if meta.get(f"tokenizer.ggml.{key}_token_id", len(pieces)) < len(pieces)
    }
    vocab = tuple(pieces[:used])
    return Tokenizer(codec, vocab, end_ids(vocab, control, stated), meta.get("tokenizer.chat_template"), names)


def _pieces(meta: dict) -> list[str]:
    """The vocabulary. Gemma files spell runs of spaces as spaces; the merges need them as ▁."""
    return [SPACE * len(p) if p and not p.strip(" ") else p for p in meta["tokenizer.ggml.tokens"]]


def _sentencepiece(meta: dict, pieces: list[str], types: list[int], where: str) -> Spm:
    # Gemma's scores do not follow the order in which its merges were learned; the order of the vocabulary does.
    by_order = str(meta.get("general.architecture", "")).startswith("gemma")
    scores = None if by_order else meta.get("tokenizer.ggml.scores")

    def get(name: str, default):
        return meta.get(f"tokenizer.ggml.{name}", default)

    return Spm(
        tuple(pieces),
        tuple(scores) if scores else tuple(-float(i) for i in range(len(pieces))),
        whole=frozenset(i for i, t in enumerate(types) if t in (CONTROL, USER_DEFINED)),
        hidden=frozenset(i for i, t in enumerate(types) if t == CONTROL),
        unknown=get("unknown_token_id", 0),
        bos=get("bos_token_id", 1) if get("add_bos_token", True) else None,
        eos=get("eos_token_id", 2) if get("add_eos_token", False) else None,
        dummy_prefix=get("add_space_prefix", True),
    )


def _byte_level(meta: dict, pieces: list[str], types: list[int], where: str) -> LibraryCodec:
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

    pre = meta.get("tokenizer.ggml.pre", "default")
    merges = [tuple(m.split(" ", 1)) for m in meta.get("tokenizer.ggml.merges", ())]
    ids = {piece: i for i, piece in reversed(list(enumerate(pieces)))}
    llama3 = SPLITS.get(pre) == _LLAMA3
    backend = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=llama3))
    if pre in SPLITS:
        split = pre_tokenizers.Split(tokenizers.Regex(SPLITS[pre]), "isolated")
        cut = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    elif pre in ("smollm", "gpt-2", "default"):
        digits = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
        cut = [*digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    else:
        raise UsageError(f'{where} has a tokenizer with pre-tokenizer "{pre}", which specjax does not support')
    backend.pre_tokenizer = pre_tokenizers.Sequence(cut)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    added = [
        tokenizers.AddedToken(piece, normalized=False, special=t == CONTROL)
        for piece, t in zip(pieces, types, strict=True)
        if t in (CONTROL, USER_DEFINED)
    ]
    backend.add_tokens(added)
    bos, eos = (meta.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos"))
    before = [pieces[bos]] if bos is not None and meta.get("tokenizer.ggml.add_bos_token", llama3) else []
    behind = [pieces[eos]] if eos is not None and meta.get("tokenizer.ggml.add_eos_token", False) else []
    if before or behind:
        backend.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *behind], special_tokens=[(p, ids[p]) for p in {*before, *behind}]
        )
    return LibraryCodec(backend)
