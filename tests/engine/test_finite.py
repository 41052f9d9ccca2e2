"""Weights and configs that give no numbers are noticed and named."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import markov, tiny_llama
from toy_denoisers import full

import specjax
from specjax import UsageError, decode, stream
from specjax.drafters import autoregressive, prompt_lookup, two_model
from specjax.models import make_model
from specjax.processors import ban
from specjax.types import Target

PROMPTS = [[1, 2, 3, 1, 2], [4, 5]]
OPTIONS = {"key": jax.random.key(0), "max_new_tokens": 3}


def spoiled(*path, value=np.nan):
    """The tiny model with one element of a parameter replaced."""
    target = tiny_llama()

    def one(where, leaf):
        return leaf.at[(0,) * leaf.ndim].set(value) if tuple(part.key for part in where) == path else leaf

    return Target(target.model, jax.tree_util.tree_map_with_path(one, target.params))


def marked(target, drafter, prompts=PROMPTS, **options):
    """The result inside of the caller's `jit`, where no error can be raised."""
    tokens = np.zeros((len(prompts), 5), np.int32)
    for place, row in zip(tokens, prompts, strict=True):
        place[: len(row)] = row
    lengths = np.array([len(row) for row in prompts])
    return jax.jit(lambda *values: decode(values[0], drafter, values[1:], **OPTIONS | options))(target, tokens, lengths)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(
    "path", [("layers", 1, "mlp", "down", "weight"), ("layers", 0, "attention", "k", "weight"), ("head", "weight")]
)
def test_a_bad_weight_is_found_and_named(path, value):
    with pytest.raises(UsageError, match=re.escape(f"its parameter {'.'.join(map(str, path))} contains NaN or Inf")):
        decode(spoiled(*path, value=value), autoregressive(), PROMPTS, **OPTIONS)


@pytest.mark.parametrize("changes", [{"rope_base": 0.0}, {"norm_eps": -1.0}])
def test_an_impossible_config_is_found(changes):
    good = tiny_llama()
    target = Target(make_model(dataclasses.replace(good.model.config, **changes)), good.params)
    with pytest.raises(UsageError, match="although its parameters are finite; check the constants of its config"):
        decode(target, prompt_lookup(), PROMPTS, **OPTIONS)


def test_prompts_of_one_token():
    with pytest.raises(UsageError, match="contains NaN"):
        decode(spoiled("layers", 0, "attention", "k", "weight"), autoregressive(), [[1], [4]], **OPTIONS)


def test_numbers_are_numbers():
    for target in (tiny_llama(), tiny_llama(stacked=True), markov()):
        prompts = PROMPTS if target.model.name == "llama" else [[0, 1], [2]]
        assert decode(target, prompt_lookup(), prompts, **OPTIONS).finite.tolist() == [True, True]


def with_bad_token(token):
    """The tiny model whose embedding of one token is NaN."""
    good = tiny_llama()
    embed = good.params["embed"]["weight"].at[token].set(jnp.nan)
    return Target(good.model, good.params | {"embed": {"weight": embed}})


def test_one_bad_row_is_named_and_inside_of_jit_it_is_marked_and_ends():
    target = with_bad_token(4)
    result = marked(target, autoregressive())
    assert result.finite.tolist() == [True, False] and result.lengths.tolist() == [3, 0]
    assert result.tokens[1].tolist() == [-1] * 3 and result.finish_reasons == ["length", "failed"]
    assert result.to_lists()[0] == decode(tiny_llama(), autoregressive(), PROMPTS[:1], **OPTIONS).to_lists()[0]
    with pytest.raises(UsageError, match=r"^row 1: the model llama returns NaN or Inf"):
        decode(target, autoregressive(), PROMPTS, **OPTIONS)
    steps = []
    with pytest.raises(UsageError, match=r"^row 1: "):
        steps.extend(stream(target, autoregressive(), PROMPTS, **OPTIONS))


