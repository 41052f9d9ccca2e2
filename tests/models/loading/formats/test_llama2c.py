"""stories260K: a real model of one megabyte."""

import hashlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.errors import UsageError
from specjax.models import load

SHA256 = "b0a507e7ad0f626624f17112325e66691f9076d622e1d3274d103d00299f2696"

# What llama2.c itself prints at temperature 0 (its test_all.py).
GREEDY = """Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw a big, red ball. She wanted to play with it, but it was too high.
Lily's mom said, "Lily, let's go to the park." Lily was sad and didn't know what to do. She said, "I want to play with your ball, but I can't find it."
Lily was sad and didn't know what to do. She said, "I'm sorry, Lily. I didn't know what to do."
Lily didn't want to help her mom, so she"""  # noqa: E501


@pytest.fixture(scope="module")
def stories(data):
    return data / "stories260K" / "stories260K.bin"


def greedy(target, ids: list[int], guess: list[int]) -> list[int]:
    """Return `ids` and their plain greedy continuation, with as many tokens as `guess`.

    It is the text that forward passes over the whole text do not change. There is no cache, and a good guess takes one
    pass.
    """
    model, width = target.model, len(ids) + len(guess)
    cache = model.init_cache(None, None, 1, 8)
    mask, positions = jnp.tril(jnp.ones((1, width, width), bool)), jnp.arange(width)[None]
    run = jax.jit(lambda p, t: model.forward(p, t, cache, positions=positions, mask=mask)[0].logits[0].argmax(-1))
    tokens = np.array(ids + guess, np.int32)
    for _ in range(width):  # a pass makes at least one more token right
        following = np.concatenate([ids, np.asarray(run(target.params, tokens[None]))[len(ids) - 1 : -1]])
        if np.array_equal(following, tokens):
            return tokens.tolist()
        tokens = following
    raise AssertionError("a text that does not settle")


@pytest.mark.parametrize("stacked", [False, True])
def test_greedy_text_equals_llama2c(stories, stacked):
    assert hashlib.sha256(stories.read_bytes()).hexdigest() == SHA256
    target, tokenizer = load(stories, stacked=stacked)
    ids = tokenizer.encode("")  # bos, and the empty text
    guess = tokenizer.encode(GREEDY, special=False)
    guess += [0] * (200 - len(guess))
    text = tokenizer.decode(greedy(target, ids, guess))
    assert text == GREEDY


def test_tokenizer(stories):
    _, tokenizer = load(stories)
    text = "Once upon a time, a café — 日本\n  two  spaces"
    ids = tokenizer.encode(text)
    assert ids[0] == 1 and tokenizer.decode(ids) == text
    assert tokenizer.encode(text, special=False) == ids[1:]
    assert tokenizer.eos == (2,) and len(tokenizer.vocab) == 512
    assert len(ids) < len(text), "common words must be merged"
    # Bytes of one character at a time: only whole characters appear.
    shown = [tokenizer.decode(ids[:n]).rstrip("\ufffd") for n in range(len(ids) + 1)]
    assert all(b.startswith(a) for a, b in itertools.pairwise(shown))
    assert tokenizer.chat("hi") == tokenizer.encode("hi")


def test_damaged_files(stories, tmp_path):
    copy = tmp_path / "model.bin"
    copy.write_bytes(stories.read_bytes()[:-4])
    with pytest.raises(UsageError, match=r"model.bin is not a complete llama2.c model: it has 1,056,536 bytes"):
        load(copy)
    for contents in (b"", b"PK\x03\x04 a torch pickle, which also ends in .bin"):
        copy.write_bytes(contents)
        with pytest.raises(UsageError, match=r"model.bin is not a llama2.c model"):
            load(copy)
    copy.write_bytes(stories.read_bytes())
    with pytest.raises(UsageError, match=r"needs its tokenizer tok512.bin"):
        load(copy)
    (tmp_path / "tok512.bin").write_bytes(b"short")
    with pytest.raises(UsageError, match=r"tok512.bin is not a llama2.c tokenizer of 512 tokens"):
        load(copy)
