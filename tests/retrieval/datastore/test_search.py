"""Search on the host against brute force, on the device against the host."""

import collections
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import UsageError
from specjax.parallel import mesh
from specjax.retrieval.datastore import Index, continuations, from_documents, search
from specjax.retrieval.datastore import index as module

MAX_SPAN, PATHS, LENGTH = 4, 5, 3
documents = st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=4).filter(any)


@jax.jit
def on_device(index, text, length):
    matches = search(index, text, length)
    return matches, continuations(index, matches, PATHS, LENGTH)


SHARDS, PLACES = 8, 30


def padded(index: Index, places: int = PLACES) -> Index:
    """The same index in arrays of one size, so that all examples share a program."""
    more = ((0, SHARDS - index.tokens.shape[0]), (0, places - index.tokens.shape[1]))
    tokens = np.pad(np.asarray(index.tokens), more, constant_values=index.vocab_size)
    suffixes, sizes = np.pad(np.asarray(index.suffixes), more), np.pad(np.asarray(index.sizes), more[:1])
    return Index(tokens, suffixes, sizes, index.vocab_size)


def pieces_of(store):
    """The documents as the shards hold them."""
    for shard in store.shards:
        ends = np.flatnonzero(shard.tokens == store.vocab_size)
        yield from (piece.tolist() for piece in np.split(shard.tokens, ends + 1))


def brute_force(store, text):
    """The longest span and how often each continuation occurs."""
    for span in range(min(MAX_SPAN, len(text)), 1, -1):
        counts = collections.Counter()
        for piece in pieces_of(store):
            for i in range(len(piece) - span):
                if piece[i : i + span] == text[len(text) - span :]:
                    counts[tuple(t for t in piece[i + span : i + span + LENGTH] if t != store.vocab_size)] += 1
        if counts:
            return span, counts
    return 0, collections.Counter()


def paths_of(array):
    return collections.Counter(tuple(t for t in row if t >= 0) for row in np.asarray(array).tolist())


@hypothesis.settings(max_examples=80, deadline=None)
@hypothesis.given(documents, st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(8, PLACES))
def test_device_equals_host_equals_brute_force(documents, text, shard_tokens):
    store = from_documents(documents, 3, shard_tokens=shard_tokens)
    assert all(shard.tokens[-1] == 3 and len(shard.tokens) <= shard_tokens for shard in store.shards)
    span, wanted = brute_force(store, text)
    match = store.search(text, MAX_SPAN)
    assert (match.span, sum(match.counts)) == (span, sum(wanted.values()))
    every = store.continuations(match, 60, LENGTH)
    assert paths_of(every[: sum(match.counts)]) == wanted

    last = np.zeros(MAX_SPAN, np.int32)
    last[-len(text[-MAX_SPAN:]) :] = text[-MAX_SPAN:]
    matches, paths = on_device(padded(store.to_device()), np.array([last]), np.array([len(text)]))
    assert int(matches.span[0]) == match.span
    shards = len(store.shards)
    assert matches.counts[0].tolist() == match.counts + [0] * (SHARDS - shards)
    for ours, theirs, count in zip(matches.first[0].tolist(), match.first, match.counts, strict=False):
        assert ours == theirs or not count
    np.testing.assert_array_equal(paths[0], store.continuations(match, PATHS, LENGTH))


def test_rows_do_not_see_each_other():
    store = from_documents([np.random.default_rng(0).integers(0, 3, 59)], 3)
    text = np.random.default_rng(1).integers(0, 3, (6, MAX_SPAN))
    length = jnp.array([9, 4, 3, 2, 1, 9])
    index = store.to_device()
    matches, paths = on_device(index, jnp.asarray(text), length)
    for row in range(6):
        alone = store.search(text[row, MAX_SPAN - min(int(length[row]), MAX_SPAN) :], MAX_SPAN)
        assert int(matches.span[row]) == alone.span
        np.testing.assert_array_equal(paths[row], store.continuations(alone, PATHS, LENGTH))


