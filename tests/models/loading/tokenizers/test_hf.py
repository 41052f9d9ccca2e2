"""Tokenizers of folders with other files than tokenizer.json, and with files beside it, as transformers reads them."""

from __future__ import annotations

import dataclasses
import json
import struct
from pathlib import Path

import pytest
from hostile import as_json, attacks, changed_bytes, changed_json, survives
from vocabularies import byte_level_vocabulary, spm_vocabulary

from specjax.errors import UsageError
from specjax.models.loading import load_tokenizer
from specjax.models.loading.tokenizers.hf import from_folder

CHAT = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
HELLO = [{"role": "user", "content": "hello"}]
END = "<|im_end|>"
SAVED = {"content": END, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}


def write(folder: Path, **files) -> Path:
    """Write objects to NAME.json and texts to NAME, in which __ is a full stop."""
    for name, contents in files.items():
        if isinstance(contents, dict | list):
            (folder / f"{name}.json").write_text(json.dumps(contents))
        else:
            (folder / name.replace("__", ".")).write_text(contents)
    return folder


def library_folder(folder: Path, added=("<s>", "</s>"), **files) -> Path:
    """Write a folder with a byte-level tokenizer.json. Its first free id is 267."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    pieces, _, merges = byte_level_vocabulary(("hello", " world"))
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[tuple(merge.split()) for merge in merges])
    )
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_tokens([tokenizers.AddedToken(piece, special=True, normalized=False) for piece in added])
    backend.save(str(folder / "tokenizer.json"))
    return write(folder, **({"config": {"model_type": "llama"}} | files))


COMPANIONS = {
    "special_tokens_map.json": {
        "tokenizer_config": {"chat_template": CHAT},
        "special_tokens_map": {"bos_token": "<s>", "eos_token": {"content": "</s>"}},
    },
    "special_tokens_map.json before tokenizer_config.json": {
        "tokenizer_config": {"chat_template": CHAT, "bos_token": "hello", "eos_token": "</s>"},
        "special_tokens_map": {"bos_token": "<s>"},
    },
    "added_tokens_decoder": {
        "tokenizer_config": {"chat_template": CHAT, "bos_token": "<s>", "eos_token": END}
        | {"added_tokens_decoder": {"267": SAVED}, "tokenizer_class": "PreTrainedTokenizerFast"},
    },
    "added_tokens_decoder changes how a token is matched": {
        "tokenizer_config": {"chat_template": CHAT + " {{ eos_token }}  hello", "bos_token": "<s>", "eos_token": "</s>"}
        | {"added_tokens_decoder": {"266": SAVED | {"content": "</s>", "rstrip": True, "lstrip": True}}},
    },
    "added_tokens.json": {
        "tokenizer_config": {"chat_template": CHAT, "bos_token": "<s>", "eos_token": END},
        "added_tokens": {END: 267},
    },
    "a name alone": {"tokenizer_config": {"chat_template": CHAT, "bos_token": "<s>", "eos_token": END}},
    "a name of a plain piece": {"tokenizer_config": {"chat_template": CHAT, "bos_token": "w", "eos_token": "</s>"}},
    "additional_special_tokens": {
        "tokenizer_config": {"chat_template": CHAT + END, "bos_token": "<s>", "additional_special_tokens": [END]},
    },
    "extra_special_tokens": {
        "tokenizer_config": {"chat_template": CHAT + END, "bos_token": "<s>", "extra_special_tokens": [END]},
    },
    "no names of Llama's class for a byte-level vocabulary": {
        "tokenizer_config": {"chat_template": CHAT, "tokenizer_class": "LlamaTokenizerFast"}
    },
}


@pytest.mark.parametrize("name", COMPANIONS)
def test_companions_as_transformers_reads_them(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    library_folder(tmp_path, **COMPANIONS[name])
    ours, theirs = from_folder(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(HELLO, return_dict=False)
    assert ours.chat(HELLO) == expected
    assert ours.names.get("bos_token") == theirs.bos_token
    assert len(ours.vocab) == len(theirs)
    assert ours.decode(expected) == theirs.decode(expected, skip_special_tokens=True)
    assert END not in ours.vocab or ours.vocab.index(END) in ours.eos


@pytest.mark.parametrize("decoder", [False, True])
def test_only_added_tokens_decoder_changes_tokenizer_json(decoder, tmp_path):
    import tokenizers

    transformers = pytest.importorskip("transformers")
    library_folder(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_tokens(
        [tokenizers.AddedToken(END, special=True, rstrip=True), tokenizers.AddedToken("<x>", lstrip=True)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    settings = {"chat_template": CHAT + "  " + END + "  hello <x>", "eos_token": END, "bos_token": "<s>"}
    settings |= {"added_tokens_decoder": {"267": SAVED, "268": SAVED | {"content": "<x>"}}} if decoder else {}
    write(tmp_path, tokenizer_config=settings, added_tokens={"<x>": 268})
    ours, theirs = from_folder(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours.chat(HELLO) == theirs.apply_chat_template(HELLO, return_dict=False)


def test_names_of_a_class(tmp_path):
    library_folder(tmp_path, added=("<|endoftext|>",), tokenizer_config={"tokenizer_class": "Qwen2Tokenizer"})
    assert from_folder(tmp_path).names["eos_token"] == "<|endoftext|>"
    write(tmp_path, tokenizer_config={"tokenizer_class": "Qwen2Tokenizer", "eos_token": None})
    assert "eos_token" not in from_folder(tmp_path).names


def test_an_end_of_a_turn_that_is_typed_as_text(tmp_path):
    import tokenizers

    library_folder(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_tokens([tokenizers.AddedToken("<|end|>", special=False, normalized=False)])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = from_folder(tmp_path)
    assert tokenizer.eos == (266, 267) and tokenizer.decode(tokenizer.encode("hello<|end|>")) == "hello"


WRONG = {
    "gives the token .* the id 300, but 267 is the next free id": {"added_tokens": {END: 300}},
    "gives the token .* the id 3, but 265 is its id": {"added_tokens": {"<s>": 3}},
    "gives the token .* the id -1": {"added_tokens": {END: -1}},
    "which must be an object of tokens by id": {"tokenizer_config": {"added_tokens_decoder": {"x": SAVED}}},
    "neither the vocabulary nor the model with its 267 rows": {
        "tokenizer_config": {"eos_token": END}, "config": {"vocab_size": 267}
    },
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_companions_that_do_not_fit(message, tmp_path):
    library_folder(tmp_path, **WRONG[message])
    with pytest.raises(UsageError, match=message):
        from_folder(tmp_path)


def test_a_padding_token_without_a_row_is_left_out(tmp_path):
    library_folder(tmp_path, tokenizer_config={"pad_token": "[PAD]"}, config={"vocab_size": 267})
    assert len(from_folder(tmp_path).vocab) == 267


# Folders without tokenizer.json.


def vocabulary_folder(folder: Path, **files) -> Path:
    pieces, _, merges = byte_level_vocabulary(("hello", " world", "##"))
    return write(
        folder,
        **{
            "vocab": {piece: i for i, piece in enumerate(pieces)},
            "merges__txt": "#version: 0.2\n" + "\n".join(merges) + "\n",
            "config": {"model_type": "qwen2"},
            "tokenizer_config": {"tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "eos_token": END}
            | {"chat_template": CHAT}
            | {"added_tokens_decoder": {str(len(pieces)): SAVED}},
        }
        | files,
    )


@pytest.mark.parametrize("name", ["Qwen2Tokenizer", "Qwen2TokenizerFast", "GPT2Tokenizer"])
def test_vocabulary_and_merges_as_transformers_reads_them(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    vocabulary_folder(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"tokenizer_class": name}
    write(tmp_path, tokenizer_config=settings)
    ours = from_folder(tmp_path)
    theirs = getattr(transformers, name).from_pretrained(tmp_path)
    for text in ("hello world", "## hello\n\n 123 e\u0301 Don't", f"hello{END} world", "", "中文"):
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)
    assert ours.chat(HELLO) == theirs.apply_chat_template(HELLO, return_dict=False)
    assert ours.vocab.index(END) in ours.eos


@pytest.mark.parametrize(
    "settings",
    [
        {"tokenizer_class": "DreamTokenizer", "auto_map": {"AutoTokenizer": ["dream.DreamTokenizer", None]}},
        {"auto_map": {"AutoTokenizer": ["dream.DreamTokenizer", None]}},
        {},
    ],
)  # fmt: skip
def test_folders_of_dream_and_diffucoder(settings, tmp_path):
    """The class of these folders is read as Qwen2's, of which it is a copy. Its code, which the folder has, is not
    run."""
    vocabulary_folder(tmp_path)
    expected = from_folder(tmp_path).encode("hello world 123")
    mask = SAVED | {"content": "<|mask|>"}
    settings = settings | {"mask_token": "<|mask|>", "added_tokens_decoder": {"266": SAVED, "267": mask}}
    write(tmp_path, tokenizer_config=settings, config={"model_type": "Dream"}, dream__py="raise 1")
    tokenizer = from_folder(tmp_path)
    assert tokenizer.encode("hello world 123") == expected
    assert tokenizer.encode("<|mask|>") == [267] and tokenizer.names["mask_token"] == "<|mask|>"


VOCABULARY_WRONG = {
    "vocab.json without merges.txt, and without merges all text falls into single letters": {"merges__txt": None},
    "merges.txt lacks merges": {"merges__txt": "#version: 0.2\n"},
    'the merge "x y" of pieces that its vocabulary lacks': {"merges__txt": "x y\n"},
    "does not number its 2 pieces from 0": {"vocab": {"a": 1, "b": 2}},
    "merges without vocab.json": {"vocab.json": None},
    'of the tokenizer "OtherTokenizer", and specjax never runs code': {
        "tokenizer_config": {"tokenizer_class": "OtherTokenizer"}
    },
}


@pytest.mark.parametrize("message", VOCABULARY_WRONG)
def test_vocabularies_that_lack_what_they_need(message, tmp_path):
    changes = VOCABULARY_WRONG[message]
    vocabulary_folder(tmp_path, **{name: value for name, value in changes.items() if value is not None})
    for name in (name for name, value in changes.items() if value is None):
        (tmp_path / name.replace("__", ".")).unlink()
    with pytest.raises(UsageError, match=message):
        from_folder(tmp_path)


def test_a_tokenizer_json_without_merges_is_refused(tmp_path):
    library_folder(tmp_path)
    document = json.loads((tmp_path / "tokenizer.json").read_text())
    document["model"]["merges"] = []
    write(tmp_path, tokenizer=document)
    with pytest.raises(UsageError, match=r"tokenizer.json lacks merges, and without merges all text falls into single"):
        from_folder(tmp_path)


# tokenizer.model of SentencePiece.


def varint(n: int) -> bytes:
    return bytes([n & 127 | 128]) + varint(n >> 7) if n > 127 else bytes([n])


def message(number: int, contents: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(contents)) + contents


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def spm_bytes(words=("▁hello", "▁x"), user=(), trainer=b"", normalizer=b"") -> bytes:
    """Return a file of algorithm bpe with the settings of Llama's. The letters of `words` have descending scores."""
    entries = zip(*spm_vocabulary(words, user=user), strict=True)
    score = lambda value: varint(2 << 3 | 5) + struct.pack("<f", value)
    pieces = [message(1, p.encode()) + score(s) + (number(3, t) if t != 1 else b"") for p, t, s in entries]
    trainer = number(3, 2) + number(35, 1) + trainer
    normalizer = message(1, b"identity") + number(3, 1) + number(4, 0) + normalizer
    return b"".join(message(1, piece) for piece in pieces) + message(2, trainer) + message(3, normalizer)


