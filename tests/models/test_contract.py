"""The conformance suite of models: the contract of every `Model`, whatever its cache contains.

Caches are compared by the predictions made from them, because only models may look into them.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hybrids import tiny_hybrid
from toy import tiny_llama
from toy_models import alike, encoding, fold_in_order, inputs_of, recurrent, recurrent_model

from specjax.arrays import batch_axes
from specjax.engine.prefill import CHUNK, prefill
from specjax.errors import UsageError
from specjax.models import Gemma3Config, init_params, make_model
from specjax.models.rotary import RopeScaling
from specjax.trees import operations
from specjax.types import Target

ROWS, VOCAB, CAPACITY = 3, 12, 2 * CHUNK + 32
TEXT = np.random.default_rng(0).integers(0, VOCAB, (ROWS, 12)).astype(np.int32)
LENGTHS = np.array([7, 1, 4], np.int32)
TOKENS = np.random.default_rng(1).integers(0, VOCAB, (ROWS, 6)).astype(np.int32)
PARENTS = np.array([[-1, 0, 0, 1, 1, 2], [-1, 0, 1, 0, 3, 4], [-1, 0, 1, 2, 3, 4]], np.int32)  # a row with a chain


OPTIONS = dict(
    norms="after", qk_norm=True, qk_norm_scope="projection", rotary_dim=6,
    rope_scaling=RopeScaling("yarn", 4.0, 1.0, 2.0, 4),
    window=3, is_global=(False, True), local_rope_base=100.0,
)  # fmt: skip
"""What families of Llama's kind add."""


@functools.cache
def gemma() -> Target:
    config = Gemma3Config(
        vocab_size=VOCAB, width=16, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=8, mlp_width=32,
        is_global=(False, True, False), window=3, attention_softcap=1.0, logit_softcap=5.0,
    )  # fmt: skip
    return Target(make_model(config), init_params(config, jax.random.key(0)))


def case_of(name: str) -> tuple[Target, float]:
    """Return a model, and the tolerance of its logits for rounding."""
    if name == "llama":
        return tiny_llama(vocab=VOCAB), 1e-4
    if name == "stacked":
        return tiny_llama(vocab=VOCAB, stacked=True, **OPTIONS), 1e-4
    if name == "int8":
        return tiny_llama(vocab=VOCAB, cache_dtype="int8"), 0.02
    if name == "gear":
        return tiny_llama(vocab=VOCAB, cache_dtype="gear:4,block=8"), 0.02
    if name == "hybrid":
        return tiny_hybrid(VOCAB), 1e-4
    return {"gemma": gemma, "recurrent": recurrent, "encoding": encoding}[name](), 1e-4


MODELS = ("llama", "stacked", "int8", "gear", "gemma", "recurrent", "encoding", "hybrid")
every_model = pytest.mark.parametrize("name", MODELS)


class Passed(NamedTuple):
    logits: np.ndarray
    pending: object


def begin(target: Target, rows=slice(None)):
    inputs = inputs_of(ROWS)[rows] if target.model.capabilities.inputs else None
    return target.model.init_cache(target.params, inputs, len(TEXT[rows]), CAPACITY)


@jax.jit
def read(target, cache, text, count):
    return prefill(target.model, target.params, cache, text, count)


def filled(target: Target, text=TEXT, count=LENGTHS, rows=slice(None)):
    """Return the cache of the first `count` tokens of each text."""
    text = np.pad(np.asarray(text)[rows], ((0, 0), (0, CHUNK)))
    return read(target, begin(target, rows), jnp.asarray(text), jnp.asarray(np.asarray(count)[rows]))


@jax.jit
def forward(target, cache, tokens, positions, mask, earlier=None):
    output, pending = target.model.forward(
        target.params,
        tokens,
        cache,
        positions=positions,
        mask=mask,
        **({} if earlier is None else {"earlier": earlier}),
    )
    return output.logits, pending


def look(target, cache, tokens, start, parents=None, earlier=None, mask=None) -> Passed:
    """Run a pass over tokens [B, T] after texts of `start` tokens: a chain, or the tree of `parents`."""
    tokens = jnp.asarray(tokens)
    if parents is None:
        parents = jnp.broadcast_to(jnp.arange(tokens.shape[1]) - 1, tokens.shape)
    mask = operations.ancestor_mask(jnp.asarray(parents)) if mask is None else mask
    positions = jnp.asarray(start)[:, None] + jnp.sum(mask, 2) - 1
    logits, pending = forward(target, cache, tokens, positions, mask, earlier)
    return Passed(np.asarray(logits), pending)


@jax.jit
def commit(target, cache, pending, path, count):
    return target.model.commit(cache, pending, path, count)


def next_logits(target, cache, length):
    """Return float32[B, V], the prediction of a cache of `length` tokens after one more token."""
    return look(target, cache, TOKENS[:, :1], length).logits[:, 0]


def joined(count):
    """Return TEXT with the first `count` [B] of TOKENS after its LENGTHS."""
    text = TEXT.copy()
    for b, n in enumerate(count):
        text[b, LENGTHS[b] : LENGTHS[b] + n] = TOKENS[b, :n]
    return text


