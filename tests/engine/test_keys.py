"""Keys of every implementation: the draws of each row are its own, alone and in a batch, in every loop.

Under `vmap` JAX draws the bits of rbg and unsafe_rbg keys from the first key of the batch. Once row 0 had ended, all
other rows drew with one and the same noise at every later position.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import markov, tiny_llama
from toy_decoders import exact, linear

from specjax import Request, UsageError, decode, decoders, drafters, serve, stream, verifiers
from specjax.bench import measure
from specjax.drafters.layers import swift
from specjax.numerics import sampling
from specjax.trees.operations import chain

IMPLEMENTATIONS = ["threefry2x32", "rbg", "unsafe_rbg"]
VOCAB, ROWS, NEW = 16, 6, 40
UNIFORM = np.full((VOCAB, VOCAB), 1 / VOCAB, np.float32)
PROMPTS = [[0]] * ROWS


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    """The default of `jax.random.key` and `PRNGKey`, too."""
    with jax.default_prng_impl(request.param):
        yield request.param


@pytest.fixture(params=["one", "rows", "legacy", "legacy rows"])
def keys(request, implementation):
    key = jax.random.key(3)
    rows = jnp.stack([jax.random.fold_in(key, row) for row in range(ROWS)])  # one by one, for unsafe_rbg
    typed = rows if "rows" in request.param else key
    return jax.random.key_data(typed) if "legacy" in request.param else typed


def repeats(rows):
    """Return the larger share of tokens that equal the one before, or that of another row; each is 1 in 16 by right."""
    rows = np.asarray(rows)
    pairs = [rows[a] == rows[b] for a in range(len(rows)) for b in range(a)]
    return max(np.mean(rows[:, 1:] == rows[:, :-1]), np.mean(pairs))


def sampled(drafter, key, prompts=PROMPTS, **options):
    target = markov(UNIFORM)
    return decode(target, drafter, prompts, key=key, max_new_tokens=NEW, temperature=1.0, **options).to_lists()


@functools.cache
def drafting():
    return drafters.two_model(markov(np.roll(np.eye(VOCAB, dtype=np.float32), 1, 1) * 0.5 + 0.5 / VOCAB), 2)


@pytest.mark.parametrize("name", ["plain", "speculative"])
def test_rows_draw_apart_after_the_first_has_ended(keys, name):
    drafter = drafters.autoregressive() if name == "plain" else drafting()
    ends = sampled(drafter, keys)[0][0]
    rows = sampled(drafter, keys, eos=ends)
    assert len(rows[0]) == 1
    longest = [row for row in rows[1:] if len(row) > 9]
    shortest = min(map(len, longest))
    assert len(longest) > 1 and repeats([row[:shortest] for row in longest]) < 0.35


def test_a_row_alone_equals_the_row_in_a_batch(keys):
    rows = sampled(drafting(), keys)
    row_keys = sampling.row_keys(keys, ROWS)
    assert rows == sampled(drafting(), row_keys)
    for row in (1, ROWS - 1):
        assert sampled(drafting(), row_keys[row : row + 1], PROMPTS[:1]) == rows[row : row + 1]


def test_stream_and_serve_take_them_too(keys):
    target, options = markov(UNIFORM), {"max_new_tokens": NEW, "temperature": 1.0}
    wanted = sampled(drafting(), keys)
    streamed = [[] for _ in PROMPTS]
    for step in stream(target, drafting(), PROMPTS, key=keys, **options):
        for row, new in zip(streamed, step.tokens, strict=True):
            row += new
    assert streamed == wanted
    typed = jnp.issubdtype(keys.dtype, jax.dtypes.prng_key)
    single = [(jax.random.key if typed else jax.random.PRNGKey)(n) for n in range(ROWS)]
    texts = [[] for _ in PROMPTS]
    requests = (Request([0], key, NEW) for key in single)
    for news in serve(target, drafting(), requests, slots=4, longest_prompt=1, **options):
        texts[news.request] += news.tokens
    assert texts == [sampled(drafting(), key[None], PROMPTS[:1])[0] for key in single]
    assert repeats(texts) < 0.2


def test_loops_of_their_own(implementation):
    """Any-subset, continuous and both forms of PEARL: rows that differ, and equal those of their own keys alone."""
    key = jax.random.key(5)
    row_keys = sampling.row_keys(key, 3)
    joint = np.full((VOCAB,) * 3, VOCAB**-3.0)
    blank = lambda rows: (jnp.zeros((rows, 3), jnp.int32), jnp.ones((rows, 3), bool))
    text = np.asarray(decoders.any_subset(exact(joint), *blank(3), key=key, window=2).filled)
    assert len({tuple(row) for row in text}) == 3
    alone = decoders.any_subset(exact(joint), *blank(1), key=row_keys[2:], window=2).filled
    np.testing.assert_array_equal(alone[0], text[2])

    model = linear([0.5, 0.5], [0.3, 0.4])
    smooth = lambda rows, key: (
        decoders.continuous(model, model, jnp.zeros((rows, 1, 1)), key=key, max_new_tokens=4, window=2).tokens
    )
    values = np.asarray(smooth(3, key))
    assert len(np.unique(values)) == 12
    np.testing.assert_allclose(smooth(1, row_keys[2:])[0], values[2], rtol=1e-6)

    target, options = markov(UNIFORM), {"max_new_tokens": 8, "temperature": 1.0}
    plain = decode(target, "autoregressive", PROMPTS, key=key, **options).to_lists()
    assert decoders.pearl_in_one_program(target, target, PROMPTS, key=key, num_tokens=2, **options).to_lists() == plain
    place = lambda n: jax.device_put(target, jax.devices()[n])
    assert decoders.pearl(place(0), place(1), PROMPTS, key=key, num_tokens=2, **options).to_lists() == plain


def test_a_drafter_that_draws(implementation):
    """The guesses of a row are its own, too: it takes as many passes alone as in a batch."""
    drafter, row_keys = drafters.jacobi(64, window=4), sampling.row_keys(jax.random.key(0), 3)
    run = functools.partial(decode, tiny_llama(), drafter, max_new_tokens=16, temperature=0.8)
    batch, alone = run([[1, 2, 3, 1], [5], [7, 7, 7]], key=row_keys), run([[5]], key=row_keys[1:2])
    assert alone.to_lists()[0] == batch.to_lists()[1]
    assert int(alone.stats.target_passes[0]) == int(batch.stats.target_passes[1])


def test_the_search_of_swift_in_each_row(implementation):
    """A constant seed in a drafter is no user's key, but has the default implementation."""
    trials, skipped = jnp.array([4, 6, 9], jnp.int32), jnp.zeros((3, 20), bool)
    state = swift.SkipSet(skipped, *[None] * (len(swift.SkipSet._fields) - 1))._replace(trials=trials)
    rows = swift._proposal(state, 8)
    assert (rows[0] != rows[1]).any()
    np.testing.assert_array_equal(swift._proposal(jax.tree.map(lambda x: x[1:2], state), 8)[0], rows[1])