def spm_folder(folder: Path, settings: dict, **options) -> Path:
    (folder / "tokenizer.model").write_bytes(spm_bytes(**options))
    return write(folder, tokenizer_config=settings, config={"model_type": "llama"})


def spell(tokenizer, text, **options) -> list[str]:
    return [tokenizer.vocab[i] for i in tokenizer.encode(text, **options)]


def test_tokenizer_model_alone(tmp_path):
    """Vicuna's kind of folder. Names, bos and the dummy space come from the file."""
    tokenizer = from_folder(spm_folder(tmp_path, {"chat_template": CHAT}))
    assert spell(tokenizer, "hello x\n") == ["<s>", "▁hello", "▁x", "<0x0A>"]
    assert tokenizer.names == {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"} and tokenizer.eos == (2,)
    assert [tokenizer.vocab[i] for i in tokenizer.chat(HELLO)] == ["<s>", "▁hello", "</s>"]
    assert tokenizer.decode(tokenizer.encode("hello x")) == "hello x"


def test_settings_of_a_tokenizer_model(tmp_path):
    text = "<s>hello</s>hello"
    spelled = lambda **settings: spell(from_folder(spm_folder(tmp_path, settings)), text, special=False)
    assert spelled() == ["<s>", "▁hello", "</s>", "▁hello"]
    assert spelled(legacy=False) == ["<s>", "hello"[0], *"ello", "</s>", *"hello"]
    assert spelled(add_prefix_space=False) == ["<s>", *"hello", "</s>", *"hello"]
    tokenizer = from_folder(spm_folder(tmp_path, {"add_bos_token": False, "add_eos_token": True}))
    assert spell(tokenizer, "x") == ["▁x", "</s>"]
    tokenizer = from_folder(spm_folder(tmp_path, {"eos_token": "<unk>"}, normalizer=number(3, 0)))
    assert spell(tokenizer, "x") == ["<s>", "x"] and tokenizer.eos == (0, 2)


def test_tokens_added_to_a_tokenizer_model(tmp_path):
    count = len(spm_vocabulary(("▁hello", "▁x"))[0])
    settings = {"eos_token": END, "added_tokens_decoder": {str(count): SAVED | {"rstrip": True}}}
    tokenizer = from_folder(spm_folder(tmp_path, settings))
    assert spell(tokenizer, f"hello{END}\nx", special=False) == ["▁hello", END, "▁x"]
    assert tokenizer.eos == (2, count) and tokenizer.decode([count]) == ""
    write(tmp_path, tokenizer_config=settings | {"added_tokens_decoder": {"5": SAVED}})
    with pytest.raises(UsageError, match="the id 5, but"):
        from_folder(tmp_path)


SPM_WRONG = {
    "the algorithm unigram": {"trainer": number(3, 1)},
    "remove_extra_whitespaces": {"normalizer": number(4, 1)},
    "a map of characters": {"normalizer": message(2, b"abc")},
    "spaces as suffixes": {"trainer": number(24, 1)},
}


@pytest.mark.parametrize("problem", SPM_WRONG)
def test_rules_of_sentencepiece_that_are_refused(problem, tmp_path):
    spm_folder(tmp_path, {}, **SPM_WRONG[problem])
    with pytest.raises(UsageError, match=f"has {problem}, which specjax does not support; use .* tokenizer.json"):
        from_folder(tmp_path)


@pytest.mark.parametrize("contents", [b"", b"IQ== 0\nIg== 1\n", spm_bytes()[:-1000], b"\x0a\xff", b"{}"])
def test_files_of_another_format(contents, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(contents)
    with pytest.raises(UsageError, match=r"is not a whole file of SentencePiece .* download the tokenizer.json of the"):
        from_folder(tmp_path)


def test_against_sentencepiece(tmp_path):
    """The ids are those of a model that the library trains, where it is installed."""
    sentencepiece = pytest.importorskip("sentencepiece")
    source = Path(__file__).read_text()
    (tmp_path / "text").write_text(source)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "tokenizer"), vocab_size=600, model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
    )  # fmt: skip
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    ours = from_folder(tmp_path)
    lines = [line for line in source.split("\n") if not any(piece in line for piece in theirs.id_to_piece([0, 1, 2]))]
    for text in [*lines, "=====", " 中文 é\t", "   "]:
        assert ours.encode(text, special=False) == theirs.encode(text), text


