"""The card's oracle tests of any-subset speculative decoding: a joint distribution by hand, a small trained model."""

import dataclasses
import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compiled_programs
from scipy.stats import chisquare
from toy import DATA, TARGET_ROWS, joint_distribution
from toy_decoders import exact

from specjax import UsageError
from specjax.decoders import AnySubsetModel, any_subset, blank_prompts
from specjax.decoders.any_subset import content_mask, token_order

GOLDEN = json.loads((DATA / "verification_any_subset.json").read_text())
JOINT = np.array(GOLDEN["joint"], np.float32).reshape(2, 2, 2)
ROWS = 20_000
SEQUENTIAL_CALLS = 3  # the golden 5 of k = 1 count two second calls that the loop skips


def blank(rows, size):
    return jnp.zeros((rows, size), jnp.int32), jnp.ones((rows, size), bool)


def p_value(tokens, distribution):
    """Return the chi-square of texts int[B, S] against [V, ..., V]; cells that expect fewer than 5 are merged."""
    vocab, size = distribution.shape[0], distribution.ndim
    index = np.asarray(tokens) @ vocab ** np.arange(size - 1, -1, -1)
    expected = distribution.ravel().astype(np.float64) / distribution.sum() * len(index)
    observed, small = np.bincount(index, minlength=vocab**size), expected < 5
    if small.any():
        observed = np.append(observed[~small], observed[small].sum())
        expected = np.append(expected[~small], expected[small].sum())
    assert observed[expected == 0].sum() == 0
    observed, expected = observed[expected > 0], expected[expected > 0]
    return chisquare(observed, expected, sum_check=False).pvalue


@pytest.mark.parametrize("window", [1, 2, 3])
def test_joint_law_and_expected_calls(window):
    result = any_subset(exact(JOINT), *blank(ROWS, 3), key=jax.random.key(0), window=window)
    assert p_value(result.filled, JOINT) > 1e-3
    golden = GOLDEN["by_k"][f"k={window}"]
    calls = np.asarray(result.stats.target_passes)
    if window == 1:
        assert golden["expected_network_calls"] == 5
        assert (calls == SEQUENTIAL_CALLS).all()
    else:
        assert abs(calls.mean() - golden["expected_network_calls"]) <= 4 * calls.std() / ROWS**0.5
        assert calls.max() == golden["worst_case_calls"]


def test_independent_positions_are_all_accepted():
    distribution = np.einsum("a,b,c->abc", *TARGET_ROWS)
    result = any_subset(exact(distribution), *blank(ROWS, 3), key=jax.random.key(1), window=3)
    assert (np.asarray(result.stats.target_passes) == 2).all()
    assert (np.asarray(result.stats.accepted) == 3).all()
    assert p_value(result.filled, distribution) > 1e-3


def test_any_positions_may_be_missing_and_rows_may_be_shorter():
    distribution = joint_distribution(TARGET_ROWS, 0, 3)
    tokens = jnp.tile(jnp.array([[7, 7, 2]]), (ROWS, 1))  # 7: never read
    fill = functools.partial(any_subset, exact(distribution), tokens, key=jax.random.key(2), window=3)
    result = fill(tokens == 7)
    conditional = distribution.copy()
    conditional[:, :, [0, 1]] = 0
    assert p_value(result.filled, conditional) > 1e-3
    assert result.to_lists() == np.asarray(result.filled)[:, :2].tolist()  # those that were missing
    assert (np.asarray(result.block_efficiency) == 1).all() and set(result.finish_reasons) == {"length"}
    assert (np.asarray(result.stats.target_passes) == 2).all()
    assert 0.05 < (np.asarray(result.stats.accepted) == 1).mean() < 0.5  # the two depend on each other
    short = fill(jnp.arange(3) == tokens * 0, lengths=jnp.full((ROWS,), 1))
    first = np.bincount(short.filled[:, 0], minlength=3)
    assert chisquare(first, TARGET_ROWS[0] * ROWS, sum_check=False).pvalue > 1e-3  # the others are no context
    assert (np.asarray(short.stats.target_passes) == 1).all()
    full = any_subset(exact(distribution), tokens % 3, jnp.zeros_like(tokens, bool), key=0)
    np.testing.assert_array_equal(full.filled, tokens % 3)
    assert (np.asarray(full.stats.target_passes) == 0).all()


