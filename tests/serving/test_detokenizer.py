"""Ids to text as they come: whole characters, and nothing of a stop string."""

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from specjax import Detokenizer
from specjax.models.loading.tokenizers.spm import Spm
from specjax.models.loading.tokenizers.tokenizer import LibraryCodec, Tokenizer

TEXT = " Grüße, 東京! 👩‍👩‍👧 naïve  café\n🦜nicode — done"


class Bytes:
    """Id b is the byte b."""

    longest = 0  # of what it was asked to decode

    def decode(self, ids):
        self.longest = max(self.longest, len(ids))
        return bytes(ids).decode(errors="replace")


def byte_level():
    """GPT-2's alphabet with a few merges that cut characters in two."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate(alphabet)}
    merges = [("Ã", "¼"), ("Ġ", "æ"), ("ð", "Ł")]
    for pair in merges:
        vocab["".join(pair)] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(LibraryCodec(backend), tuple(vocab), ())


def byte_fallback():
    """Return a tokenizer like Llama 2's: characters that are not in the vocabulary are bytes, of which each shows as
    one U+FFFD."""
    pieces = [f"<0x{b:02X}>" for b in range(256)] + [chr(c) for c in range(97, 123)] + ["▁"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    return Tokenizer(LibraryCodec(backend), tuple(vocab), ())


def sentencepiece():
    pieces = [f"<0x{b:02X}>" for b in range(256)] + [chr(c) for c in range(97, 123)] + ["▁", "▁d"]
    scores = tuple(-float(i) for i in range(len(pieces)))
    codec = Spm(tuple(pieces), scores, frozenset(), frozenset(), 0, dummy_prefix=True)
    return Tokenizer(codec, tuple(pieces), ())


TOKENIZERS = {"byte_level": byte_level, "byte_fallback": byte_fallback, "sentencepiece": sentencepiece}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_are_whole_and_add_up(name):
    tokenizer = TOKENIZERS[name]()
    ids = tokenizer.encode(TEXT)
    stream = Detokenizer(tokenizer)
    pieces = [stream.add(i) for i in ids]
    assert "\ufffd" not in "".join(pieces) and "".join(pieces) == tokenizer.decode(ids)
    assert "東京" in tokenizer.decode(ids) and "" in pieces and stream.flush() == ""


@pytest.mark.parametrize("name", TOKENIZERS)
def test_what_is_held_back_comes_at_the_end(name):
    tokenizer = TOKENIZERS[name]()
    ids = tokenizer.encode("ab東", special=False)[:-1]
    stream = Detokenizer(tokenizer)
    shown = "".join(map(stream.add, ids))
    assert shown == "ab" and shown + stream.flush() == tokenizer.decode(ids)


def test_text_that_never_becomes_whole_is_shown_all_the_same():
    """Bytes that begin no character, without end: at most three of them are held back."""
    stream, rng = Detokenizer(Bytes()), np.random.default_rng(0)
    junk = rng.integers(0x80, 0xC0, 50).tolist()
    shown = "".join(map(stream.add, junk))
    assert shown == "\ufffd" * 47 and stream.flush() == "\ufffd" * 3


def test_any_bytes_add_up():
    rng = np.random.default_rng(1)
    for _ in range(200):
        ids = rng.choice([65, 0x20, 0xC3, 0xBC, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0xFF], rng.integers(1, 20)).tolist()
        stream = Detokenizer(Bytes())
        assert "".join(map(stream.add, ids)) + stream.flush() == Bytes().decode(ids)


def test_a_long_text_is_not_decoded_again_and_again():
    tokenizer = Bytes()
    stream = Detokenizer(tokenizer)
    assert "".join(map(stream.add, (TEXT * 50).encode())) == TEXT * 50
    assert tokenizer.longest <= 12


def test_text_ends_before_a_stop_string():
    def run(text, *stop):
        stream = Detokenizer(Bytes(), stop)
        shown = [stream.add(b) for b in text.encode()]
        return "".join(shown), stream.flush(), stream.stopped

    assert run("one\n\ntwo", "\n\n") == ("one", "", True)
    assert run("one\ntwo\n", "\n\n") == ("one\ntwo", "\n", False)
    assert run("aab", "ab") == ("a", "", True)  # what was held back may begin a later one
    assert run("abc", "ü", "c") == ("ab", "", True)
    assert run("Grüße", "üß") == ("Gr", "", True)
    assert run("abab", "abac") == ("ab", "ab", False)


def test_several_tokens_at_once():
    stream = Detokenizer(Bytes(), ["END"])
    assert stream.add_all(b"ab") == ("ab", 2)
    assert stream.add_all(b"cENDef") == ("c", 4)
    assert stream.add_all(b"gh") == ("", 0)


def test_the_tokens_whose_text_was_returned_are_counted():
    """A character of several tokens counts with its last one. A token of a stop string counts if it has text before."""
    text = Detokenizer(Bytes(), ["xyz"])
    shown = [(text.add(token), text.num_shown) for token in "aé".encode() + b"xyb"]
    assert shown == [("a", 1), ("", 1), ("é", 3), ("", 3), ("", 3), ("xyb", 6)]
    assert (text.add_all(b"cxyz"), text.num_shown) == (("c", 4), 7) and text.flush() == "" and text.num_shown == 7
    text = Detokenizer(Bytes(), ["xyz"], includes_stop=True)
    assert text.add_all(b"axyz") == ("axyz", 4) and text.num_shown == 4
    text = Detokenizer(Bytes(), ["xyz"])
    assert (text.add_all(b"ax"), text.num_shown) == (("a", 2), 1) and text.flush() == "x" and text.num_shown == 2
    words = Detokenizer(Words(), ["b"])
    assert (words.add_all([0, 1]), words.num_shown) == (("aa", 2), 2)


class Words:
    """A vocabulary of two words."""

    def decode(self, ids):
        return "".join(("a", "ab")[i] for i in ids)
