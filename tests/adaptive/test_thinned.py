"""Tests of every method of adaptive depth: its model is a model as any other, and the whole one where it skips
nothing."""

import functools
import inspect

import depths
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compiled_programs
from tiers import those
from toy import markov

import specjax
from specjax import Request, UsageError, adaptive, decode, drafters
from specjax.adaptive.parsing import parse_depth
from specjax.catalog import REQUIRED, of_kind
from specjax.drafters import autoregressive
from specjax.engine.prefill import prefill
from specjax.persistence import fingerprint

NAMES = ["calm", "saturation", "skip_decode", "ffn_skip", "dynamax", "first", "unified"]
THROUGH = [name for name in NAMES if name != "unified"]  # whose layers are not taken out
SOME = {"calm", "skip_decode", "first"}  # an exit, a plan, and what learns from the prompt


@functools.cache
def thinned(name, stacked=True):
    return adaptive.skip_layers(depths.target(stacked), depths.depth(name))


@functools.cache
def plain(name, stacked=True):
    return depths.texts(thinned(name, stacked))


@functools.cache
def whole(stacked=True):
    return depths.texts(depths.target(stacked))


@pytest.mark.parametrize("name", NAMES)
def test_a_part_of_the_layers_writes_another_text(name):
    assert plain(name) != whole()


@pytest.mark.parametrize("name", NAMES)
def test_all_of_the_layers_write_the_text_of_the_whole_model(name):
    model = adaptive.skip_layers(depths.target(), depths.never(name))
    assert depths.texts(model) == whole()
    if name in THROUGH:
        reading, counts = depths.read_again(model, whole())
        assert np.asarray(reading.ran.attention)[counts].all() and np.asarray(reading.ran.mlp)[counts].all()


@pytest.mark.parametrize("name", those({"calm", "ffn_skip", "first"}, NAMES))
def test_speculation_changes_no_text(name):
    assert depths.texts(thinned(name), drafters.prompt_lookup(4)) == plain(name)


@pytest.mark.parametrize("name", those({"calm", "skip_decode"}, NAMES))
def test_trees_change_no_text(name):
    """Tokens of one pass that run other parts of the layers, and that do not see each other."""
    assert depths.texts(thinned(name), drafters.token_recycling(64, num_nodes=7)) == plain(name)


@pytest.mark.parametrize("name", those((), NAMES))
def test_coupled_text_is_that_of_plain_sampling(name):
    options = {"temperature": 1.0, "sampling": "coupled"}
    ours = depths.texts(thinned(name), drafters.prompt_lookup(4, min_ngram=1), **options)
    assert ours == depths.texts(thinned(name), **options)


@pytest.mark.parametrize("name", those(SOME, NAMES))
def test_a_row_alone_is_the_row_in_a_batch(name):
    for prompt, text in zip(depths.PROMPTS, plain(name), strict=True):
        assert depths.texts(thinned(name), prompts=[prompt]) == [text]


@pytest.mark.parametrize("name", those({"first"}, NAMES))
def test_requests_that_join_are_told_where_their_prompt_ends(name):
    requests = [Request(prompt, 0) for prompt in depths.PROMPTS]
    outputs = [[] for _ in requests]
    for step in specjax.serve(
        thinned(name), autoregressive(), requests, slots=2, longest_prompt=8, max_new_tokens=depths.NEW
    ):
        outputs[step.request] += step.tokens
    assert outputs == plain(name)


@pytest.mark.parametrize("name", those((), NAMES))  # lora_drop wants such layers
def test_layers_that_are_not_stacked_give_the_same_text(name):
    stack = depths.target().params["layers"]
    apart = {str(i): jax.tree.map(lambda x, i=i: x[i], stack) for i in range(depths.LAYERS)}
    keys = depths.target(False).params["layers"].keys()
    assert len(keys) == depths.LAYERS
    apart = {key: apart[str(int(key))] for key in keys}
    params = depths.target().params | {"layers": apart}
    model = adaptive.skip_layers(specjax.Target(depths.target(False).model, params), depths.depth(name))
    assert depths.texts(model) == plain(name)


@pytest.mark.parametrize("name", THROUGH)
def test_one_reading_runs_what_decoding_ran(name):
    """The text from its own reading, and every step's layers one token at a time."""
    reading, counts = depths.read_again(thinned(name), plain(name))
    likeliest = np.asarray(reading.likeliest)
    assert [row[count].tolist() for row, count in zip(likeliest, counts, strict=True)] == plain(name)
    ran = np.asarray(reading.ran.mlp)[counts]
    assert ran.any() and not ran.all()
    model, params = thinned(name).model, thinned(name).params
    prompt, answer = depths.PROMPTS[0], plain(name)[0]
    text = jnp.asarray([prompt + answer])
    length = jnp.array([len(prompt)])
    cache = model.start_cache(params, None, length, 160)
    cache = prefill(model, params, cache, jnp.pad(text, ((0, 0), (0, 128))), length - 1)

    @jax.jit
    def step(cache, token, place):
        one = jnp.ones((1, 1, 1), bool)
        output, pending = model.forward(params, token, cache, positions=place[:, None], mask=one)
        return model.commit(cache, pending, jnp.zeros((1, 1), int), jnp.ones(1, int)), pending.ran, output.logits

    for i, token in enumerate(prompt[-1:] + answer[:-1]):
        cache, step_ran, logits = step(cache, jnp.array([[token]]), length - 1 + i)
        np.testing.assert_array_equal(step_ran.attention[0, 0], reading.ran.attention[0, i])
        np.testing.assert_array_equal(step_ran.mlp[0, 0], reading.ran.mlp[0, i])
        log_p = jax.nn.log_softmax(logits[0, 0])[answer[i]]
        np.testing.assert_allclose(log_p, reading.logprobs[0, i], atol=1e-4)