@every_model
def test_a_chain_is_its_single_steps(name):
    target, atol = case_of(name)
    cache = filled(target)
    chain = look(target, cache, TOKENS[:, :4], LENGTHS).logits
    one, first = jnp.ones((ROWS,), jnp.int32), jnp.zeros((ROWS, 1), jnp.int32)
    for i in range(4):
        logits, pending = look(target, cache, TOKENS[:, i : i + 1], LENGTHS + i)
        np.testing.assert_allclose(chain[:, i], logits[:, 0], atol=atol)
        cache = commit(target, cache, pending, first, one)


def path_of(row: int, node: int) -> list[int]:
    path = []
    while node >= 0:
        path.insert(0, node)
        node = int(PARENTS[row, node])
    return path


def worst_of_tree(target: Target) -> float:
    """Return the largest difference between the logits of a tree's nodes and those of their paths alone."""
    cache = filled(target)
    tree, worst = look(target, cache, TOKENS, LENGTHS, PARENTS).logits, 0.0
    for node in range(1, TOKENS.shape[1]):
        paths = [path_of(b, node) for b in range(ROWS)]
        tokens = np.stack([np.resize(TOKENS[b, path], 6) for b, path in enumerate(paths)])  # what follows is not read
        alone = look(target, cache, tokens, LENGTHS).logits
        worst = max(worst, *(np.abs(tree[b, node] - alone[b, len(p) - 1]).max() for b, p in enumerate(paths)))
    return worst


@every_model
def test_a_node_sees_its_ancestors_alone(name):
    target, atol = case_of(name)
    assert worst_of_tree(target) < atol


def test_a_recurrence_that_ignores_the_tree_is_caught():
    model = recurrent_model(VOCAB, fold_in_order)
    target = Target(model, recurrent().params)
    assert worst_of_tree(target) > 0.1
    chain = [look(one, filled(one), TOKENS, LENGTHS).logits for one in (target, recurrent())]
    np.testing.assert_array_equal(*chain)  # on chains it is right


@every_model
def test_a_tree_may_grow_by_levels(name):
    """Later nodes see the earlier ones that are still pending."""
    target, atol = case_of(name)
    cache, full = filled(target), operations.ancestor_mask(jnp.asarray(PARENTS))
    at_once = look(target, cache, TOKENS, LENGTHS, PARENTS).logits
    _, pending = look(target, cache, TOKENS[:, :3], LENGTHS, PARENTS[:, :3])
    later = look(target, cache, TOKENS[:, 3:], LENGTHS, mask=full[:, 3:], earlier=pending)
    np.testing.assert_allclose(at_once[:, 3:], later.logits, atol=atol)
    wide = target.model.insert(target.model.widen(pending, 6), later.pending, 3)
    path, count = np.array([[0, 1, 4], [0, 3, 4], [0, 1, 2]]), np.array([3, 3, 2], np.int32)
    text = TEXT.copy()
    for b in range(ROWS):
        text[b, LENGTHS[b] : LENGTHS[b] + count[b]] = TOKENS[b, path[b, : count[b]]]
    committed = commit(target, cache, wide, jnp.asarray(path), jnp.asarray(count))
    expected = filled(target, text, LENGTHS + count)
    ours, theirs = (next_logits(target, one, LENGTHS + count) for one in (committed, expected))
    np.testing.assert_allclose(ours, theirs, atol=atol)


@every_model
@pytest.mark.parametrize("count", [[3, 2, 0], [1, 4, 6]])
def test_a_committed_path_is_a_text_that_was_read(name, count):
    """Rows without committed nodes do not change."""
    target, atol = case_of(name)
    cache, count = filled(target), np.array(count, np.int32)
    _, pending = look(target, cache, TOKENS, LENGTHS)
    path = jnp.where(jnp.arange(6) < count[:, None], jnp.arange(6), -1)
    committed = commit(target, cache, pending, path, jnp.asarray(count))
    expected = filled(target, joined(count), LENGTHS + count)
    ours, theirs = (next_logits(target, one, LENGTHS + count) for one in (committed, expected))
    np.testing.assert_allclose(ours, theirs, atol=atol)
    assert np.abs(ours - next_logits(target, cache, LENGTHS)).max() > 0.3  # so that a commit that does nothing is seen


@every_model
def test_to_rewind_is_never_to_have_read(name):
    target, atol = case_of(name)
    if target.model.rewind is None:
        assert name in ("recurrent", "hybrid", "gear")
        return
    retained = np.array([5, 1, 0], np.int32)
    longer = filled(target, TEXT, LENGTHS)
    ours, theirs = target.model.rewind(longer, jnp.asarray(retained)), filled(target, TEXT, retained)
    predicted = [next_logits(target, cache, retained) for cache in (ours, theirs)]
    np.testing.assert_allclose(*predicted, atol=atol)
    assert np.abs(predicted[0] - next_logits(target, longer, retained)).max() > 0.1
    beyond = target.model.rewind(longer, jnp.asarray(LENGTHS + 9))  # nothing to forget
    np.testing.assert_array_equal(next_logits(target, beyond, LENGTHS), next_logits(target, longer, LENGTHS))


