"""Limits, widths of passes, eos inside a step, statistics, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import exhaustive
from toy import markov, tiny_llama

from specjax import Target, UsageError, controllers, decode, drafters, stream, verifiers
from specjax.engine.prefill import CHUNK
from specjax.types import Controller, Traits

CYCLE = np.full((12, 12), 1e-6, np.float32)
for _t in range(12):
    CYCLE[_t, (_t + 1) % 12] = 1.0

ZOO = [drafters.autoregressive(), drafters.prompt_lookup(5), drafters.token_recycling(12, num_nodes=20)]


def cycle(start, n):
    return [(start + i + 1) % 12 for i in range(n)]


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(ZOO),
    st.lists(st.tuples(st.integers(0, 11), st.integers(1, 9)), min_size=3, max_size=3),
    st.sets(st.integers(0, 11), max_size=2),
)
def test_eos_and_limit_are_exact_wherever_they_fall(drafter, rows, eos):
    """A target that counts modulo 12: every emitted token is known, whatever was accepted in one step."""
    prompts = [[(start + i) % 12 for i in range(length)] for start, length in rows]
    ids = [*eos, *[-1] * (2 - len(eos))]  # one shape for all
    result = decode(markov(CYCLE), drafter, prompts, key=jax.random.key(0), max_new_tokens=17, eos=ids)
    for b, prompt in enumerate(prompts):
        wanted = cycle(prompt[-1], 17)
        ends = [i for i, token in enumerate(wanted) if token in eos]
        wanted = wanted[: ends[0] + 1] if ends else wanted
        assert result.to_lists()[b] == wanted
        assert result.tokens[b].tolist() == wanted + [-1] * (17 - len(wanted))
        assert result.finish_reasons[b] == ("eos" if ends else "length")
        passes, accepted = int(result.stats.target_passes[b]), int(result.stats.accepted[b])
        assert passes <= len(wanted) <= accepted + passes
        assert int(result.stats.accepted_by_depth[b].sum()) == accepted
        assert int(result.stats.drafted[b]) >= int(result.stats.drafted_by_depth[b].max(initial=0))
        assert (result.stats.accepted_by_depth[b] <= result.stats.drafted_by_depth[b]).all()


def test_statistics_of_a_hand_worked_run():
    """Prompt 0..11,0,1 and a chain of 5: each round accepts 5 and adds one; 14 tokens are 6 + 6 + 2."""
    prompt = [*range(12), 0, 1]
    result = decode(markov(CYCLE), drafters.prompt_lookup(5), [prompt], key=jax.random.key(0), max_new_tokens=14)
    assert result.to_lists()[0] == cycle(1, 14)
    stats = result.stats
    assert stats.target_passes.tolist() == [3]
    assert stats.drafted.tolist() == [5 + 5 + 1]  # the last round can emit two
    assert stats.accepted.tolist() == [11]
    assert stats.accepted_by_depth[0].tolist() == [3, 2, 2, 2, 2]
    np.testing.assert_allclose(result.acceptance_by_depth[0], 1.0)
    np.testing.assert_allclose(result.block_efficiency, 14 / 3)
    np.testing.assert_allclose(result.mean_accepted, 11 / 3)


def test_plain_decoding_has_no_drafts():
    result = decode(markov(CYCLE), drafters.autoregressive(), [[3]], key=jax.random.key(0), max_new_tokens=5)
    assert result.stats.target_passes.tolist() == [5]
    assert result.block_efficiency.tolist() == [1.0]
    assert result.stats.drafted.tolist() == [0]
    assert result.acceptance_by_depth.shape == (1, 0)


@pytest.mark.parametrize("depth", [0, 2])
def test_a_fixed_controller_bounds_the_draft_and_changes_no_token(depth):
    prompt = [*range(12), 0, 1]
    options = {"key": jax.random.key(0), "max_new_tokens": 14}
    limited = decode(markov(CYCLE), drafters.prompt_lookup(5), [prompt], controller=controllers.fixed(depth), **options)
    assert limited.to_lists()[0] == cycle(1, 14)
    assert limited.stats.target_passes.tolist() == [-(-14 // (depth + 1))]


def test_a_pass_is_as_wide_as_the_widest_draft_asks_for():
    """Two rows of a regular text, whose limits by round ask for passes of 1, 4, 4 and 8 nodes and plain steps."""
    limits = jnp.array([[0, 0], [3, 1], [1, 3], [0, 5], [0, 0]])
    widths, honest = [], markov(CYCLE)

    def forward(params, tokens, cache, **options):
        jax.debug.callback(lambda: widths.append(tokens.shape[1]), ordered=True)
        return honest.model.forward(params, tokens, cache, **options)

    scripted = Controller(
        init=lambda batch: jnp.int32(0), limit=lambda state: limits[state], update=lambda state, info: state + 1
    )
    result = decode(
        Target(honest.model._replace(forward=forward), honest.params),
        drafters.prompt_lookup(7).replace(traits=Traits(widths=(1, 4), chains=True, follows_any_tree=True)),
        [[*range(12), 0, 1]] * 2,
        key=jax.random.key(0),
        max_new_tokens=14,
        controller=scripted,
    )
    jax.effects_barrier()
    assert result.to_lists() == [cycle(1, 14)] * 2
    assert result.stats.target_passes.tolist() == [10, 5]
    assert [width for width in widths if width < CHUNK] == [1, 4, 4, 8, 1] + [1] * 5  # then the first row is alone


# Greedy text is that of the conformance suite, under the same kind of controller.
@pytest.mark.parametrize("temperature", [exhaustive(0.0), 1.0])
def test_an_adversarial_controller_keeps_the_text(temperature):
    """Limits that jump about with the past change how much is drafted, never what is said."""
    jumpy = Controller(
        init=lambda batch: jnp.zeros((batch,), jnp.int32),
        limit=lambda state: (state * 7919) % 5,
        update=lambda state, info: state + info.accepted * 3 + 1,
    )
    target = tiny_llama()
    options = {"key": jax.random.key(0), "max_new_tokens": 24, "temperature": temperature}
    plain = decode(target, drafters.autoregressive(), [[1, 2, 1, 2, 1]], **options)
    ours = decode(target, drafters.prompt_lookup(5), [[1, 2, 1, 2, 1]], controller=jumpy, **options)
    assert ours.to_lists() == plain.to_lists()


def test_temperature_per_row_mixes_greedy_and_sampled():
    target = tiny_llama()
    key = jax.random.key(0)
    rows = decode(
        target,
        drafters.prompt_lookup(4),
        [[1, 2, 3]] * 2,
        key=key,
        max_new_tokens=16,
        temperature=jnp.array([0.0, 1.0]),
    )
    greedy = decode(target, drafters.autoregressive(), [[1, 2, 3]], key=key, max_new_tokens=16)
    assert rows.to_lists()[0] == greedy.to_lists()[0]
    assert rows.to_lists()[1] != rows.to_lists()[0]


def test_top_k_of_one_is_greedy():
    target = tiny_llama()
    options = {"key": jax.random.key(0), "max_new_tokens": 16}
    greedy = decode(target, drafters.autoregressive(), [[1, 2, 3]], **options)
    for name, value in (("top_k", 1), ("top_p", 1e-6)):
        ours = decode(target, drafters.prompt_lookup(4), [[1, 2, 3]], temperature=2.0, **options, **{name: value})
        assert ours.to_lists() == greedy.to_lists()


def test_long_prompts_up_to_the_capacity():
    target = tiny_llama()
    prompt = np.random.default_rng(0).integers(0, 64, 480).tolist()
    result = decode(target, drafters.prompt_lookup(4), [prompt, [5]], key=jax.random.key(0), max_new_tokens=32)
    plain = decode(target, drafters.autoregressive(), [prompt, [5]], key=jax.random.key(0), max_new_tokens=32)
    assert result.to_lists() == plain.to_lists()
    assert result.lengths.tolist() == [32, 32]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": []}, "prompts is empty"),
        ({"prompts": [[1], []]}, "prompt 1 is empty"),
        ({"prompts": [[1] * 505]}, "prompt 0 has 505 tokens and max_new_tokens is 8, more than the capacity of 512"),
        ({"prompts": [[1] * 30], "capacity": 32}, "more than the capacity of 32"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"temperature": -0.1}, "temperature must be at least 0, not -0.1"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p must be above 0 and at most 1"),
        ({"temperature": 1.0, "top_p": 1.1}, "top_p must be above 0 and at most 1"),
        ({"temperature": 1.0, "top_k": 0}, "top_k must be a whole number of at least 1"),
        ({"key": jax.random.split(jax.random.key(0), 3)}, r"one key or one per row: got shape \(3,\) for 1"),
        ({"prompts": (jnp.zeros((2, 4), jnp.int32), jnp.zeros((3,), jnp.int32))}, "prompts must be"),
        (
            {"prompts": (jnp.zeros((1, 4), jnp.int32), jnp.array([9]))},
            "has the length 9, but the array .* has 4 columns",
        ),
        ({"prompts": [[1, 64]]}, "prompt 0 has the token 64 at place 1, outside of the model's vocabulary of 64"),
        ({"prompts": [[1, -1]]}, "prompt 0 has the token -1 at place 1"),
        ({"prompts": [[1, 2**32 + 1]]}, "prompt 0 has the token"),
        ({"prompts": (np.array([[2**32 + 1, 0]]), np.array([1]))}, "prompt 0 has the token 4294967297 at place 0"),
        ({"prompts": [1, 2, 3]}, r"put a single prompt into a list: \[prompt\]"),
        ({"prompts": np.arange(3)}, "put a single prompt into a list"),
        ({"prompts": "some text"}, "not text"),
        ({"prompts": ["some text"]}, "not text"),
        ({"prompts": [[1.0, 2.0]]}, "must be integers, not float64"),
        ({"max_new_tokens": 20.0}, "max_new_tokens must be an int, not 20.0"),
        ({"temperature": "hot"}, "temperature must be at least 0, not 'hot'"),
        ({"temperature": float("nan")}, "temperature must be at least 0, not nan"),
        ({"temperature": np.ones(3)}, r"temperature must be one number or one per prompt, 1; it has the shape \(3,\)"),
        ({"temperature": 1.0, "top_k": 2.5}, "top_k must be a whole number"),
        ({"eos": 2.5}, "eos must be one token id or several"),
        ({"capacity": 0}, "capacity must be a whole number"),
        ({"verifier": "standart"}, 'unknown rule "standart"; choose one of'),
        ({"controller": "fast"}, '"fast" is not a controller'),
    ],
)
@pytest.mark.parametrize("run", [decode, stream])
def test_bad_arguments_are_named_before_anything_compiles(run, change, message):
    arguments = {"prompts": [[1, 2]], "key": jax.random.key(0), "max_new_tokens": 8, **change}
    with pytest.raises(UsageError, match=message):
        run(tiny_llama(), drafters.autoregressive(), arguments.pop("prompts"), **arguments)


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        (drafters.prompt_lookup, r"drafter is the function prompt_lookup; call prompt_lookup"),
        (3, "drafter must be one of specjax.drafters or the name of a method, not 3"),
        (drafters.autoregressive().replace(traits=Traits(draws="greedily")), "draws must be one of point_mass, chain"),
    ],
)
def test_what_is_no_drafter_is_named(drafter, message):
    with pytest.raises(UsageError, match=message):
        decode(tiny_llama(), drafter, [[1]], key=jax.random.key(0), max_new_tokens=2)


@pytest.mark.parametrize("target", [tiny_llama().model, lambda params, tokens: tokens])
def test_what_is_no_target_is_named(target):
    with pytest.raises(UsageError, match=r"target must be a specjax\.Target, not (Model|function); "):
        decode(target, None, [[1]], key=0, max_new_tokens=2)


def test_what_a_user_would_give_is_taken():
    """Names of rules and controllers, no eos, numbers of numpy and JAX."""
    run = lambda **change: decode(
        tiny_llama(), drafters.prompt_lookup(2), [[1, 2, 1]],
        **{"key": jax.random.key(0), "max_new_tokens": 6, "temperature": 1.0, **change},
    ).to_lists()  # fmt: skip
    expected = run(verifier=verifiers.sample_and_match, controller=controllers.fixed(1))
    assert expected == run(verifier="sample_and_match", controller="fixed:1", eos=None)
    assert expected == run(verifier="sample_and_match", max_new_tokens=jnp.int32(6))


def test_a_traced_number_of_new_tokens_is_named():
    run = lambda count: decode(tiny_llama(), "prompt_lookup", [[1]], key=jax.random.key(0), max_new_tokens=count)
    with pytest.raises(UsageError, match="max_new_tokens is an array size"):
        jax.jit(run)(3)


def test_stream_refuses_unknown_arguments():
    with pytest.raises(TypeError, match="temprature"):
        stream(tiny_llama(), drafters.autoregressive(), [[1]], key=jax.random.key(0), max_new_tokens=2, temprature=1.0)