def test_verifiers_called_by_hand(implementation):
    """Rules are functions of their own, so keys reach them that have never been through `decode`."""
    keys = jnp.stack([jax.random.fold_in(jax.random.key(0), row) for row in range(64)])
    tokens = jnp.zeros((64, 2), jnp.int32)
    logits = jnp.zeros((64, 2, VOCAB))
    tree = chain(tokens, jnp.ones((64, 2), bool), logits.at[:, :, 0].set(5.0))
    verdict = jax.jit(verifiers.standard)(keys, tree, logits)
    alone = jax.jit(verifiers.standard)(*jax.tree.map(lambda x: x[9:10], (keys, tree, logits)))
    assert int(verdict.next_token[9]) == int(alone.next_token[0])
    assert len(np.unique(verdict.next_token)) > 2
    assert 0 < np.sum(verdict.num_nodes == 1) < 64


def test_a_seed_is_the_same_text_under_every_default():
    rows = [measure.row_keys(7, [0, 4, 2])]
    for implementation in IMPLEMENTATIONS:
        with jax.default_prng_impl(implementation):
            rows.append(measure.row_keys(7, [0, 4, 2]))
            assert (sampling.threefry(7) == jax.random.key(7, impl="threefry2x32")).all()
    for row in rows:
        assert str(jax.random.key_impl(row)) == "threefry2x32"
        np.testing.assert_array_equal(jax.random.key_data(row), jax.random.key_data(rows[0]))


@pytest.mark.parametrize("seed", [2**32, 2**32 + 7, -(2**32), 2**63 - 1, -(2**63), np.int64(2**40)])
def test_no_bit_of_a_long_seed_is_dropped(seed):
    """2**32 was seed 0."""
    with jax.enable_x64(True):
        wanted = jax.random.key_data(jax.random.key(seed, impl="threefry2x32"))
    np.testing.assert_array_equal(jax.random.key_data(sampling.threefry(seed)), wanted)
    text = lambda key: decode(markov(), "autoregressive", [[0]], key=key, max_new_tokens=30, temperature=1.0).to_lists()
    assert text(seed) != text(int(seed) % 2**32)


@pytest.mark.parametrize("seed", [0, 7, 2**31, 2**32 - 1, -1, -(2**31), np.int8(-3), np.uint32(2**32 - 1)])
def test_the_key_of_a_short_seed_is_that_of_jax(seed):
    for wide in (False, True):
        with jax.enable_x64(wide):
            key = sampling.threefry(seed)
        np.testing.assert_array_equal(jax.random.key_data(key), jax.random.key_data(jax.random.key(int(seed))))


def test_threefry_keys_stay_and_others_keep_all_their_bits():
    key = jax.random.key(11, impl="threefry2x32")
    assert sampling.threefry(key) is key
    assert (sampling.threefry(jax.random.key_data(key)) == key).all()
    assert (sampling.row_keys(np.asarray(jax.random.key_data(key)), 2) == sampling.row_keys(key, 2)).all()
    words = np.arange(4, dtype=np.uint32)
    of = lambda words: jax.random.key_data(sampling.threefry(jax.random.wrap_key_data(jnp.asarray(words), impl="rbg")))
    for word in range(4):  # none of the four is dropped, and equal halves, as every rbg seed has, do not cancel
        assert (of(words) != of(np.where(np.arange(4) == word, 9, words).astype(np.uint32))).any()
    assert (of(np.array([1, 2, 1, 2], np.uint32)) != of(np.array([3, 4, 3, 4], np.uint32))).any()


@pytest.mark.parametrize("bad", [None, "0", 0.5, jnp.zeros(2), jnp.uint32(3), [1, 2]])
def test_what_is_no_key_is_refused(bad):
    with pytest.raises(UsageError, match=r"key must be a jax\.random\.key, a PRNGKey array or a seed"):
        decode(markov(), "autoregressive", [[0]], key=bad, max_new_tokens=2)


def test_another_number_of_keys_is_refused(implementation):
    for key in (jax.random.split(jax.random.key(0), 3), jnp.stack([jax.random.PRNGKey(0)] * 3)):
        with pytest.raises(UsageError, match=r"one key or one per row: got shape \(3,\) for 2 rows"):
            decode(markov(), "autoregressive", [[0]] * 2, key=key, max_new_tokens=2)
