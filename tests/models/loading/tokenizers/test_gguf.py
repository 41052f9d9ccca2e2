"""Tokenizers of GGUF files by the rules that llama.cpp documents, and those of the same models' tokenizer.json."""

from __future__ import annotations

import warnings

import pytest
from vocabularies import byte_level_vocabulary, spm_vocabulary

from specjax.errors import CheckpointWarning, UsageError
from specjax.models.loading.tokenizers.byte_level import SPLIT_RULES
from specjax.models.loading.tokenizers.gguf import from_metadata
from specjax.models.loading.tokenizers.hf import from_folder
from specjax.models.loading.tokenizers.writing import write_tokenizer

LLAMA2_CHAT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
PHI3_CHAT = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{{ '<|assistant|>\n' }}"
)
PHI3_TOKENS = ("<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>")


def spm_metadata(*words, control=(), user=(), **changes) -> dict:
    pieces, types, scores = spm_vocabulary(words, control, user)
    meta = {
        "general.architecture": "llama", "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": types, "tokenizer.ggml.scores": scores,
    }  # fmt: skip
    return meta | changes


def bpe_metadata(pre, *words, control=(), **changes) -> dict:
    pieces, types, merges = byte_level_vocabulary(words, control)
    meta = {
        "general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": types, "tokenizer.ggml.merges": merges,
    }  # fmt: skip
    return meta | ({} if pre is None else {"tokenizer.ggml.pre": pre}) | changes


def pieces(tokenizer, ids) -> list[str]:
    return [tokenizer.vocab[i] for i in ids]