# Chat templates.

TEMPLATES = {
    "a list with a default": {"tokenizer_config": {"chat_template": [{"name": "default", "template": CHAT}]}},
    "a list without a default": {"tokenizer_config": {"chat_template": [{"name": "rag", "template": CHAT}]}},
    "files": {"chat_template__jinja": CHAT, "tokenizer_config": {"chat_template": "unused"}},
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_where_templates_are(name, tmp_path):
    files = TEMPLATES[name]
    settings = files["tokenizer_config"] | {"bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = from_folder(library_folder(tmp_path, **files | {"tokenizer_config": settings}))
    if "without" in name:
        with pytest.raises(UsageError, match='no chat template called "default", only "rag"'):
            tokenizer.chat(HELLO)
        assert tokenizer.encode("hello") == [259]
    else:
        assert tokenizer.chat(HELLO) == [265, 259, 266]


@pytest.mark.parametrize("listed", [[1, {"template": "x"}], [], {"default": 7}, 7])
def test_templates_that_name_nothing_are_refused(listed, tmp_path):
    tokenizer = from_folder(library_folder(tmp_path, tokenizer_config={"chat_template": listed}))
    with pytest.raises(UsageError, match="chat template is not text"):
        tokenizer.chat(HELLO)


# Variables of chat templates.

TOOLS = [{"type": "function", "function": {"name": "hello", "description": "world", "parameters": {"type": "object"}}}]
QWEN3 = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token }}{% if enable_thinking is defined and enable_thinking is false %}"
    " world{% endif %}{% endif %}{% if documents %}{{ documents[0].text }}{% endif %}"
    "{% if tools is not none and tools is not defined %}never{% endif %}{{ effort | default('') }}"
)
VARIABLES = [
    {}, {"enable_thinking": False}, {"enable_thinking": True}, {"tools": TOOLS}, {"tools": None}, {"effort": "high"},
    {"documents": [{"title": "a", "text": " hello"}]}, {"bos_token": "</s>"}, {"add_generation_prompt": False},
    {"tools": TOOLS, "enable_thinking": False, "effort": 3},
]  # fmt: skip