@every_model
@pytest.mark.parametrize("place", [3, jnp.int32(2), jnp.array([3, 2, 4])], ids=["int", "array", "per row"])
def test_what_is_inserted_stands_at_its_place(name, place):
    target, atol = case_of(name)
    cache = filled(target)
    _, pending = look(target, cache, TOKENS[:, :2], LENGTHS)
    new = look(target, cache, TOKENS[:, 2:3], LENGTHS, mask=jnp.ones((ROWS, 1, 3), bool), earlier=pending).pending
    wide = jax.jit(lambda old, new: target.model.insert(target.model.widen(old, 5), new, place))(pending, new)
    slots = np.broadcast_to(np.asarray(place), (ROWS,))
    path = jnp.stack([jnp.zeros(ROWS, jnp.int32), jnp.ones(ROWS, jnp.int32), jnp.asarray(slots, jnp.int32)], 1)
    committed = commit(target, cache, wide, path, jnp.full((ROWS,), 3))
    expected = filled(target, joined([3] * ROWS), LENGTHS + 3)
    ours, theirs = (next_logits(target, one, LENGTHS + 3) for one in (committed, expected))
    np.testing.assert_allclose(ours, theirs, atol=atol)


@every_model
def test_axes_say_where_the_rows_are(name):
    """Rows in another order give the same arrays in that order, and a row may be put into another batch."""
    target, atol = case_of(name)
    order = np.array([2, 0, 1])
    states = []
    for rows in (slice(None), order):
        cache = filled(target, rows=rows)
        states.append((cache, look(target, cache, TOKENS[rows], LENGTHS[rows]).pending))
    for full, moved in zip(*states, strict=True):
        axes = target.model.axes(full)
        assert jax.tree.structure(axes) == jax.tree.structure(full)
        assert axes == target.model.axes(jax.eval_shape(lambda x: x, full))
        permuted = jax.tree.map(lambda axis, x: jnp.take(x, order, axis), axes, full)
        for ours, theirs in zip(jax.tree.leaves(permuted), jax.tree.leaves(moved), strict=True):
            np.testing.assert_allclose(np.asarray(ours, np.float32), np.asarray(theirs, np.float32), atol=1e-5)
    cache, other = states[0][0], filled(target, TEXT[:, ::-1])
    alone = filled(target, rows=slice(1, 2))
    mixed = batch_axes.put_row(other, alone, jnp.int32(1), target.model.axes(other))
    predicted, expected, original = (next_logits(target, one, LENGTHS) for one in (mixed, cache, other))
    np.testing.assert_allclose(predicted[1], expected[1], atol=atol)
    np.testing.assert_array_equal(predicted[[0, 2]], original[[0, 2]])


@every_model
def test_embedding_and_head_are_those_of_a_pass(name):
    target, _ = case_of(name)
    model, params = target.model, target.params
    able = model.capabilities
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((6, 6), bool)), (ROWS, 6, 6))
    positions = jnp.asarray(LENGTHS)[:, None] + jnp.arange(6)
    taps = {"taps": (0, able.num_layers)} if able.taps else {}
    output, _ = model.forward(params, jnp.asarray(TOKENS), filled(target), positions=positions, mask=mask, **taps)
    np.testing.assert_allclose(model.unembed(params, output.hidden), output.logits, atol=1e-5)
    np.testing.assert_allclose(model.unembed(params, output.hidden[0, 0]), output.logits[0, 0], atol=1e-5)
    if model.best is not None:
        best = model.best(params, output.hidden, 3)
        np.testing.assert_allclose(best.logits, jax.lax.top_k(output.logits, 3)[0], atol=1e-5)
        np.testing.assert_array_equal(best.tokens[..., 0], jnp.argmax(output.logits, -1))
        np.testing.assert_allclose(best.total, jax.nn.logsumexp(output.logits, -1), atol=1e-4)
    if able.taps:
        np.testing.assert_allclose(model.embed(params, jnp.asarray(TOKENS)), output.taps[0], atol=1e-6)
        np.testing.assert_allclose(model.head(params, output.taps[1]), output.logits, atol=1e-4)


def test_inputs_matter_and_are_refused_where_nothing_reads_them():
    target = encoding()
    caches = [target.model.init_cache(target.params, inputs_of(ROWS, seed=seed), ROWS, CAPACITY) for seed in (0, 1)]
    predicted = [next_logits(target, cache, np.zeros(ROWS, np.int32)) for cache in caches]
    assert (np.abs(predicted[0] - predicted[1]).max(-1) > 0.3).all()
    with pytest.raises(UsageError, match="the model llama takes tokens only; leave inputs out"):
        tiny_llama().model.init_cache(None, inputs_of(1), 1, 8)


def test_equal_hyperparameters_give_the_same_model():
    config = tiny_llama(vocab=VOCAB).model.config
    assert make_model(dataclasses.replace(config)) is make_model(config)
    assert alike(recurrent()).model is recurrent().model