def test_more_occurrences_than_paths_are_spread_evenly():
    store = from_documents([[20, 20, i] for i in range(12)], 21)
    match = store.search([20, 20])
    assert match.counts == [12]
    assert store.continuations(match, 6, 1).ravel().tolist() == [0, 2, 4, 6, 8, 10]
    _, paths = on_device(padded(store.to_device(), 60), np.array([[0, 0, 20, 20]]), np.array([4]))
    assert paths[0, :, 0].tolist() == [0, 2, 4, 7, 9]
    assert (paths[0, :, 1:] == -1).all()


def test_ids_beyond_the_vocabulary_match_nothing():
    """A document's end must not be found by a text that holds its id."""
    store = from_documents([[1, 2], [1, 2]], 3)
    assert store.search([2, 3]).span == 0
    matches, _ = on_device(store.to_device(), jnp.array([[0, 0, 2, 3]]), jnp.array([4]))
    assert int(matches.span[0]) == 0


def test_shards_spread_over_devices_find_the_same():
    store = from_documents(np.random.default_rng(2).integers(0, 3, (9, 20)).tolist(), 3, shard_tokens=31)
    text, length = jnp.asarray(np.random.default_rng(3).integers(0, 3, (4, MAX_SPAN))), jnp.full(4, MAX_SPAN)
    matches, paths = on_device(store.to_device(), text, length)
    index = store.to_device(mesh(model=8))
    assert index.tokens.shape[0] == 8
    assert len({shard.device for shard in index.tokens.addressable_shards}) == 8
    spread, spread_paths = on_device(index, text, length)
    np.testing.assert_array_equal(matches.span, spread.span)
    np.testing.assert_array_equal(paths, spread_paths)


@pytest.mark.parametrize(
    ("shape", "parts"), [((1, 8), 8), ((4, 2), 2), ((8, 1), 1)], ids=["model", "data and model", "data"]
)
def test_a_device_holds_its_part_alone(shape, parts, monkeypatch):
    """The shards are spread over all axes but "data", along which they are the same; each is read once."""
    store, read = from_documents([[*range(9)] * 7], 9, shard_tokens=11), []
    monkeypatch.setattr(module, "_arrays", lambda *which, real=module._arrays: read.append(which[2:]) or real(*which))
    index = store.to_device(mesh(*shape))
    each = 8 // parts if parts > 1 else 7
    assert len(store.shards) == 7 and sorted(read) == [(each * part, each) for part in range(parts)]
    assert index.tokens.shape == (each * parts, 11)
    assert {part.data.shape for part in index.tokens.addressable_shards} == {(each, 11)}
    unsharded = store.to_device()
    for ours, theirs in zip(jax.tree.leaves(index), jax.tree.leaves(unsharded), strict=True):
        np.testing.assert_array_equal(ours[:7], theirs)
        assert len(ours.sharding.device_set) == 8


def test_axes_of_layers_split_it_too():
    store = from_documents([[*range(9)] * 7], 9, shard_tokens=11)
    assert len({str(part.index) for part in store.to_device(mesh(1, 4, layer=2)).sizes.addressable_shards}) == 8
    only_data = jax.sharding.Mesh(np.array(jax.devices()), "data")
    assert store.to_device(only_data).tokens.sharding.is_fully_replicated


def test_no_shard_travels():
    """Devices exchange spans, counts and what is drafted."""
    store = from_documents(np.random.default_rng(2).integers(0, 3, (40, 300)).tolist(), 3, shard_tokens=2000)
    text, length = jnp.zeros((4, MAX_SPAN), jnp.int32), jnp.full(4, MAX_SPAN)
    program = on_device.lower(store.to_device(mesh(1, 8)), text, length).compile().as_text()
    sent = re.findall(r"= (.*) (?:all-\w+|reduce-scatter|collective-[a-z]+)(?:-start)?\(", program)
    sizes = [np.prod([int(n) for n in dims.split(",") if n]) for dims in re.findall(r"\w\[([\d,]*)\]", " ".join(sent))]
    assert sizes and max(sizes) <= 4 * PATHS * LENGTH


def test_bad_corpora():
    with pytest.raises(UsageError, match="no tokens"):
        from_documents([[]], 3)
    with pytest.raises(UsageError, match="ids from 0 to 4"):
        from_documents([[0, 4]], 3)
    with pytest.raises(UsageError, match="shard_tokens"):
        from_documents([[0, 1]], 3, shard_tokens=1)