@pytest.fixture
def with_variables(tmp_path):
    return library_folder(tmp_path, tokenizer_config={"chat_template": QWEN3, "bos_token": "<s>", "eos_token": "</s>"})


@pytest.mark.parametrize("variables", VARIABLES)
def test_variables_as_transformers_renders_them(variables, with_variables):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(with_variables)
    options = {"add_generation_prompt": True} | variables
    expected = theirs.apply_chat_template(HELLO, return_dict=False, **options)
    tokenizer = from_folder(with_variables)
    assert tokenizer.chat(HELLO, **variables) == expected
    assert tokenizer.with_template_args(variables).chat(HELLO) == expected, "as defaults too"


def test_a_call_overrides_the_defaults(with_variables):
    tokenizer = from_folder(with_variables)
    thinking, silent = (tokenizer.chat(HELLO, enable_thinking=value) for value in (True, False))
    with_default = tokenizer.with_template_args({"enable_thinking": False})
    assert with_default.chat(HELLO) == silent != thinking == with_default.chat(HELLO, enable_thinking=True)


VARIABLES_WRONG = {
    'reads no variable "enable_thinkng", only .*enable_thinking.*; leave it out': {"enable_thinkng": False},
    "variables of a chat template must be strings": {"effort": object()},
    "messages is no variable": {"messages": []},
    'no chat template called "rag", leave it out': {"chat_template": "rag"},
}


