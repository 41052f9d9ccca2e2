"""The law of a model with a compressed cache depends on the text alone, not on where passes began and ended."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import chi_square, tiny_llama
from toy_models import alike

import specjax
from specjax.drafters import autoregressive, prompt_lookup, two_model
from specjax.engine.prefill import CHUNK, chunk_reader, prefill
from specjax.models import make_model
from specjax.models.gear import attention, slots
from specjax.trees import operations, parse
from specjax.types import Target

FORM = "gear:2,block=4,rank=1"
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(1, 60, n).tolist() for n in (45, 9, 30, 1)]
TEXT = RNG.integers(1, 60, (4, 40)).astype(np.int32)


@functools.cache
def compressed(form=FORM, **changes) -> Target:
    plain = tiny_llama(**changes)
    return Target(make_model(dataclasses.replace(plain.model.config, cache_dtype=form)), plain.params)


def plain_draft(**changes) -> Target:
    """Return a draft model with a plain cache that errs now and then."""
    return alike(tiny_llama(**changes))


@pytest.fixture
def by_fill_level(monkeypatch):
    """Compress a block when it is full, in place of by the position of a query."""
    monkeypatch.setattr(
        attention,
        "last_compressed",
        lambda positions, length, block: jnp.broadcast_to(length[:, None] // block - 2, positions.shape),
    )
    mutant = dataclasses.replace(compressed().model.config, name="by-fill-level")  # a model of its own
    return Target(make_model(mutant), compressed().params)


def texts(target, drafter, prompts=PROMPTS, new=40):
    return specjax.decode(target, drafter, prompts, key=jax.random.key(3), max_new_tokens=new)


def chains(depth, **changes):
    return two_model(plain_draft(**changes), num_tokens=depth)


@pytest.mark.parametrize("stacked", [False, True])
def test_greedy_text_does_not_depend_on_the_draft(stacked):
    """Rows have prompts of 1 to 45 tokens, and blocks have 4 tokens, so drafts of 7 tokens span several blocks."""
    target = compressed(stacked=stacked)
    plain = texts(target, autoregressive()).to_lists()
    assert plain != texts(tiny_llama(stacked=stacked), autoregressive()).to_lists()  # the compression is lossy
    tree = two_model(plain_draft(stacked=stacked), tree=parse("2x1x1"))
    for drafter in (*(chains(depth, stacked=stacked) for depth in (1, 3, 7)), tree, prompt_lookup(5)):
        result = texts(target, drafter)
        assert result.to_lists() == plain
        assert drafter.max_depth != 7 or result.block_efficiency.mean() > 1.3  # so that drafts were accepted


def test_blocks_that_fill_up_would_depend_on_the_draft(by_fill_level):
    target = by_fill_level
    assert texts(target, chains(7)).to_lists() != texts(target, autoregressive()).to_lists()


@functools.partial(jax.jit, static_argnames="size")
def read_in_chunks(target, tokens, count, size):
    """Return the cache of the first `count` tokens, which passes of `size` tokens read."""
    cache = target.model.init_cache(target.params, None, len(tokens), tokens.shape[1])
    read = chunk_reader(target.model, target.params, tokens, count, lambda state, *chunk: state)
    return jax.lax.fori_loop(0, tokens.shape[1] // size, lambda i, cache: read(i * size, size, (cache, ()))[0], cache)


@functools.partial(jax.jit)
def last_logits(target, cache, tokens):
    positions = cache.length[:, None] + jnp.arange(tokens.shape[1])
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool)), (len(tokens), *(tokens.shape[1],) * 2))
    return target.model.forward(target.params, tokens, cache, positions=positions, mask=mask)[0].logits


def differences(target, sizes):
    """Return the largest differences of the logits of the 4 tokens after texts that passes of these sizes read."""
    count = jnp.array([33, 18, 40, 3])
    tokens = jnp.pad(TEXT, ((0, 0), (0, 24)))
    logits = [last_logits(target, read_in_chunks(target, tokens, count, size), TEXT[:, :4]) for size in sizes]
    return [float(jnp.abs(other - logits[0]).max()) for other in logits[1:]]


def test_prefill_does_not_depend_on_its_chunks():
    """Chunks of 1 and 5 tokens are no multiples of a block. That is allowed too."""
    assert max(differences(compressed(), (64, 32, 16, 8, 4, 1, 5))) < 1e-3


def test_prefill_of_the_mutant_depends_on_its_chunks(by_fill_level):
    assert min(differences(by_fill_level, (64, 16, 4))) > 1e-2


@pytest.mark.parametrize("block", [4, 8, 16])
def test_the_positions_of_compressed_blocks(block):
    """Block i is compressed for a query at t if t >= (i + 2) * block: its values are read from the stored codes."""
    target = compressed(f"gear:4,block={block}", layers=1)
    tokens = jnp.pad(TEXT, ((0, 0), (0, CHUNK)))
    for count in (block, 2 * block - 1, 2 * block, 2 * block + 1):
        cache = prefill(target.model, target.params, target.model.init_cache(target.params, None, 4, 192), tokens,
                        jnp.full((4,), count))  # fmt: skip
        other = jax.tree.map(lambda x: jnp.zeros_like(x), cache.v.blocks)
        erased = cache._replace(v=dataclasses.replace(cache.v, blocks=other))
        changed = np.abs(last_logits(target, cache, TEXT[:, :8]) - last_logits(target, erased, TEXT[:, :8])).max((0, 2))
        np.testing.assert_array_equal(changed > 1e-6, count + np.arange(8) >= 2 * block)


def tree_of_all(vocab, depth):
    """Return the parents and tokens of a tree with every text of `depth` tokens below its root."""
    parents, tokens, level = [-1], [0], [0]
    for _ in range(depth):
        new = [(parent, token) for parent in level for token in range(vocab)]
        level = list(range(len(parents), len(parents) + len(new)))
        parents += [parent for parent, _ in new]
        tokens += [token for _, token in new]
    return np.array(parents), np.array(tokens)


VOCAB, PROMPT = 4, [3, 1, 2, 2, 0, 1, 3, 3, 1, 0, 2]


@functools.cache
def small() -> Target:
    return compressed("gear:2,block=4,rank=0,outliers=0", vocab=VOCAB, width=16, seed=2)


@functools.cache
def law_by_steps() -> np.ndarray:
    """Return the joint law [V, V, V] of three tokens after PROMPT, by plain decoding of every text, token by token."""
    target, law = small(), np.ones((1,))
    every = np.array([[]], np.int32).reshape(1, 0)
    for _ in range(3):
        text = np.concatenate([np.tile(PROMPT, (len(every), 1)), every], 1)
        cache = read_in_chunks(target, jnp.asarray(text[:, :-1]), jnp.full((len(text),), text.shape[1] - 1), 1)
        logits = np.asarray(last_logits(target, cache, jnp.asarray(text[:, -1:])))[:, 0].astype(np.float64)
        p = np.exp(logits - logits.max(-1, keepdims=True))
        law = (law[:, None] * p / p.sum(-1, keepdims=True)).reshape(-1)
        every = np.concatenate([np.repeat(every, VOCAB, 0), np.tile(np.arange(VOCAB), len(every))[:, None]], 1)
    return law.reshape((VOCAB,) * 3)


def law_of_a_tree(target) -> np.ndarray:
    """Return the same law from one pass over the tree of all texts."""
    parents, tokens = tree_of_all(VOCAB, 2)
    tokens[0] = PROMPT[-1]
    cache = read_in_chunks(target, jnp.asarray([PROMPT[:-1]]), jnp.array([len(PROMPT) - 1]), 10)
    mask = operations.ancestor_mask(jnp.asarray(parents)[None])
    positions = cache.length[:, None] + jnp.sum(mask, 2) - 1
    output, _ = target.model.forward(target.params, jnp.asarray(tokens)[None], cache, positions=positions, mask=mask)
    p = np.asarray(jax.nn.softmax(output.logits[0]), np.float64)
    law = np.ones((VOCAB,) * 3)
    first = 1
    for depth in range(3):
        rows = p[:1] if depth == 0 else p[first : first + VOCAB**depth]
        law *= rows.reshape((VOCAB,) * (depth + 1) + (1,) * (2 - depth))
        first += VOCAB**depth if depth else 0
    return law


def test_the_joint_law_of_a_tree_is_that_of_plain_decoding():
    """The tree spans position 12, where the block of the tokens 4 to 7 is read compressed for the first time."""
    np.testing.assert_allclose(law_of_a_tree(small()), law_by_steps(), atol=1e-5)


def test_sampled_speculation_has_the_joint_law_of_plain_decoding():
    count, draft = 1_500, alike(tiny_llama(vocab=VOCAB, width=16, seed=2))
    prompts = jnp.tile(jnp.asarray(PROMPT), (count, 1)), jnp.full((count,), len(PROMPT))
    result = specjax.decode(
        small(), two_model(draft, num_tokens=2), prompts, key=jax.random.key(7), max_new_tokens=3, temperature=1.0
    )
    index = np.asarray(result.tokens)[:, :3] @ np.array([VOCAB**2, VOCAB, 1])
    counts = np.bincount(index, minlength=VOCAB**3).reshape((VOCAB,) * 3)
    assert chi_square(counts, law_by_steps()) > 1e-3
    assert chi_square(counts, np.roll(law_by_steps(), 1, 0)) < 1e-6  # the test can fail


def test_rejected_tokens_leave_no_trace():
    """A pass with drafts that are all rejected leaves the cache of a text without them."""
    target = compressed()
    tokens = jnp.asarray(TEXT[:, :32])
    clean = read_in_chunks(target, tokens, jnp.array([13, 7, 16, 31]), 8)
    dirty = read_in_chunks(target, tokens, jnp.array([10, 6, 15, 30]), 8)
    accepted = jnp.array([3, 1, 1, 1])
    draft = jnp.where(jnp.arange(7) < accepted[:, None], jnp.take_along_axis(tokens, jnp.minimum(
        dirty.length[:, None] + jnp.arange(7), 31), 1), 63)  # fmt: skip
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((7, 7), bool)), (4, 7, 7))
    _, pending = target.model.forward(
        target.params, draft, dirty, positions=dirty.length[:, None] + jnp.arange(7), mask=mask
    )
    dirty = target.model.commit(dirty, pending, jnp.broadcast_to(jnp.arange(7), (4, 7)), accepted)
    assert dirty.length.tolist() == clean.length.tolist()
    for ours, theirs in ((dirty.k, clean.k), (dirty.v, clean.v)):
        for b, length in enumerate(clean.length.tolist()):
            size, full = length - int(slots.tail_start(jnp.int32(length), 4)), length // 4
            np.testing.assert_allclose(ours.tail[:, b, :, :size], theirs.tail[:, b, :, :size], atol=1e-5)
            for mine, other in zip(ours.blocks, theirs.blocks, strict=True):
                assert (np.asarray(mine[:, b, :, :full]) != np.asarray(other[:, b, :, :full])).mean() < 0.1
    np.testing.assert_allclose(
        last_logits(target, dirty, TEXT[:, :4]), last_logits(target, clean, TEXT[:, :4]), atol=1e-3
    )


def test_a_pass_over_a_complete_text_needs_no_blocks():
    """Training and rewards read a text in one pass, with a cache of no slots."""
    target = compressed()
    tokens = jnp.asarray(TEXT)
    mask = jnp.broadcast_to(jnp.tri(40, dtype=bool), (4, 40, 40))
    positions = jnp.broadcast_to(jnp.arange(40), (4, 40))

    def logits(capacity):
        cache = target.model.init_cache(target.params, None, 4, capacity)
        return target.model.forward(target.params, tokens, cache, positions=positions, mask=mask)[0].logits

    np.testing.assert_allclose(logits(0), logits(64), atol=1e-5)
