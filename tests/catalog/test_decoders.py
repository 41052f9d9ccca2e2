"""The conformance suite of decoders: properties of every decoding loop of the catalogue, on tiny models."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compiled_programs
from heads import tiny_head
from scipy.stats import kstest, norm
from tiers import those
from toy import TARGET_ROWS, joint_distribution, tiny_llama, tiny_llama_alike
from toy_decoders import exact, linear
from unusual_modes import unusual_modes

import specjax
from specjax import decoders
from specjax.catalog import of_kind

DECODERS = of_kind("decoder")
PROMPTS = [[1, 2, 3, 1, 2], [4, 5], [6, 7, 8, 9, 6, 7]]
KEYS = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), jnp.arange(3))
TOKENS = np.array([[0, 1, 0], [1, 1, 0], [0, 0, 1]])
MISSING = np.array([[True, True, True], [False, True, True], [True, False, False]])
HEADS = linear([0.0], [1.2], 0.5), linear([0.0], [1.0])  # target, draft
NO_KEYS = {"superposed_decoding"}  # it draws nothing


@functools.cache
def pair(apart: bool):
    models = tiny_llama(), tiny_llama_alike()
    return tuple(jax.device_put(m, jax.devices()[i + 1]) for i, m in enumerate(models)) if apart else models


def models_of(name):
    """Return the models of a decoder, as pytrees."""
    if name in ("pearl", "pearl_in_one_program"):
        return pair(name == "pearl")
    if name == "any_subset":
        return (exact(joint_distribution(TARGET_ROWS, 0, 3)),)
    if name == "continuous":
        return HEADS
    return (tiny_llama(), tiny_head("hamburger", tiny_llama())) if name == "hamburger_decoding" else (tiny_llama(),)


SETTINGS = {
    "any_subset": {"window": 2},
    "continuous": {"max_new_tokens": 6, "window": 2},
    "hamburger_decoding": {"max_new_tokens": 12, "temperature": 0.8, "confidence": 0.5},
    "lud": {"max_new_tokens": 12, "temperature": 0.8, "threshold": 0.2, "pad_token": 63},
    "ceed_vla": {"max_new_tokens": 12, "block": 4, "iterations": 2},
    "superposed_decoding": {"max_new_tokens": 12, "drafts": 2},
    "pearl": {"max_new_tokens": 12, "temperature": 0.8, "num_tokens": 3},
    "pearl_in_one_program": {"max_new_tokens": 12, "temperature": 0.8, "num_tokens": 3},
}


def call(name, models, prompts, keys, lengths=None, **options):
    """Return the result of a decoder for lists of prompts, or for arrays of prompts with `lengths`."""
    if name == "any_subset":
        prompts = (prompts, MISSING[: len(prompts)]) if lengths is not None else prompts
    elif name != "continuous":
        prompts = (prompts if lengths is None else (prompts, lengths),)
        lengths = None
    else:
        prompts = (prompts,)
    keywords = {} if name in NO_KEYS else {"key": keys}
    keywords |= {} if lengths is None else {"lengths": lengths}
    return DECODERS[name].make(*models, *prompts, **SETTINGS[name] | keywords | options)


def run(name, rows=(0, 1, 2), keys=KEYS, **options):
    """Return the texts of a decoder for these rows and keys."""
    rows = list(rows)
    prompts = [PROMPTS[row] for row in rows]
    if name == "any_subset":
        prompts = TOKENS[rows], MISSING[rows]
    elif name == "continuous":
        prompts = jnp.arange(1.0, 4.0)[jnp.array(rows), None, None]
    result = call(name, models_of(name), prompts, keys[jnp.array(rows)], **options)
    return result.filled.tolist() if name == "any_subset" else result.to_lists()


def plain(**options):
    return specjax.decode(tiny_llama(), "autoregressive", PROMPTS, key=KEYS, max_new_tokens=12, **options).to_lists()


def test_a_test_for_every_row():
    assert set(GUARANTEES) == set(DECODERS)


@pytest.mark.parametrize("name", DECODERS)
def test_a_key_gives_one_text(name):
    first = run(name)
    assert run(name) == first
    if name not in NO_KEYS:
        assert run(name, keys=jax.random.split(jax.random.key(1), 3)) != first


@pytest.mark.parametrize("name", DECODERS)
def test_rows_do_not_depend_on_their_batch(name):
    together = run(name)
    assert run(name, rows=(2, 0)) == [together[2], together[0]]
    assert run(name, rows=(1,)) == [together[1]]


@pytest.mark.parametrize("name", DECODERS)
def test_a_second_call_compiles_nothing(name):
    run(name)
    other = jax.random.split(jax.random.key(2), 3)
    run(name, keys=other)  # programs that only prepare arguments
    with compiled_programs() as compiled:
        run(name, keys=other)
    assert compiled == []


def of_plain_decoding(name):
    """Check the guarantee `distribution`: the text even equals plain decoding."""
    for temperature in (0.0, 0.8):
        assert run(name, temperature=temperature) == plain(temperature=temperature)


def of_any_window(name):
    """Check the guarantee `distribution`: the greedy text does not depend on the window."""
    greedy = run(name, temperature=0.0, window=1)
    assert greedy == run(name, temperature=0.0, window=3)
    best = TARGET_ROWS.argmax(1)
    assert greedy[1] == [1, best[1], best[best[1]]]


def of_the_heads_distribution(name):
    """Check the guarantee `distribution` with one token in 4,000 rows."""
    models = [HEADS, HEADS[::-1]]
    for target, draft in models:
        result = DECODERS[name].make(
            target, draft, jnp.zeros((4000, 0, 1)), key=jax.random.key(3), max_new_tokens=1, window=1, prefill_ratio=0.0
        )
        mean, std = (float(target.params[part][0]) for part in ("mean", "std"))
        values = np.asarray(result.tokens)[:, 0, 0]
        assert kstest(values, norm(mean, std).cdf).pvalue > 1e-3
        assert kstest(values, norm(0.5 - mean, 2.2 - std).cdf).pvalue < 1e-6  # the draft's


def of_one_greedy_draft(name):
    """Check that one draft without a corpus is greedy decoding."""
    assert DECODERS[name].guarantee == "lossy"
    assert run(name, drafts=1) == plain()


def of_the_fixed_point(name):
    assert run(name, iterations=None) == plain()


def of_the_base_one_by_one(name):
    """Check that an unreachable threshold gives plain decoding at any temperature."""
    assert DECODERS[name].guarantee == "lossy"
    never = {"confidence": 1.1} if name == "hamburger_decoding" else {"threshold": 1.1}
    assert run(name) != plain(temperature=0.8)
    for temperature in (0.0, 0.8):
        assert run(name, temperature=temperature, **never) == plain(temperature=temperature)


GUARANTEES = {
    "pearl": of_plain_decoding,
    "pearl_in_one_program": of_plain_decoding,
    "any_subset": of_any_window,
    "continuous": of_the_heads_distribution,
    "superposed_decoding": of_one_greedy_draft,
    "ceed_vla": of_the_fixed_point,
    "hamburger_decoding": of_the_base_one_by_one,
    "lud": of_the_base_one_by_one,
}


@pytest.mark.parametrize("name", DECODERS)
def test_what_it_promises(name):
    GUARANTEES[name](name)


def padded(name):
    """Return the prompts of a decoder and their lengths as arrays, and these with three invalid rows."""
    if name == "continuous":
        tokens, lengths, wrong = jnp.ones((4, 1, 1)), np.array([1] * 4), np.array([1, -1, 2, 9])
        return (tokens, lengths), (tokens, wrong)
    tokens = np.tile(TOKENS[1] if name == "any_subset" else [1, 2, 3], (4, 1))
    spoiled = tokens.copy()
    spoiled[3, 2 if name == "any_subset" else 0] = 64
    return (tokens, np.array([3] * 4)), (spoiled, np.array([3, 0, 4, 3]))


@pytest.mark.parametrize(
    "name", those({"any_subset", "ceed_vla", "superposed_decoding"}, sorted(DECODERS.keys() - {"pearl"}))
)  # pearl cannot be traced
def test_a_callers_jit_marks_the_rows_that_failed(name, monkeypatch):
    """Rows with a length or an id out of range decode no token, and the others are those of valid prompts."""
    monkeypatch.setitem(globals(), "MISSING", np.array([[False, True, False]] * 4))
    models, keys = models_of(name), jax.random.split(jax.random.key(0), 4)
    decode = jax.jit(lambda models, tokens, lengths: call(name, models, tokens, keys, lengths=lengths))
    right, wrong = padded(name)
    good, bad = decode(models, *right), decode(models, *wrong)
    assert good.finite.all() and good.lengths.all()
    assert bad.finite.tolist() == [True, False, False, False], bad.finite
    assert bad.lengths.tolist() == [good.lengths[0], 0, 0, 0] and bad.to_lists()[0] == good.to_lists()[0]
    assert bad.finish_reasons[1:] == ["failed"] * 3
    spoiled = decode(jax.tree.map(lambda x: x * np.nan, models), *right)
    assert not spoiled.finite.any() and not spoiled.lengths.any()


@pytest.mark.parametrize("name", those({"any_subset", "lud", "pearl"}, DECODERS))
def test_weights_that_are_no_numbers_are_named(name, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "models_of", lambda name, of=models_of: spoiled(of(name)))
    with pytest.raises(specjax.UsageError, match=r"returns NaN or Inf, because its parameter .* contains NaN or Inf"):
        run(name)


def spoiled(models):
    """Return models whose first one has weights that are no numbers."""
    return jax.tree.map(lambda x: x * np.nan, models[0]), *models[1:]


@pytest.mark.parametrize("name", those({"any_subset", "ceed_vla"}, sorted(DECODERS.keys() - {"pearl"})))
def test_traced_prompts_in_unusual_modes(name, monkeypatch):
    """The checks of traced prompts and settings run in the modes that research code sets."""
    monkeypatch.setitem(globals(), "MISSING", np.array([[False, True, False]] * 4))
    models, (prompts, _) = models_of(name), padded(name)
    with unusual_modes():
        keys = jax.random.split(jax.random.key(0), 4)
        decode = jax.jit(lambda models, tokens, lengths: call(name, models, tokens, keys, lengths=lengths))
        assert decode(models, *prompts).finite.all()


@pytest.mark.parametrize("name", sorted(DECODERS.keys() - {"any_subset", "continuous"}))
def test_settings_are_those_of_decode(name):
    """Settings that `decode` refuses are refused before any program is compiled."""
    wrong = [
        ({"eos": [64]}, "eos must be one token id or several, from 0 to 63"),
        ({"capacity": 0}, "capacity must be a whole number of at least 1, not 0"),
        ({"capacity": 10}, "more than the capacity of 10 positions"),
        ({"inputs": np.zeros((3, 2))}, "takes tokens only; leave inputs out"),
    ]
    if "temperature" in SETTINGS[name]:
        wrong.append(({"temperature": np.ones(2)}, "temperature must be one number or one per prompt, 3"))
    for options, words in wrong:
        with pytest.raises(specjax.UsageError, match=words):
            run(name, **options)


def test_pearl_cannot_be_traced():
    models = models_of("pearl")
    for name, value in (("temperature", 0.5), ("top_p", 0.5), ("eos", np.array([1]))):
        with pytest.raises(specjax.UsageError, match="cannot be part of your own jit; use pearl_in_one_program"):
            jax.jit(lambda value, name=name: call("pearl", models, PROMPTS, KEYS, **{name: value}))(value)


def test_invalid_prompts_are_refused_outside_of_jit():
    (model,) = models_of("any_subset")
    for tokens, lengths, words in (
        ([[0, 9, 0]], [3], "has the token 9 at place 1"),
        ([[0, 1, 0]], [4], "has the length 4"),
        ([[0, 1, 0]], [0], "prompt 0 is empty"),
        ([[0, 1, 0]], [3, 3], "lengths must have one number per row, 1, not the shape"),
        ([[0, (1 << 32) + 1, 0]], [3], "has the token 4294967297 at place 1"),
    ):
        with pytest.raises(specjax.UsageError, match=words):
            decoders.any_subset(
                model, np.array(tokens), np.array([[True, False, True]]), key=0, lengths=np.array(lengths)
            )
    with pytest.raises(specjax.UsageError, match="lengths must be from 0 to 1"):
        decoders.continuous(*HEADS, jnp.ones((1, 1, 1)), key=0, max_new_tokens=1, lengths=np.array([2]))
