"""Chunks of prompts that are stored: they equal chunks that are read, to the bit, for all models and drafters."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from heads import tiny_head
from hybrids import tiny_hybrid
from tiers import those
from toy import tiny_llama

from specjax import Request, drafters, serve
from specjax.arrays.modes import with_standard_modes
from specjax.drafters.making import make_drafter
from specjax.engine.prepare import Settings, prepare
from specjax.engine.step import _draft
from specjax.serving import admission
from specjax.serving.prefixes import PrefixStore
from specjax.serving.reading import PromptReader, next_to_read
from specjax.types import Context, Hooks, Traits

CHUNK = admission.CHUNK_ON_CPU
RANDOM = np.random.default_rng(0).integers(1, 60, 400).tolist()
FIRST = RANDOM[: 3 * CHUNK + 5]
SECOND = [*RANDOM[: 2 * CHUNK + 7], *RANDOM[300:340]]
"""The first two chunks are those of FIRST."""


def chunk_of(*tokens):
    return np.array(tokens, np.int32), [np.zeros(len(tokens), np.float32)]


def test_a_store_finds_chunks_after_the_same_chunks_only():
    store = PrefixStore(100)
    a, b = chunk_of(1, 2), chunk_of(3, 4)
    first = store.add(store.root(), *a)
    second = store.add(first, *b)
    assert store.find(store.root(), a[0]) is first and store.find(first, b[0]) is second
    assert store.find(store.root(), b[0]) is None and store.find(second, b[0]) is None
    assert store.find(store.root("another user"), a[0]) is None
    assert store.num_bytes == 16


def test_a_full_store_drops_the_leaf_that_was_used_least_recently():
    store = PrefixStore(24)
    root = store.root()
    first = store.add(root, *chunk_of(1, 2))
    store.add(first, *chunk_of(3, 4))
    store.add(root, *chunk_of(5, 6))
    store.find(first, chunk_of(3, 4)[0])
    store.add(root, *chunk_of(7, 8))  # instead of (5, 6)
    assert store.find(root, chunk_of(5, 6)[0]) is None and store.find(first, chunk_of(3, 4)[0]) is not None
    assert store.num_bytes == 24


def test_a_store_without_room_keeps_what_prompts_follow():
    store = PrefixStore(8)
    first = store.add(store.root(), *chunk_of(1, 2))
    first.readers = 1
    assert store.add(first, *chunk_of(3, 4)) is None and store.add(store.root(), *chunk_of(5, 6)) is None
    assert store.add(None, *chunk_of(5, 6)) is None
    assert PrefixStore(0).root() is None
    first.readers = 0
    store.clear()
    assert store.num_bytes == 0 and store.find(store.root(), chunk_of(1, 2)[0]) is None


SETTINGS = {
    "hybrid": (tiny_hybrid, drafters.autoregressive),
    "int8 cache": (lambda: tiny_llama(cache_dtype="int8"), drafters.autoregressive),
    "window": (lambda: tiny_llama(window=24), drafters.autoregressive),
    "unstacked": (lambda: tiny_llama(stacked=False), drafters.autoregressive),
    "token_recycling": (tiny_llama, lambda: drafters.token_recycling(64, num_nodes=7, read_prompt=True)),
    "stand": (tiny_llama, lambda: drafters.stand(64, num_nodes=12, buckets=64)),
    "two_model": (tiny_llama, lambda: drafters.two_model(tiny_llama(seed=1, layers=1), 3)),
    "hybrid draft": (tiny_llama, lambda: drafters.two_model(tiny_hybrid(seed=1), 3)),
    "eagle3": (tiny_llama, lambda: head_drafter("eagle3")),
    "medusa": (tiny_llama, lambda: head_drafter("medusa")),
    "mtp": (tiny_llama, lambda: head_drafter("mtp")),
    "dflash": (tiny_llama, lambda: head_drafter("dflash")),
    "auto": (tiny_llama, lambda: drafters.auto(64, costs=(1.0,) * 4, head=tiny_head("eagle3", tiny_llama()))),
}


def head_drafter(kind):
    return make_drafter(kind, tiny_llama(), tiny_head(kind, tiny_llama()))


@pytest.mark.parametrize("name", those(("hybrid", "token_recycling", "eagle3"), SETTINGS))
def test_stored_chunks_equal_chunks_that_are_read(name):
    make_target, drafter_of = SETTINGS[name]
    target = make_target()
    job = prepare(target, drafter_of(), [SECOND + [1] * 30], Settings(), key=jax.random.key(0), max_new_tokens=4)
    store = PrefixStore(1 << 30)
    rows = [read(job.parts, prompt, store, job.tokens.shape[1]) for prompt in (FIRST, SECOND)]
    assert [num_stored for _, num_stored in rows] == [0, 2 * CHUNK]
    alone, _ = read(job.parts, SECOND, PrefixStore(0), job.tokens.shape[1])
    first, second = (outputs(job.parts, row) for row in (alone, rows[1][0]))
    jax.tree.map(np.testing.assert_array_equal, first, second)
    other = outputs(job.parts, rows[0][0])
    assert not np.array_equal(first[1], other[1])


@pytest.mark.parametrize("block", [16, 64, 128])
def test_stored_chunks_of_a_compressed_cache(block):
    """A block may be filled by several chunks. A stored chunk has its blocks only, and not those of the buffer."""
    first, second = [*RANDOM[: 9 * CHUNK + 5]], [*RANDOM[: 8 * CHUNK + 7], *RANDOM[300:340]]
    target, sizes = tiny_llama(cache_dtype=f"gear:2,block={block}", max_positions=1024), []
    for spare in (1, 600):
        job = prepare(
            target, drafters.prompt_lookup(3), [second], Settings(), key=jax.random.key(0), max_new_tokens=spare
        )
        store, size = PrefixStore(1 << 30), job.tokens.shape[1]
        rows = [read(job.parts, prompt, store, size) for prompt in (first, second)]
        assert [num_stored for _, num_stored in rows] == [0, 8 * CHUNK]
        alone, _ = read(job.parts, second, PrefixStore(0), size)
        jax.tree.map(np.testing.assert_array_equal, outputs(job.parts, alone), outputs(job.parts, rows[1][0]))
        sizes.append((size, store.num_bytes))
    assert sizes[0][0] < sizes[1][0] and sizes[0][1] == sizes[1][1]


def test_a_head_does_not_share_a_chunk_before_another_token():
    """The state after a chunk depends on the next token, so prompts that part there share the chunk before it only."""
    target, drafter_of = SETTINGS["eagle3"]
    parted = [*RANDOM[: 2 * CHUNK], *(token % 59 + 1 for token in RANDOM[2 * CHUNK : 3 * CHUNK])]
    job = prepare(target(), drafter_of(), [parted], Settings(), key=jax.random.key(0), max_new_tokens=4)
    store = PrefixStore(1 << 30)
    _, (row, num_stored) = [read(job.parts, prompt, store, job.tokens.shape[1]) for prompt in (FIRST, parted)]
    alone, _ = read(job.parts, parted, PrefixStore(0), job.tokens.shape[1])
    assert num_stored == CHUNK
    jax.tree.map(np.testing.assert_array_equal, outputs(job.parts, alone), outputs(job.parts, row))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["two_model", "hybrid draft", "eagle3"])
def test_a_chunk_at_the_end_of_a_prompt(name):
    """A draft model does not read the last two tokens of a prompt, which may be the end of a chunk."""
    target, drafter_of = SETTINGS[name]
    ending, longer = RANDOM[: 3 * CHUNK + 1], [*RANDOM[: 3 * CHUNK], *RANDOM[300:340]]
    job = prepare(target(), drafter_of(), [longer + [1] * 30], Settings(), key=jax.random.key(0), max_new_tokens=4)
    store, size = PrefixStore(1 << 30), job.tokens.shape[1]
    alone = {len(prompt): read(job.parts, prompt, PrefixStore(0), size)[0] for prompt in (ending, longer)}
    for prompt in (ending, longer, ending):
        row, _ = read(job.parts, prompt, store, size)
        same = alone[len(prompt)]
        if name != "eagle3":
            assert row.draft.num_cached == len(prompt) - 2
        jax.tree.map(np.testing.assert_array_equal, outputs(job.parts, row), outputs(job.parts, same))


def test_the_lag_of_a_drafter_leaves_the_last_chunk_to_every_prompt():
    class Programs:
        begin = put_chunk = staticmethod(lambda *arguments: jnp.zeros(()))
        read = staticmethod(lambda *arguments: (jnp.zeros(()), None))
        take_chunk = staticmethod(lambda *arguments: [np.zeros(1)])

    for lag, num_stored in ((1, 2), (2, 1)):
        drafter = SimpleNamespace(traits=Traits(lag=lag), hooks=Hooks())
        parts, store = SimpleNamespace(loop=SimpleNamespace(read=True), drafter=drafter), PrefixStore(100)
        for expected in (0, num_stored):
            reader = PromptReader(None, packed_of(2 * CHUNK), store.root())
            while reader.unread:
                reader.advance(parts, Programs, store, wait=False)
            assert reader.num_stored == expected * CHUNK
            reader.leave()


def read(parts, prompt, store, size):
    """Return the state of a prompt after it was read, and the number of tokens that the store had."""
    packed = admission.pack_request(size, 0, Request(prompt, 0), jax.random.key(0)[None], 4, [])
    programs = admission.ServePrograms(
        None, None, None, admission.begin, None, admission.read, admission.take_chunk, admission.put_chunk
    )
    parts = with_settings(parts)
    reader = PromptReader(None, packed, store.root())
    while reader.unread:
        reader.advance(parts, programs, store, wait=False)
    reader.leave()
    return reader.row, reader.num_stored


def with_settings(parts):
    return parts.__class__(**{**vars(parts), "eos": np.zeros((1, 0), np.int32)})


@functools.partial(jax.jit)
@with_standard_modes
def outputs(parts, state):
    """Return the tree that is drafted next, and the target's logits of the last token."""
    context = Context(state.tokens, state.length, parts.sampling, None, state.cache, parts.target)
    tree, *_ = _draft(parts, state, context)
    output, _ = parts.target.model.forward(
        parts.target.params, context.root, state.cache, positions=state.length[:, None] - 1,
        mask=jnp.ones((1, 1, 1), bool),
    )  # fmt: skip
    return tree, output.logits