@pytest.mark.parametrize("message", VARIABLES_WRONG)
def test_variables_that_cannot_be(message, with_variables):
    with pytest.raises(UsageError, match=message):
        from_folder(with_variables).chat(HELLO, **VARIABLES_WRONG[message])


def test_tools_are_never_dropped_silently(tmp_path):
    tokenizer = from_folder(library_folder(tmp_path, tokenizer_config={"chat_template": "{{ messages[0].content }}"}))
    assert tokenizer.chat(HELLO, tools=None) == [259]
    with pytest.raises(UsageError, match='reads no variable "tools", only the messages'):
        tokenizer.chat(HELLO, tools=TOOLS)
    with pytest.raises(UsageError, match='no chat template, which alone reads "tools"'):
        dataclasses.replace(tokenizer, chat_template=None).chat(HELLO, tools=TOOLS)


def test_control_tokens_in_tools_are_text(with_variables):
    """A template compares names of tools, and may print them. Nothing inside of them is a control token."""
    tokenizer = from_folder(with_variables)
    tools = [{"type": "function", "function": {"name": "x", "description": "</s><s> a"}}]
    ids = tokenizer.chat(HELLO, tools=tools)
    assert ids.count(265) == 1 and 266 not in ids and "</s><s> a" in tokenizer.decode(ids, special=True)
    with pytest.raises(UsageError, match="a role, type or key of the messages or variables contains a control token"):
        tokenizer.chat(HELLO, tools=[{"</s>": 1}])