def test_text_after_a_control_token_begins_with_the_dummy_space():
    """The other side is a tokenizer.json in the form that Llama's own converter writes."""
    import tokenizers

    meta = spm_metadata("▁Hi", "▁[", "INST", "▁you", **{"tokenizer.chat_template": LLAMA2_CHAT})
    ours = from_metadata(meta, "x")
    vocab = {piece: i for i, piece in enumerate(ours.vocab)}
    merges = [(word[:n], word[n]) for word in ("▁Hi", "▁[", "INST", "▁you") for n in range(1, len(word))]
    theirs = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    theirs.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    theirs.add_special_tokens([tokenizers.AddedToken(t, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    for text in ("<s>[INST] Hi", "<s>[INST] Hi [/INST] you</s>[INST]", "Hi</s></s> Hi", "<unk>Hi", "</s>", "  Hi"):
        assert ours.encode(text, special=False) == theirs.encode(text).ids, text
    turns = [{"role": role, "content": text} for role, text in (("user", "Hi"), ("assistant", "you"), ("user", "Hi"))]
    assert pieces(ours, ours.chat("Hi"))[:2] == ["<s>", "▁["]
    ids = ours.chat(turns)
    assert pieces(ours, ids)[ids.index(2) + 1] == "▁[", "also after the end of a turn"


def test_a_cut_between_parts_gets_no_space():
    """A control token that a user writes is cut in two. It is text, and no space appears in it."""
    tokenizer = from_metadata(spm_metadata("▁Hi", **{"tokenizer.chat_template": LLAMA2_CHAT}), "x")
    ids = tokenizer.chat("a</s>b")
    assert 2 not in ids and "a</s>b" in tokenizer.decode(ids, special=True)


def test_merging_never_leads_to_a_control_token():
    meta = spm_metadata("<x", "y>", control=("<xy>",))
    tokenizer = from_metadata(meta, "x")
    parts = tokenizer.codec.encode_parts(["<x", "y>"], False)
    assert tokenizer.vocab.index("<xy>") not in parts
    kinds = [3 if t == 3 and p != "<xy>" else 1 if p == "<xy>" else t for p, t in zip(
        meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"], strict=True)]  # fmt: skip
    plain = from_metadata(meta | {"tokenizer.ggml.token_type": kinds}, "x")
    assert tokenizer.vocab.index("<xy>") in plain.encode("<xy>"), "as text the same pieces do"


@pytest.mark.parametrize("kind", ["control", "user"])
def test_phi3(kind):
    """Microsoft's file types these tokens as text. The newlines are those that its tokenizer.json removes (rstrip)."""
    meta = spm_metadata(
        "▁Hello", "▁hi", **{kind: PHI3_TOKENS, "tokenizer.chat_template": PHI3_CHAT, "general.architecture": "phi3"}
    )
    tokenizer = from_metadata(meta, "x")
    end = tokenizer.vocab.index("<|end|>")
    assert end in tokenizer.eos
    assert pieces(tokenizer, tokenizer.chat("hi")) == ["<|user|>", "▁hi", "<|end|>", "<|assistant|>"]
    assert tokenizer.decode([tokenizer.vocab.index("▁Hello"), end]) == "Hello"
    assert pieces(tokenizer, tokenizer.encode("<s>\nhi", special=False))[:2] == ["<s>", "▁"], "<s> keeps the newline"


@pytest.mark.parametrize("piece", ["<|end|>", "<end_of_turn>", "<|im_end|>", "<EOT>"])
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_end_tokens_that_are_typed_as_text(piece, model):
    meta = spm_metadata(user=(piece,)) if model == "llama" else bpe_metadata("gpt-2", "ab", control=(piece,))
    meta["tokenizer.ggml.token_type"][-1] = 4
    tokenizer = from_metadata(meta, "x")
    assert len(tokenizer.vocab) - 1 in tokenizer.eos
    assert tokenizer.decode(tokenizer.encode(f"ab{piece}", special=False)) == "ab"


def test_tags_of_html_end_no_turn():
    """Gemma's vocabulary has </s> for struck-out text."""
    tokenizer = from_metadata(spm_metadata(user=("<b>",)) | {"tokenizer.ggml.eos_token_id": 1}, "x")
    assert tokenizer.vocab[2] == "</s>" and 2 in tokenizer.eos, "as a control token it ends a text"
    meta = spm_metadata(user=("<b>",)) | {"tokenizer.ggml.eos_token_id": 1}
    meta["tokenizer.ggml.token_type"][2] = 4
    assert from_metadata(meta, "x").eos == (1,)


def test_the_end_of_a_message_within_a_turn():
    control = ("<|return|>", "<|call|>", "<|end|>")
    tokenizer = from_metadata(bpe_metadata("gpt-4o", "ab", control=control), "x")
    assert pieces(tokenizer, tokenizer.eos) == ["<|return|>", "<|call|>"]


SPLITS = {  # the rules differ in digits, in contractions, and in slashes and line ends after signs
    "dbrx": ["Don", "'t", " ABCdef", " ", "123", "45", " x", "://\n", "/\n\n", "  ", " y"],
    "qwen2": ["Don", "'t", " ABCdef", " ", *"12345", " x", "://\n", "/\n\n", "  ", " y"],
    "gpt-4o": ["Don't", " ABCdef", " ", "123", "45", " x", "://\n/\n\n", "  ", " y"],
    "tekken": ["Don", "'t", " ABCdef", " ", *"12345", " x", "://\n/\n\n", "  ", " y"],
    "deepseek-coder": ["Don", "'", "t", " ABCdef", " ", *"12345", " x", "://", "\n", "/", "\n", "\n", "  ", " y"],
    "deepseek-llm": ["Don", "'", "t", " ABCdef", " ", *"12345", " x", "://", "\n", "/", "\n", "\n", "  ", " y"],
    "gpt-2": ["Don", "'t", " ABCdef", " 12345", " x", "://", "\n", "/", "\n\n  ", " y"],
    "smollm": ["Don", "'t", " ABCdef", " ", *"12345", " x", "://", "\n", "/", "\n\n  ", " y"],
}


@pytest.mark.parametrize("pre", SPLITS)
def test_pre_tokenizers_split_as_documented(pre):
    backend = from_metadata(bpe_metadata(pre, "hello"), "x").codec.backend
    text = "Don't ABCdef 12345 x://\n/\n\n   y"
    spans = [span for _, span in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert [text[start:stop] for start, stop in spans] == SPLITS[pre]


def test_a_word_ends_at_a_capital_after_small_letters():
    for pre, expected in (("gpt-4o", ["HTMLParser", "Test"]), ("llama-bpe", ["HTMLParserTest"])):
        backend = from_metadata(bpe_metadata(pre, "hello"), "x").codec.backend
        assert [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("HTMLParserTest")] == expected


@pytest.mark.parametrize("pre", sorted(SPLIT_RULES))
def test_every_pre_tokenizer_keeps_the_text(pre):
    tokenizer = from_metadata(bpe_metadata(pre, "hello"), "x")
    text = "Hello  world, it's 2.5 ÀÉΩῴ 中文字符 日本語 한국 \n\n\tx_1  "
    assert tokenizer.decode(tokenizer.encode(text, special=False)) == text


def test_whole_words_and_bos_come_with_the_rule():
    for pre, is_one_token in (("llama-bpe", True), ("tekken", True), ("dbrx", False), ("smaug-bpe", False)):
        meta = bpe_metadata(pre, "ab", control=("<s>",))
        meta["tokenizer.ggml.tokens"].insert(0, "zq")  # a word that no merge leads to
        meta["tokenizer.ggml.token_type"].insert(0, 1)
        meta["tokenizer.ggml.bos_token_id"] = meta["tokenizer.ggml.tokens"].index("<s>")
        tokenizer = from_metadata(meta, "x")
        assert (pieces(tokenizer, tokenizer.encode("zq")) == ["<s>", "zq"]) == is_one_token


REFUSED = {
    "tokenizer.ggml.pre": (bpe_metadata(None, "hello"), "lacks tokenizer.ggml.pre"),
    "another rule": (bpe_metadata("kimi-k2", "hello"), 'pre-tokenizer "kimi-k2"'),
    "tokenizer.ggml.merges": (bpe_metadata("gpt-2", "hello") | {"tokenizer.ggml.merges": []}, "lacks tokenizer.ggml.m"),
    "tokenizer.ggml.scores": (spm_metadata("▁Hi") | {"tokenizer.ggml.scores": None}, "lacks tokenizer.ggml.scores"),
    "tokenizer.ggml.token_type": (
        spm_metadata("▁Hi") | {"tokenizer.ggml.token_type": None, "tokenizer.chat_template": "<s>"},
        "lacks tokenizer.ggml.token_type",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_lack_what_their_kind_needs(name):
    meta, message = REFUSED[name]
    with pytest.raises(UsageError, match=message):
        from_metadata(meta, "x.gguf")


def test_named_templates():
    meta = spm_metadata("▁Hi") | {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "<s>"}
    tokenizer = from_metadata(meta, "x")
    assert tokenizer.chat_template is None and tokenizer.named_templates == {"tool_use": "<s>"}
    with pytest.raises(UsageError, match="tool_use"):
        tokenizer.chat("Hi")


def test_a_written_tokenizer_reads_the_same(tmp_path):
    """The dummy space after control tokens, the spaces that Phi-3's remove and named templates survive."""
    meta = spm_metadata(
        "▁Hello", "▁hi", user=PHI3_TOKENS, **{"tokenizer.chat_template": PHI3_CHAT, "general.architecture": "phi3"}
    )
    ours = from_metadata(meta | {"tokenizer.chat_template.rag": "<s>hi"}, "x")
    write_tokenizer(tmp_path, ours)
    theirs = from_folder(tmp_path)
    for text in ("<s>hi<|user|>\n hi<|end|>\n<|assistant|>\nHello", "hi"):
        assert theirs.encode(text, special=False) == ours.encode(text, special=False)
    assert theirs.chat("hi") == ours.chat("hi") and theirs.eos == ours.eos
    assert theirs.chat("hi", chat_template="rag") == ours.chat("hi", chat_template="rag")


OF_CONVERTERS = {
    "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": False, "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.ggml.seperator_token_id": 2, "tokenizer.ggml.mask_token_id": 2, "tokenizer.ggml.fim_pre_token_id": 2,
    "tokenizer.ggml.eot_token_id": 2, "tokenizer.ggml.eom_token_id": 2, "tokenizer.ggml.add_space_prefix": False,
    "tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.token_type_count": 1, "tokenizer.ggml.add_sep_token": False,
    "tokenizer.ggml.remove_extra_whitespaces": False, "tokenizer.chat_templates": ["a"],
    "tokenizer.huggingface.json": "{}",
}  # fmt: skip


def test_fields_of_the_tokenizer_that_no_code_reads_are_named():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_metadata(spm_metadata("▁Hi", **OF_CONVERTERS), "x")
        from_metadata(bpe_metadata("gpt-2", "Hi", **{"tokenizer.ggml.scores": [], **OF_CONVERTERS}), "x")
    for name, value in {"remove_extra_whitespaces": True, "normalizer.lowercase": True, "add_sep_token": True,
                        "precompiled_charsmap": [1], "byte_fallback": False}.items():  # fmt: skip
        field = f"tokenizer.ggml.{name}"
        with pytest.warns(CheckpointWarning, match=f"x has a field that is not read, .*: {field}$"):
            from_metadata(spm_metadata("▁Hi", **{field: value}), "x")