def test_a_text_ends_before_what_no_token_follows_also_within_a_draft():
    """The target copies a cycle through a bad token. Drafts have the tokens after it, but plain decoding has not."""
    rows = np.roll(np.eye(8, dtype=np.float32), 1, 1) + 1e-9
    cycle = [*range(8)] * 2
    options = {"prompts": [cycle[:5]], "max_new_tokens": 9}
    bad = markov(np.where(np.arange(8)[:, None] == 7, np.nan, rows))
    for drafter in (autoregressive(), prompt_lookup(5, min_ngram=1), two_model(markov(rows), 4)):
        result = marked(bad, drafter, **options)
        assert result.to_lists() == [[5, 6, 7]] and result.finish_reasons == ["failed"]
    decoded = marked(markov(rows), two_model(markov(rows), 4), **options)
    assert decoded.to_lists() == [[5, 6, 7, 0, 1, 2, 3, 4, 5]]
    ended = marked(bad, two_model(markov(rows), 4), eos=7, **options)
    assert ended.to_lists() == [[5, 6, 7]] and ended.finish_reasons == ["eos"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_processors_that_ban_everything(temperature):
    banned = [ban(range(32)), ban(range(32, 64))]  # one that bans everything is refused earlier
    with pytest.raises(UsageError, match=r"^the processors allow no token; leave one of them out"):
        decode(tiny_llama(), prompt_lookup(2), PROMPTS, processors=banned, temperature=temperature, **OPTIONS)
    result = marked(tiny_llama(), prompt_lookup(2), processors=banned, temperature=temperature)
    assert result.lengths.tolist() == [0, 0] and result.finish_reasons == ["failed"] * 2


def test_denoisers_too():
    good = full()
    bad = dataclasses.replace(good, params=jax.tree.map(lambda x: x * jnp.nan, good.params))
    run = lambda model: specjax.denoise(model, None, [[1, 2]], key=0, max_new_tokens=4)
    assert run(good).finite.all()
    with pytest.raises(UsageError, match="returns NaN or Inf"):
        run(bad)
    with pytest.raises(UsageError, match="returns NaN or Inf"):
        list(stream(bad, None, [[1, 2]], key=0, max_new_tokens=4))
    result = jax.jit(run)(bad)
    assert result.finite.tolist() == [False] and result.lengths.tolist() == [0]


def test_traced_inputs_that_are_invalid_mark_their_rows():
    """Lengths, ids, eos and sampling options; the other rows have the texts that they have alone."""
    target, drafter = tiny_llama(), prompt_lookup(2)
    tokens = np.tile(np.array([1, 2, 3, 1, 2], np.int32), (6, 1))
    lengths, temperature = np.array([5, 0, -1, 6, 5, 4]), np.zeros(6, np.float32)
    tokens[4, 2], tokens[5, 4] = 64, 99  # the last one is padding

    @jax.jit
    def run(tokens, lengths, eos, temperature, top_p):
        prompts = tokens, lengths
        return decode(target, drafter, prompts, eos=eos, temperature=temperature, top_p=top_p, **OPTIONS)

    rows = [[1, 2, 3, 1, 2], [1, 2, 3, 1]]
    expected = decode(target, drafter, rows, **OPTIONS).to_lists()
    eos = np.array(sorted({*range(64)} - {*expected[0], *expected[1]})[:2])
    result = run(tokens, lengths, eos, temperature, np.ones(6, np.float32))
    assert result.finite.tolist() == [True, False, False, False, False, True]
    assert result.finish_reasons == ["length", *["failed"] * 4, "length"]
    assert [text for text in result.to_lists() if text] == expected
    good = np.full(6, 5)
    tokens[:] = tokens[0]
    for ids in ([64, 1], [1, -2]):
        assert not run(tokens, good, np.array(ids), temperature, np.ones(6, np.float32)).finite.any()
    temperature[1:3] = -1, np.nan
    top_p = np.array([1, 1, 1, 0, 1.5, 0.5], np.float32)
    assert run(tokens, good, eos, temperature, top_p).finite.tolist() == [True, *[False] * 4, True]


def test_too_long_prompts_and_samples_inside_of_jit():
    run = lambda tokens, lengths: decode(
        tiny_llama(), autoregressive(), (tokens, lengths), capacity=7, samples_per_prompt=2, **OPTIONS
    )
    result = jax.jit(run)(np.ones((2, 5), np.int32), np.array([5, 4]))
    assert result.finite.tolist() == [False, False, True, True]


def test_eos_ids_outside_of_the_vocabulary_are_refused():
    for eos in (64, -2, [1, 64]):
        with pytest.raises(UsageError, match="eos must be one token id or several, from 0 to 63"):
            decode(tiny_llama(), autoregressive(), PROMPTS, eos=eos, **OPTIONS)


def test_integers_of_any_width_are_ids_lengths_and_options():
    """300 tokens are more than 8 bits can count, and unsigned integers have no -1."""
    target = markov(np.full((300, 300), 1 / 300, np.float32))
    run = lambda tokens, length, eos, top_k: decode(
        target, prompt_lookup(2), (tokens, length), eos=eos, top_k=top_k, temperature=1.0, **OPTIONS
    )
    values = [[200, 2, 3]], [3], [2, 0], 2
    expected = run(*map(np.int32, values)).to_lists()
    for kinds in (("uint8", "uint8", "int8", "int8"), ("uint32", "int16", "uint32", "uint8")):
        narrow = [np.asarray(value, kind) for value, kind in zip(values, kinds, strict=True)]
        assert jax.jit(run)(*narrow).to_lists() == expected
        assert run(*narrow).to_lists() == expected
    assert run(np.array([[1, 2, 3]]), np.array([3]), [2, 0], 1 << 40).finite.all()  # off


@pytest.mark.parametrize("eos", [np.array([[1, 2]]), np.array([1.5])])
def test_traced_eos_of_another_form_are_refused(eos):
    with pytest.raises(UsageError, match="eos must be one token id or several, not "):
        jax.jit(lambda eos: decode(markov(), prompt_lookup(2), [[1]], eos=eos, **OPTIONS))(eos)