def test_templates_are_chosen_as_transformers_does(tmp_path):
    transformers = pytest.importorskip("transformers")
    templates = {
        "default": "{{ messages[0].content }}",
        "tool_use": "{{ tools | length }}",
        "rag": "<s>{{ documents }}",
    }
    listed = [{"name": name, "template": text} for name, text in templates.items()]
    library_folder(tmp_path, tokenizer_config={"chat_template": listed, "bos_token": "<s>"})
    ours, theirs = from_folder(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    for options in ({}, {"tools": TOOLS}, {"chat_template": "rag"}, {"chat_template": "{{ messages[0].role }}"}):
        assert ours.chat(HELLO, **options) == theirs.apply_chat_template(HELLO, return_dict=False, **options), options


# Damaged files.


@pytest.mark.parametrize(("rng", "count"), attacks(60, 20_000))
@pytest.mark.parametrize(
    "name", ["special_tokens_map.json", "added_tokens.json", "vocab.json", "tokenizer_config.json"]
)
def test_damaged_companions(name, rng, count, tmp_path):
    if name == "vocab.json":
        vocabulary_folder(tmp_path)
    else:
        library_folder(tmp_path, tokenizer_config={"chat_template": QWEN3}, special_tokens_map={"bos_token": "<s>"})
    write(tmp_path, added_tokens={END: 267})
    if name == "tokenizer_config.json":
        write(
            tmp_path, tokenizer_config={"added_tokens_decoder": {"267": SAVED}, "extra_special_tokens": [SAVED, "<s>"]}
        )
    document = json.loads((tmp_path / name).read_text())
    for case in range(count):
        contents = as_json(rng, changed_json(rng, document))
        (tmp_path / name).write_bytes(contents)
        survives(
            lambda: load_tokenizer(tmp_path).decode(load_tokenizer(tmp_path).chat("hello")), (case, contents[:500])
        )


@pytest.mark.parametrize(("rng", "count"), attacks(60, 20_000))
def test_damaged_models_of_sentencepiece(rng, count, tmp_path):
    contents = spm_bytes()
    for case in range(count):
        (tmp_path / "tokenizer.model").write_bytes(changed_bytes(rng, contents))
        survives(lambda: load_tokenizer(tmp_path).decode(load_tokenizer(tmp_path).encode("hello x")), case)
