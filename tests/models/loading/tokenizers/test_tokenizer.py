"""Tokenizers against those of transformers, on text that is hard to split."""

import dataclasses
import itertools
import json
import random

import pytest

from specjax.models.loading import resolve
from specjax.models.loading.formats.gguf import read_header
from specjax.models.loading.tokenizers import spm
from specjax.models.loading.tokenizers.gguf import from_metadata
from specjax.models.loading.tokenizers.hf import from_folder
from specjax.models.loading.tokenizers.tokenizer import Tokenizer, end_ids, first_difference

TEXTS = [
    "Hello  world, it's 2 apples!\n\nNew  para.\n\n\n  indented\n\tTab",
    "def f(x):\n    return x**2  # square\n\n\nclass A:\n\tpass\n",
    "naïve café — “quotes” … 中文字符 日本語テキスト 한국어 русский עברית",
    "😀👩‍👩‍👧 family 🏳️‍🌈 \u200b zero",
    "   leading and trailing   ",
    "",
    "a",
    " ",
    "=======-----_____aaaaaaaaaaaaaaa",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<bos><start_of_turn>user\nhi<end_of_turn>",
    "\x00\x07 weird \r\n crlf",
    "I'LL we'Ve DON'T <b>bold</b><table>",
    "\n\n\n\n\n     \n",
]

SMOLLM2_CHAT = """<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
<|im_start|>user
Why is the sky blue?<|im_end|>
<|im_start|>assistant
"""


def gguf_tokenizer(file) -> Tokenizer:
    return from_metadata(read_header(file)[0], str(file))


@pytest.fixture(scope="module")
def smollm2():
    file = resolve(None)
    return file, gguf_tokenizer(file)


def compare_with_transformers(file, tokenizer: Tokenizer) -> None:
    """Compare ids and text of TEXTS and of random parts of them."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    rng, full = random.Random(0), "".join(TEXTS)
    starts = [rng.randrange(len(full)) for _ in range(100)]
    for text in TEXTS + [full[at : at + rng.randrange(1, 60)] for at in starts]:
        ids = theirs.encode(text)
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.encode(text, special=False) == theirs.encode(text, add_special_tokens=False), text
        assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
        assert tokenizer.decode(ids, special=True) == theirs.decode(ids), text


@pytest.mark.real
def test_smollm2_equals_transformers(smollm2):
    compare_with_transformers(*smollm2)


@pytest.mark.real
def test_smollm2_cuts_at_digits_first(smollm2):
    """Digits are cut before bytes, as in the model's own tokenizer.json; transformers' reading of the GGUF omits the
    digits."""
    _, tokenizer = smollm2
    pieces = [tokenizer.vocab[i] for i in tokenizer.encode("world\n\n123")]
    assert pieces == ["world", "ĊĊ", "1", "2", "3"]


@pytest.mark.real
def test_smollm2_chat_template(smollm2):
    _, tokenizer = smollm2
    ids = tokenizer.chat("Why is the sky blue?")
    assert tokenizer.decode(ids, special=True) == SMOLLM2_CHAT
    assert ids[0] == tokenizer.vocab.index("<|im_start|>"), "control tokens are one id each"
    assert tokenizer.chat([{"role": "user", "content": "Why is the sky blue?"}]) == ids
    assert tokenizer.eos == (0, 2)  # <|endoftext|> and <|im_end|>


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma-3-270m-q4_k_m.gguf", "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"])
def test_others_equal_transformers(name, weights):
    file = weights(name)
    compare_with_transformers(file, gguf_tokenizer(file))


@pytest.mark.real
@pytest.mark.slow
def test_qwen_pair_has_one_vocabulary(weights):
    target, draft = (gguf_tokenizer(weights(f"qwen2.5-coder-{n}-instruct-q4_k_m.gguf")) for n in ("1.5b", "0.5b"))
    assert first_difference(target, draft) is None
    assert target.eos == (151643, 151645)
    assert len(target.vocab) == 151665, "rows that pad the embedding are no tokens"


@pytest.mark.real
@pytest.mark.parametrize("text", TEXTS)
def test_round_trip_and_streaming(smollm2, text):
    """Text that a stream has shown never changes."""
    _, tokenizer = smollm2
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, special=True) == text
    shown = [tokenizer.decode(ids[:n]).rstrip("\ufffd") for n in range(len(ids) + 1)]
    assert all(b.startswith(a) for a, b in itertools.pairwise(shown))


def test_first_difference():
    a = Tokenizer(None, ("x", "y", "z"), ())
    assert first_difference(a, dataclasses.replace(a, eos=(1,))) is None
    assert first_difference(a, Tokenizer(None, ("x", "q", "z"), ())) == (1, "y", "q")
    assert first_difference(a, Tokenizer(None, ("x", "y"), ())) == (2, "z", "(none)")
    assert first_difference(Tokenizer(None, ("x", "y"), ()), a) == (2, "(none)", "z")


def test_end_ids_are_stated_or_control_tokens_of_that_name():
    vocab = ["</s>", "a", "<|im_end|>", "<end_of_turn>"]
    assert end_ids(vocab, control=[0, 2], end_tokens=[1, 2]) == (0, 1, 2)


def test_folder(tiny, tmp_path):
    """eos comes from generation_config.json, the template from a file, and names are objects. Truncation is off."""
    import tokenizers

    folder = tiny.save(tiny.model("llama", num_hidden_layers=1), tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "w9"}}))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}w3 {{ m.content }} {{ eos_token }}{% endfor %}")
    tokenizer = from_folder(folder)
    assert tokenizer.eos == (2, 5, 7, 9)
    assert tokenizer.encode("w3 w4 w5 w6") == [3, 4, 5, 6]
    assert tokenizer.chat("w8") == [3, 8, 9]


def test_template_that_refuses(tiny, tmp_path):
    from specjax.errors import UsageError

    folder = tiny.save(tiny.model("llama", num_hidden_layers=1), tmp_path)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UsageError, match="refuses these messages: roles must alternate"):
        from_folder(folder).chat("hi")


def slow_merge(text: str, ids: dict, scores) -> list[str]:
    """Merge by the specification: repeatedly join the best-scoring neighbours, leftmost first."""
    pieces = list(text)
    while True:
        pairs = [a + b for a, b in itertools.pairwise(pieces)]
        joins = [(scores[ids[pair]], -i) for i, pair in enumerate(pairs) if pair in ids]
        if not joins:
            return pieces
        at = -max(joins)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


def test_merge_equals_its_specification():
    rng = random.Random(0)
    words = sorted({"".join(rng.choices("abc", k=rng.randrange(1, 5))) for _ in range(40)})
    ids = {word: i for i, word in enumerate(words)}
    scores = [float(rng.randrange(10)) for _ in words]
    for _ in range(300):
        text = "".join(rng.choices("abc", k=rng.randrange(0, 20)))
        assert spm.merge_pieces(text, ids, scores) == slow_merge(text, ids, scores), text
