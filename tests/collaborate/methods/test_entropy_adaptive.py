"""The switch by hand, and decoding with one of the models."""

import jax.numpy as jnp
import numpy as np
import pytest
import texts as lib

from specjax import UsageError
from specjax.collaborate.methods.entropy_adaptive import begin, route

SMALL, LARGE = lib.history(0), lib.history(1)


def test_the_switch_by_hand():
    """The card's trace: the first 5 comes too early."""
    router, models = begin(1, 1, jnp.bool_(False)), ""
    for bits in (0, 5, 0, 5, 5, 5, 0):
        router = route(router, jnp.array([bits], jnp.float32), jnp.array([True]), jnp.float32(1), jnp.int32(2))
        models += "SL"[int(router.large[0])]
    assert models == "SSSLLLS" and router.switches.tolist() == [2]


def by_hand(prompt, tau, window, min_tokens, count=12):
    text, authors, recent, since, large = list(prompt), [], [], 0, False
    for _ in range(count):
        logits = lib.table_logits(LARGE if large else SMALL, text).astype(np.float64)
        p = np.exp(logits - logits.max())
        p /= p.sum()
        recent.append(-(p * np.log2(p)).sum())
        text.append(int(logits.argmax()))
        authors.append(int(large))
        wants = np.mean(recent[-window:]) > tau if since >= min_tokens else large
        large, since = wants, 0 if wants != large else since + 1
    return text[len(prompt) :], authors


@pytest.mark.parametrize("min_tokens, window", [(2, 2), (1, 2)])
def test_greedy_text_is_that_of_the_loop_by_hand(min_tokens, window):
    result = lib.run("entropy_adaptive", min_tokens=min_tokens, window=window)
    for row, prompt in enumerate(lib.PROMPTS):
        tokens, authors = by_hand(prompt, 2.2, window, min_tokens)
        assert result.to_lists()[row] == tokens
        assert result.authors[row, :12].tolist() == authors
        assert result.log.switches[row] <= 12 // min_tokens
    assert {0, 1} == set(np.asarray(result.authors[:, :12]).ravel().tolist())


def test_never_and_always():
    for options, model in (({"tau": np.inf}, SMALL), ({"tau": -1.0, "start": "large"}, LARGE)):
        for temperature in (0.0, 0.8):
            result = lib.run("entropy_adaptive", temperature=temperature, **options)
            assert result.to_lists() == lib.plain(model, temperature=temperature)
            assert result.log.switches.tolist() == [0, 0, 0]
            assert result.passes[:, 1 - int(model is LARGE)].tolist() == [0, 0, 0]


def test_what_is_wrong_is_one_sentence():
    with pytest.raises(UsageError, match='start must be "small" or "large", not "none"'):
        lib.run("entropy_adaptive", start="none")
    with pytest.raises(UsageError, match="tau must be a number of bits, not nan"):
        lib.run("entropy_adaptive", tau=float("nan"))