@pytest.mark.parametrize("name", ["skip_decode", "first", "calm"])
def test_layers_that_nobody_runs_are_not_computed(name):
    """Weights of NaN in a layer that the token leaves out: they would show in what it propagates, and nowhere else."""
    reading, counts = depths.read_again(thinned(name), plain(name))
    out = ~np.asarray(reading.ran.mlp)
    row, place = next(zip(*np.where(out.any(2) & counts), strict=True))
    layer = int(np.where(out[row, place])[0][0])
    base = depths.target()
    mlp = jax.tree.map(lambda x: x.at[layer].set(jnp.nan), base.params["layers"]["mlp"])
    broken = base.params | {"layers": base.params["layers"] | {"mlp": mlp}}
    model = adaptive.skip_layers(specjax.Target(base.model, broken), depths.depth(name))
    prompt, answer = depths.PROMPTS[row], plain(name)[row]
    memory = model.model.start_cache(model.params, None, jnp.array([len(prompt)]), 160)
    good = thinned(name)
    tokens = jnp.asarray([prompt + answer + [0] * 128])
    length = jnp.array([len(prompt) + place - 1])
    filled = prefill(good.model, good.params, memory, tokens, length)
    forward = lambda model: (
        model.model.forward(
            model.params,
            tokens[:, length[0]][:, None],
            filled,
            positions=length[:, None],
            mask=jnp.ones((1, 1, 1), bool),
        )[0].logits
    )
    np.testing.assert_allclose(forward(model), forward(good), atol=1e-5)


def test_a_second_threshold_compiles_nothing():
    model = adaptive.skip_layers(depths.target(), adaptive.calm(0.5, every=2))
    depths.texts(model)
    again = adaptive.skip_layers(depths.target(), adaptive.calm(0.25, every=2))
    key = jax.random.key(1).block_until_ready()
    with compiled_programs() as compiled:
        decode(again, autoregressive(), depths.PROMPTS, key=key, max_new_tokens=depths.NEW)
    assert compiled == []


def test_a_model_of_which_layers_can_be_named_is_wanted():
    with pytest.raises(UsageError, match=r"markov has no layers that can be skipped"):
        adaptive.skip_layers(markov(), adaptive.calm())
    reading, counts = depths.read_again(depths.target(), whole())
    assert np.asarray(reading.ran.attention).all()
    tokens = [row[count].tolist() for row, count in zip(np.asarray(reading.likeliest), counts, strict=True)]
    assert tokens == whole()


def test_every_method_is_in_the_table_and_reads_from_a_text():
    names = {"calm", "skip_decode", "ffn_skip", "unified", "dynamax", "first", "lora_drop", "s2d", "matformer"}
    assert set(of_kind("adaptive")) == names
    assert parse_depth("calm:0.5,every=2").params == np.float32(0.5)
    assert parse_depth("skip_decode", 20) is adaptive.skip_decode(horizon=20)
    assert parse_depth("skip_decode:horizon=7", 20) is adaptive.skip_decode(horizon=7)
    assert parse_depth("unified:2", 20) is adaptive.unified(2)
    for spec, words in (
        ("dynamax", "lacks probes"),
        ("lora_drop", "lacks corrections"),
        ("auto", "is not a method of adaptive"),
        ("calm:depth=3", "calm takes"),
    ):
        with pytest.raises(UsageError, match=words):
            parse_depth(spec)


@pytest.mark.parametrize("name", of_kind("adaptive"))
def test_options_and_defaults_are_those_of_the_function(name):
    row = of_kind("adaptive")[name]
    defaults = {
        parameter.name: parameter.default
        for parameter in inspect.signature(row.make).parameters.values()
        if parameter.default is not parameter.empty
    }
    assert {option.name: option.default for option in row.options if option.default is not REQUIRED} == defaults
    assert row.guarantee == "lossy" and row.make is getattr(adaptive, name)


def test_a_checkpoint_is_of_one_depth():
    """The fingerprint covers what decides the text, and not where the model lies."""
    of = lambda depth, target: fingerprint.digest_model(adaptive.skip_layers(target, depth))
    depth = adaptive.calm(0.5, every=2)
    variants = (
        adaptive.calm(0.4, every=2),
        adaptive.calm(0.5, every=3),
        adaptive.calm(0.5, every=2, horizon=20),
        adaptive.calm(0.5, every=2, form="follow_up"),
        adaptive.skip_decode(2.0),
        adaptive.skip_decode(2.0, horizon=20),
    )
    base = depths.target()
    digests = [of(other, base) for other in (depth, *variants)]
    assert len({*digests}) == len(digests)
    assert of(adaptive.calm(0.5, every=2), base) == digests[0]
    assert of(depth, specjax.shard(base, specjax.parallel.mesh(1, 2))) == digests[0]