def test_served_texts_with_and_without_a_store():
    requests = [Request(FIRST, 0), Request(SECOND, 1), Request(SECOND, 1, salt="another user"), Request(FIRST, 2)]
    texts, cached = [], []
    for gib in (0.0, 0.1):
        of_run, num_stored = {}, {}
        drafter = drafters.prompt_lookup(3, min_ngram=1)
        for served in serve(
            tiny_llama(), drafter, requests, slots=2, longest_prompt=140, max_new_tokens=6, prefix_gib=gib
        ):
            of_run.setdefault(served.request, []).extend(served.tokens)
            num_stored[served.request] = served.cached
        texts.append(of_run)
        cached.append([num_stored[n] for n in range(4)])
    assert texts[0] == texts[1] and len(texts[0]) == 4
    assert cached[0] == [0] * 4 and cached[1][2] == 0 and cached[1][3] == 3 * CHUNK


def test_a_text_that_ended_is_read_while_nothing_else_runs():
    """The second turn of a chat copies the chunks of the first turn and of its answer."""
    updates, answer = [], []

    def requests():
        yield Request(FIRST[: CHUNK + 3], 0)
        while not (updates and updates[-1].finish_reason):
            yield None
        yield from [None] * 10
        for update in updates:
            answer.extend(update.tokens)
        yield Request([*FIRST[: CHUNK + 3], *answer, 1, 2], 1)

    limits = {"slots": 2, "longest_prompt": 3 * CHUNK, "max_new_tokens": CHUNK}
    for update in serve(tiny_llama(), "autoregressive", requests(), **limits):
        updates.append(update)
    assert len(answer) == CHUNK and updates[-1].cached == 2 * CHUNK


def test_few_prompts_take_memory_at_the_same_time():
    readers = [PromptReader(None, packed_of(length), None) for length in (90, 60, 70, 5)]
    order = []
    for turn in range(1, 60):
        reader = next_to_read(readers, turn)
        reader.row = reader.row or ()
        order.append(len(reader.packed.tokens[0]))
        reader.start += 5
        if not reader.unread:
            readers.remove(reader)
        assert sum(each.row is not None for each in readers) <= 2
        if not readers:
            break
    assert not readers and order[0] == 5 and 90 in order[:4]


def packed_of(length):
    packed = admission.pack_request(length, 0, Request([1] * length, 0), jax.random.key(0)[None], 4, [])
    return packed._replace(length=np.array([length + 1], np.int32))