def test_left_to_right_after_a_prompt_is_a_markov_text():
    """Draft independent tokens after a prompt: the distribution equals that of plain decoding."""
    tokens = jnp.tile(jnp.array([[1, 0, 0]]), (ROWS, 1))
    missing = jnp.broadcast_to(jnp.arange(3) > 0, tokens.shape)
    result = any_subset(exact(joint_distribution(TARGET_ROWS, 0, 3)), tokens, missing, key=jax.random.key(3), window=3)
    assert p_value(result.filled[:, 1:], joint_distribution(TARGET_ROWS, 1, 2)) > 1e-3
    assert (np.asarray(result.stats.target_passes) == 2).all()


def test_greedy_is_the_likeliest_token_after_each_other():
    result = any_subset(exact(JOINT), *blank(1, 3), key=jax.random.key(0), window=3, temperature=0)
    assert result.filled[0].tolist() == [1, 1, 0]  # 0.6 to 0.4, 0.4 to 0.2, 0.25 to 0.15


def test_masks_by_hand():
    order = token_order(jnp.array([[True, False, True, False, True]]), jnp.array([4]))
    assert order.position[0].tolist() == [1, 3, 0, 2, 4]
    assert order.rank[0].tolist() == [2, 0, 3, 1, 4]
    assert (order.num_given.tolist(), order.stop.tolist()) == ([2], [4])
    content = content_mask(order)[0, :4].astype(int).tolist()
    assert content == [[1, 1, 0, 1, 0], [0, 1, 0, 1, 0], [1, 1, 1, 1, 0], [0, 1, 0, 1, 0]]


VOCAB, SIZE, WIDTH, LAYERS = 3, 4, 16, 2


def two_stream(params, tokens, content, positions, query):
    """Return a tiny XLNet: the content stream reads its own token, the query stream only its position."""
    h = params["token"][tokens] + params["position"]  # [B, S, D]
    g = params["position"][positions]  # [B, Q, D]

    def attend(layer, x, source, mask):
        scores = jnp.einsum("bqd,bsd->bqs", x @ layer["q"], source @ layer["k"])
        scores = jnp.pad(jnp.where(mask, scores, -1e9), ((0, 0), (0, 0), (0, 1)))  # a query may see nothing
        weights = jax.nn.softmax(scores, -1)[:, :, :-1]
        x = x + jnp.einsum("bqs,bsd->bqd", weights, source @ layer["v"])
        return x + jax.nn.relu(x @ layer["in"]) @ layer["out"]

    for layer in params["layers"]:
        g, h = attend(layer, g, h, query), attend(layer, h, h, content)
    return g @ params["head"]


@functools.cache
def trained():
    """Return the model after a few hundred steps on Markov texts in random orders, and its last loss."""
    optax = pytest.importorskip("optax")
    keys = iter(jax.random.split(jax.random.key(0), 64))
    matrix = lambda rows, columns: jax.random.normal(next(keys), (rows, columns)) / rows**0.5
    shapes = {"q": (WIDTH, WIDTH), "k": (WIDTH, WIDTH), "v": (WIDTH, WIDTH), "in": (WIDTH, 32), "out": (32, WIDTH)}
    params = {
        "token": matrix(VOCAB, WIDTH),
        "position": matrix(SIZE, WIDTH),
        "head": matrix(WIDTH, VOCAB),
        "layers": [{name: matrix(*shape) for name, shape in shapes.items()} for _ in range(LAYERS)],
    }
    optimizer = optax.adam(1e-2)
    distribution = jnp.log(jnp.asarray(joint_distribution(TARGET_ROWS, 0, SIZE), jnp.float32)).ravel()
    texts = jnp.array(list(itertools.product(range(VOCAB), repeat=SIZE)))

    def loss(params, key):
        drawn, ordered = jax.random.split(key)
        tokens = texts[jax.random.categorical(drawn, distribution, shape=(128,))]
        order = token_order(jax.random.bernoulli(ordered, 0.7, tokens.shape), jnp.full((128,), SIZE))
        positions = jnp.broadcast_to(jnp.arange(SIZE), tokens.shape)
        query = order.rank[:, None, :] < order.rank[:, :, None]
        logits = jax.nn.log_softmax(two_stream(params, tokens, content_mask(order), positions, query))
        return -jnp.mean(jnp.take_along_axis(logits, tokens[:, :, None], 2))

    def step(carry, key):
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params, key)
        updates, state = optimizer.update(grads, state)
        return (optax.apply_updates(params, updates), state), value

    run = jax.jit(lambda params, keys: jax.lax.scan(step, (params, optimizer.init(params)), keys))
    (params, _), losses = run(params, jax.random.split(jax.random.key(1), 400))
    return AnySubsetModel(two_stream, VOCAB, params=params), np.asarray(losses)


