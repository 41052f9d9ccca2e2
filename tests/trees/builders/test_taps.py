"""Values by path (TAPS): the tree without a fit, and the fit on processes with and without paths that matter."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from heads import tiny_head
from toy import tiny_llama

from specjax import UsageError, decode, make_drafter, trees
from specjax.drafters import autoregressive
from specjax.drafters.heads import path_values
from specjax.trees.builders.taps import estimate, with_weights
from specjax.trees.growing import grow
from specjax.types import Context, Sampling

VOCAB, LEVELS, BATCH = 8, 4, 32


def grown(builder, logits):
    """Return the trees on logits [B, levels, V], the distributions of the depths."""
    batch, levels, _ = logits.shape
    feed = lambda memory, frontier: (memory, logits[jnp.arange(batch)[:, None], frontier.depth])
    context = Context(*[None] * len(Context._fields))._replace(sampling=Sampling(None))
    root, limit = jnp.zeros(batch, jnp.int32), jnp.full(batch, levels)
    return grow(builder, feed, (), root, logits[:, 0], None, context, limit, is_path_free=True)[0]


def paths_of(tree, row):
    """Return the token paths of a tree."""
    paths = {0: ()}
    for node in np.flatnonzero(np.asarray(tree.valid)[row])[1:]:
        paths[node] = (*paths[int(tree.parents[row, node])], int(tree.tokens[row, node]))
    return set(paths.values()) - {()}


@pytest.mark.parametrize("total", [1, 5, 16])
def test_without_a_fit_the_nodes_are_those_of_ddtree(total):
    logits = jnp.asarray(np.random.default_rng(total).normal(size=(10, LEVELS, VOCAB)) * 2, jnp.float32)
    run = jax.jit(grown, static_argnums=0)
    ours, ddtree = (run(make(total, LEVELS), logits).tree for make in (trees.path_ddtree, trees.ddtree))
    for row in range(len(logits)):
        assert paths_of(ours, row) == paths_of(ddtree, row)


def draw_rounds(rng, rounds, has_modes):
    """Return logits float32[rounds, B, levels, V] of the depths, and texts int32[rounds, B, levels].

    A text follows one of two lists of tokens, each token with probability 0.9. The logits are those of the marginals.
    has_modes: False draws the list of each token anew, with the same marginals.
    """
    shape = (rounds, BATCH)
    lists = np.argsort(rng.uniform(size=(*shape, LEVELS, VOCAB)), -1)[..., :2]  # two tokens of each depth
    first = rng.uniform(0.5, 0.75, shape)
    size = shape if has_modes else (*shape, LEVELS)
    mode = rng.uniform(size=size) < (first if has_modes else first[..., None])
    mode = np.broadcast_to(mode[..., None] if has_modes else mode, (*shape, LEVELS))
    text = np.where(mode, lists[..., 0], lists[..., 1])
    text = np.where(rng.uniform(size=text.shape) < 0.9, text, rng.integers(0, VOCAB, text.shape))
    q = np.full((*shape, LEVELS, VOCAB), 0.1 / VOCAB)
    for i, share in enumerate((first, 1 - first)):
        np.put_along_axis(q, lists[..., i : i + 1], 0.1 / VOCAB + 0.9 * share[..., None, None], -1)
    return np.log(q).astype(np.float32), text.astype(np.int32)


@functools.partial(jax.jit, static_argnums=0)
def fit_and_test(builder, training, testing):
    """Fit the weights to rounds, and return accepted tokens float32[] and log loss float32[] with and without them."""
    number = jnp.full(BATCH, LEVELS)

    def round_(record, data):
        logits, text = data
        record = path_values.store(record, grown(with_weights(builder, record.learned), logits))
        return path_values.learn(record, text, number), None

    start = path_values.init_record(BATCH, builder.num_nodes, LEVELS)
    record, _ = jax.lax.scan(round_, start, training)

    def test(weights, data):
        tree = grown(with_weights(builder, weights), data[0])
        stored = path_values.store(start, tree)
        trial, hit = path_values.find_trials(stored.tokens, stored.parents, stored.drafted, data[1], number)
        return jnp.sum(stored.drafted & hit) / BATCH, trial, hit, stored.details

    def measure(weights):
        accepted, trial, hit, details = jax.lax.map(functools.partial(test, weights), testing)
        loss = lambda w: jnp.sum(
            jnp.where(trial, jax.nn.softplus(jnp.where(hit, -1, 1) * estimate(details, w.weights)), 0.0)
        ) / jnp.sum(trial)  # fmt: skip
        return jnp.mean(accepted), loss(record.learned), loss(start.learned)

    return measure(record.learned), measure(start.learned)


def test_fitted_values_rank_better_where_paths_matter():
    rng, builder = np.random.default_rng(0), trees.path_ddtree(6, LEVELS)
    training, testing = (tuple(map(jnp.asarray, draw_rounds(rng, rounds, True))) for rounds in (200, 60))
    (fitted, fitted_loss, marginal_loss), (marginal, *_) = fit_and_test(builder, training, testing)
    assert fitted > 1.1 * marginal, (fitted, marginal)
    assert fitted_loss < 0.8 * marginal_loss, (fitted_loss, marginal_loss)


def test_fitted_values_lose_nothing_where_paths_do_not_matter():
    rng, builder = np.random.default_rng(1), trees.path_ddtree(6, LEVELS)
    training, testing = (tuple(map(jnp.asarray, draw_rounds(rng, rounds, False))) for rounds in (200, 60))
    (fitted, *_), (marginal, *_) = fit_and_test(builder, training, testing)
    assert fitted > 0.97 * marginal, (fitted, marginal)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_unchanged(temperature):
    """Drafts are matched with the target's own draws, so sampled texts are equal, too."""
    target, prompts = tiny_llama(), [[3, 1, 4], [1, 5, 9, 2, 6]]
    options = {"key": jax.random.key(5), "max_new_tokens": 20, "temperature": temperature}
    drafter = make_drafter("dflash", target, tiny_head("dflash", target), tree=trees.parse("ddtree:6,values=path"))
    result = decode(target, drafter, prompts, **options)
    assert result.to_lists() == decode(target, autoregressive(), prompts, **options).to_lists()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("ddtree:6,values=other", 'the values of ddtree are "marginal" or "path", not "other"'),
        ("ddtree:6,values=path,children=2,gap=1", "leave gap out"),
        ("ddtree:6,values=path,children=0", "must be at least 1, not 6, None, 0"),
    ],
)
def test_bad_forms_are_refused(spec, message):
    with pytest.raises(UsageError, match=message):
        trees.parse(spec)


def test_a_stop_condition_is_refused():
    target, tree = tiny_llama(), trees.parse("ddtree:6,values=path")
    with pytest.raises(UsageError, match="leave the stop condition out"):
        make_drafter("dflash", target, tiny_head("dflash", target), tree=tree, stop=trees.stops.confidence(0.4))
