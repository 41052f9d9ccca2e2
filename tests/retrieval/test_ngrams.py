"""Tables of n-grams: what is written is found, winners are defined, full buckets give away the oldest place."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import UsageError
from specjax.retrieval import ngrams

MOST = 12  # n-grams of a write: one shape, one program
jit_write = jax.jit(ngrams.write, static_argnames="prefix")
jit_find = jax.jit(ngrams.find)


def new(buckets=2, ways=2, size=2):
    return jax.device_put(ngrams.empty(1, buckets, ways, size, np.float32(0)))


def write(table, grams, values=None, wanted=True, prefix=1):
    m = len(grams)
    pad = lambda x, *more: np.concatenate([x, np.zeros((MOST - m, *more), x.dtype)])[None]
    values = np.zeros(m) if values is None else np.asarray(values)
    wanted = np.broadcast_to(wanted, (m,))
    grams = pad(np.asarray(grams, np.int32), len(grams[0]))
    return jit_write(table, grams, pad(values.astype(np.float32)), pad(wanted), prefix=prefix)


def held(table, prefix):
    """{n-gram: value} of those that begin with `prefix`."""
    entries = jax.tree.map(lambda x: np.asarray(x)[0, 0], jit_find(table, np.asarray(prefix, np.int32)[None, None]))
    return {
        tuple(g): float(v) for g, v, h in zip(entries.grams.tolist(), entries.values, entries.hit, strict=True) if h
    }


def test_a_dictionary_of_random_ngrams():
    """The table with room for all is a dictionary in which the last write counts."""
    rng = np.random.default_rng(0)
    table, wanted = new(64, 16), {}
    for _ in range(5):
        grams, values = rng.integers(0, 8, (12, 2)), rng.random(12).astype(np.float32)
        use = rng.random(12) < 0.8
        table = write(table, grams, values, use, prefix=2)
        wanted |= {tuple(g): v for g, v, u in zip(grams.tolist(), values, use, strict=True) if u}
    assert len(wanted) > 20
    for a in range(8):
        for b in range(8):
            assert held(table, [a, b]) == pytest.approx({(a, b): wanted[a, b]} if (a, b) in wanted else {})


def test_prefixes_find_all_that_followed():
    table = write(new(8, 4, 3), [[1, 2, 3], [1, 5, 6], [4, 2, 3], [1, 2, 3]])
    assert set(held(table, [1])) == {(1, 2, 3), (1, 5, 6)}
    assert set(held(table, [4])) == {(4, 2, 3)}
    assert held(table, [2]) == {}


def test_a_full_bucket_gives_away_its_oldest_place():
    table = write(new(), [[7, 1], [7, 2]])
    table = write(table, [[7, 1]])  # younger than [7, 2] now
    table = write(table, [[7, 3]])
    assert set(held(table, [7])) == {(7, 1), (7, 3)}
    # Three at once in two places: one is there already and keeps its place, of the new ones the last fits.
    table = write(table, [[7, 4], [7, 1], [7, 5]])
    assert set(held(table, [7])) == {(7, 1), (7, 5)}


def test_rows_do_not_touch_each_other_and_one_row_serves_all():
    grams = jnp.array([[[1, 2]], [[1, 3]]])
    table = jit_write(ngrams.empty(2, 4, 2, 2), grams, (), jnp.array([[True], [False]]), prefix=2)
    assert np.any(jit_find(table, grams).hit, 2).tolist() == [[True], [False]]
    shared = jax.tree.map(lambda x: x[:1], table)
    assert np.any(jit_find(shared, grams[::-1]).hit, 2).tolist() == [[False], [True]]


def test_merge_combines_equal_ngrams_and_keeps_the_latest():
    rows = [write(new(), [[7, 1], [7, 2]], [1, 2]), write(new(), [[7, 1]], [10])]
    merge = jax.jit(functools.partial(ngrams.merge, combine=jnp.add))
    merged = merge(new(), jax.tree.map(lambda *x: jnp.concatenate(x), *rows))
    assert held(merged, [7]) == {(7, 1): 11, (7, 2): 2}
    more = write(new(), [[7, 3]], [5])
    again = merge(merged, jax.tree.map(lambda x: jnp.concatenate([x, x]), more))
    assert held(again, [7]) == {(7, 1): 11, (7, 3): 10}  # (7, 2) was written before (7, 1)
    old = again._replace(ages=jnp.where(again.ages > 0, again.ages + (1 << 30), 0), clock=again.clock + (1 << 30))
    for _ in range(3):  # no clock runs over
        old = merge(old, write(new(), [[7, 4]], [1]))
        assert 0 < int(old.clock[0]) < 1 << 30 and (old.ages >= 0).all()
    assert held(old, [7]) == {(7, 3): 10, (7, 4): 3}


def test_a_merged_table_holds_nothing_in_free_places():
    """The n-gram of both tables leaves its place in the second, which nothing else fills."""
    one, other = (write(new(ways=3), [[7, 1]], [1]) for _ in range(2))
    merged = jax.jit(functools.partial(ngrams.merge, combine=jnp.add))(one, other)
    assert held(merged, [7]) == {(7, 1): 2}
    assert jit_find(merged, jnp.array([[[7]]])).hit.sum() == 1


def test_text_is_learned_in_chunks():
    length = ngrams.CHUNK + 20
    tokens = jnp.stack([jnp.arange(length + 5), jnp.arange(length + 5)])
    learn = lambda table, grams, wanted: ngrams.write(table, grams, (), wanted, prefix=2)
    teach = jax.jit(lambda *text: ngrams.learn_text(ngrams.empty(2, 512, 8, 3), *text, 3, learn))
    ages = np.asarray(teach(tokens, jnp.array([length, 10])).ages)
    count = lambda row: np.sum(ages[row] > 0)
    assert (count(0), count(1)) == (length - 2, 8)
    grams, inside = ngrams.windows(tokens, jnp.array([length, 2]), jnp.array([length - 3, -1]), 2, 3)
    assert grams[0, 0].tolist() == [length - 3, length - 2, length - 1]
    assert inside.tolist() == [[True, False], [False, False]]


def test_numpy_and_jax_choose_the_same_bucket():
    prefix = np.random.default_rng(1).integers(0, 1 << 20, (50, 3), dtype=np.int32)
    ours = ngrams.bucket(prefix, 64)
    np.testing.assert_array_equal(ours, ngrams.bucket(jnp.asarray(prefix), 64))
    assert ours.min() >= 0 and ours.max() < 64 and len(set(ours.tolist())) > 20
    for buckets in (1, 3, 0):
        with pytest.raises(UsageError, match="power of two"):
            ngrams.check_buckets(buckets)


def test_chunks_are_learned_one_after_another():
    add = lambda total, x, y: total + jnp.sum(x * y, 1)
    x = jnp.arange(2.0 * 70).reshape(2, 70)
    np.testing.assert_allclose(ngrams.scan_chunks(add, jnp.ones(2), x, x), 1 + jnp.sum(x * x, 1), rtol=1e-6)