def sequential_distribution(model, tokens, missing):
    """Enumerate the model's distribution [V, ..., V] of the missing tokens, decoded one by one by position."""
    size = len(tokens)
    texts = np.array(list(itertools.product(range(VOCAB), repeat=size)))
    order = token_order(jnp.tile(jnp.array(missing), (len(texts), 1)), jnp.full((len(texts),), size))
    positions = jnp.tile(jnp.arange(size), (len(texts), 1))
    query = order.rank[:, None, :] < order.rank[:, :, None]
    logits = model.apply(model.params, jnp.asarray(texts), content_mask(order), positions, query)
    each = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), texts[:, :, None], 2)[:, :, 0]
    distribution = np.exp(np.where(missing, each, 0).sum(1))
    distribution[~np.all(np.array(missing) | (texts == tokens), 1)] = 0
    return distribution.reshape((VOCAB,) * size)


@pytest.mark.parametrize(("tokens", "missing"), [([0, 0, 0, 0], [True] * 4), ([0, 0, 2, 0], [True, True, False, True])])
def test_a_trained_model_keeps_its_sequential_distribution(tokens, missing):
    model, losses = trained()
    assert losses[-50:].mean() < losses[:20].mean() - 0.1  # it learnt something
    distribution = sequential_distribution(model, tokens, missing)
    assert abs(distribution.sum() - 1) < 1e-4
    repeat = lambda x: jnp.tile(jnp.array(x), (ROWS, 1))
    result = any_subset(model, repeat(tokens), repeat(missing), key=jax.random.key(4), window=4)
    assert p_value(result.filled, distribution) > 1e-3
    assert (np.asarray(result.stats.target_passes) <= sum(missing)).all()
    if sum(missing) == 4:
        independent = functools.reduce(
            np.multiply.outer, [distribution.sum(tuple({0, 1, 2, 3} - {i})) for i in range(4)]
        )
        assert p_value(result.filled, independent) < 1e-6  # the drafts alone would be caught


def test_a_row_alone_equals_the_row_in_a_batch_and_a_second_call_compiles_nothing():
    model = dataclasses.replace(exact(joint_distribution(TARGET_ROWS, 0, 3)), mask_token=2)
    tokens = jnp.array([[0, 1, 0], [1, 1, 0], [0, 0, 1]])
    missing = jnp.array([[True, True, True], [False, True, True], [True, False, False]])
    keys = jax.random.split(jax.random.key(5), 3)
    batch = any_subset(model, tokens, missing, key=keys, window=2)
    assert not (np.asarray(batch.filled) == model.mask_token)[missing].any()  # the mask token is never drawn
    for b in range(3):
        alone = any_subset(model, tokens[b : b + 1], missing[b : b + 1], key=keys[b : b + 1], window=2)
        for ours, theirs in zip(jax.tree.leaves(alone), jax.tree.leaves(batch), strict=True):
            np.testing.assert_array_equal(ours[0], theirs[b])
    other = jax.block_until_ready(jax.random.split(jax.random.key(6), 3))
    with compiled_programs() as compiled:
        jax.block_until_ready(any_subset(model, tokens, missing, key=other, window=2))
    assert compiled == []


def test_prompts_that_cannot_be_filled():
    model = dataclasses.replace(exact(JOINT), mask_token=1)
    for prompts, count, words in (
        ([], 3, "prompts is empty"),
        ([[0], []], 3, "prompt 1 is empty"),
        ("ab", 3, "not text"),
        ([[0.5]], 3, "must be integers"),
        ([[0]], 0, "max_new_tokens must be at least 1, not 0"),
    ):
        with pytest.raises(UsageError, match=words):
            blank_prompts(model, prompts, count)
    tokens, missing, _ = blank_prompts(model, [np.array([0, 1]), [1 << 40]], 1)
    assert missing.tolist() == [[False, True], [False, True]]
    with pytest.raises(UsageError, match="outside of the model's vocabulary"):
        any_subset(model, tokens, missing, key=0)


def test_usage_errors():
    model = exact(JOINT)
    with pytest.raises(UsageError, match="window must be a whole number from 1 to 4096, not 0"):
        any_subset(model, *blank(1, 3), key=jax.random.key(0), window=0)
    with pytest.raises(UsageError, match=r"must both be \[B, S\]"):
        any_subset(model, jnp.zeros((1, 3)), jnp.ones((1, 2)), key=jax.random.key(0))
    with pytest.raises(UsageError, match="one per row"):
        any_subset(model, *blank(1, 3), key=jax.random.split(jax.random.key(0), 2))
