"""The cases of vLLM's rejection sampler, on every exact rule of specjax for chains.

Source: vLLM (Apache-2.0), `tests/v1/sample/`: `test_rejection_sampler.py` at 004fce2, `test_min_p_spec_decode.py` at
5ac71ba, `test_rejection_sampler_block_verify.py` at 974eaf3 and `test_tree_rejection_sampler.py` at 3da3a66. Inputs and
outcomes are facts of them; the code is ours.

Differences: the last token of an accepted draft is drawn and processed like the others. vLLM's tests pass it in.
A row that draws with a seed is compared with the same row in other batches, because specjax has no other rows.

Cases without meaning here: the float64 race, parity with the Triton kernels, the FLy rule and synthetic acceptance.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rules import takes_all
from tiers import exhaustive, those

from specjax import processors, verifiers
from specjax.numerics.sampling import warp
from specjax.processors import pipeline
from specjax.trees import operations
from specjax.types import Sampling, TokenTree
from specjax.verifiers.exact import block

RULES = [name for name, rule in verifiers.VERIFIERS.items() if rule.guarantee != "lossy" and "chain" in rule.draws]
QUICK = ["greedy", "sample_and_match", "standard", "traversal"]
OTHER = 15  # the second choice of the target wherever a test has one


def softmax(x):
    return np.exp(x) / np.exp(x).sum(-1, keepdims=True)


def chains(rows, draft_logits=None):
    """Return the chains of some drafts, with the logits that they were drawn from, by default one-hot ones."""
    depth = max(3, *map(len, rows))
    tokens, valid = np.zeros((len(rows), depth + 1), np.int32), np.zeros((len(rows), depth + 1), bool)
    for row, drafted in enumerate(rows):
        tokens[row, 1 : len(drafted) + 1], valid[row, : len(drafted) + 1] = drafted, True
    parents = np.broadcast_to(np.arange(depth + 1) - 1, tokens.shape)
    if draft_logits is None:
        draft_logits = np.where(np.roll(tokens, -1, 1)[..., None] == np.arange(100), 0.0, -np.inf)
    return TokenTree(tokens, parents, valid, np.asarray(draft_logits, np.float32))


def logits_of(rows, second=None, vocab=100):
    """Return logits whose argmax after each token is the next one of `rows`, and `second` comes next."""
    logits = np.full((len(rows), 4, vocab), -100.0, np.float32)
    for row, tokens in enumerate(rows):
        logits[row, np.arange(len(tokens)), tokens] = 100
    if second is not None:
        logits[..., second] = 99
    return logits


@functools.partial(jax.jit, static_argnames="name")
def verdict_of(name, keys, tree, logits):
    rule = takes_all if name == "takes_all" else verifiers.VERIFIERS[name]
    keys = keys if name != "takes_all" else jnp.broadcast_to(keys[:, None], tree.tokens.shape)
    verdict = rule(keys, tree, logits)
    return operations.emitted_tokens(tree, verdict), verdict.num_nodes


ROWS = 600
KEYS = np.random.default_rng(0).integers(0, 1 << 32, (ROWS, 2), np.uint32)


def emitted(name, tree, logits, keys=KEYS):
    """Return the tokens of each row. Chains of three tokens share one program per rule, for 600 rows."""
    batch = len(tree.tokens)
    keys, tree, logits = jax.tree.map(np.asarray, (keys[:batch], tree, logits))
    if tree.tokens.shape[1] == 4 and logits.shape[2] == 100:
        keys, tree, logits = jax.tree.map(lambda x: np.resize(x, (ROWS, *x.shape[1:])), (keys, tree, logits))
    tokens, count = jax.device_get(verdict_of(name, jax.random.wrap_key_data(keys), tree, logits))
    return [row[:number].tolist() for row, number in zip(tokens[:batch], count, strict=False)]


GREEDY = [
    ([[1, 2, 3]], [[1, 2, 3, 4]], [[1, 2, 3, 4]]),
    ([[1, 2, 3]], [[1, 5, 3, 4]], [[1, 5]]),
    ([[1, 2], [3]], [[1, 2, 5], [3, 4]], [[1, 2, 5], [3, 4]]),
    ([[1]], [[1, 2]], [[1, 2]]),
    ([[]], [[5]], [[5]]),
    ([[1, 2, 3], [4, 5, 6]], [[1, 2, 7, 6], [4, 8, 6, 9]], [[1, 2, 7], [4, 8]]),
    ([[1, 2]], [[1, 2, 3]], [[1, 2, 3]]),
    ([[1]], [[2, 3]], [[2]]),
    ([[1, 2], [3, 4]], [[1, 5, 6], [3, 4, 7]], [[1, 5], [3, 4, 7]]),
]


def all_at_once(cases):
    """Return the drafts, the target's tokens and the expected tokens of all cases, as the rows of one batch."""
    return ([row for case in cases for row in case[part]] for part in range(3))


PLACEHOLDERS = [([[1, 99, wrong]], [[1, 99, 99, 9]], [[1, 99, 99]]) for wrong in (-1, 100, 1 << 30)]
"""Ids that are none. JAX would read each as the last token, 99, which the target takes next."""


@pytest.mark.parametrize("name", those(QUICK, RULES))
def test_greedy_cases_and_placeholders(name):
    drafts, target, expected = all_at_once(GREEDY + PLACEHOLDERS)
    assert emitted(name, chains(drafts), logits_of(target)) == expected
    misread, target, _ = all_at_once(PLACEHOLDERS)
    tree = chains(misread)
    tree.logits[:, 2] = np.where(np.arange(100) == 99, 0.0, -np.inf)  # such a draft claims to have drawn 99
    assert all(0 <= token < 100 for tokens in emitted(name, tree, logits_of(target)) for token in tokens)


def test_a_rule_that_takes_all_fails_the_greedy_cases():
    drafts, target, expected = all_at_once(GREEDY)
    assert emitted("takes_all", chains(drafts), logits_of(target)) != expected


@pytest.mark.parametrize(
    ("name", "depth", "vocab"),
    [("standard", 3, 100), *(exhaustive(name, 5, 1000) for name in ("standard", "sample_and_match", "block"))],
)
def test_a_seeded_row_is_the_same_in_every_batch(name, depth, vocab):
    """Give a seed to every other one of 8 rows, in 20 batches, and exchange two of them."""
    rng = np.random.default_rng(0)
    drafts, target = rng.integers(0, vocab, (8, depth)), rng.random((8, depth + 1, vocab), np.float32)
    tree, results = chains(drafts.tolist(), rng.random((8, depth + 1, vocab), np.float32)), []
    is_seeded = np.arange(8)[:, None] % 2 == 0
    for _ in range(20):
        noise = rng.integers(0, 1 << 32, (8, 2), np.uint32)
        results.append(emitted(name, tree, target, np.where(is_seeded, KEYS[:8], noise)))
    for row in range(0, 8, 2):
        assert all(result[row] == results[0][row] for result in results)
    assert any(result[1] != results[0][1] for result in results)
    order = [4, 1, 2, 3, 0, 5, 6, 7]
    turned = emitted(name, jax.tree.map(lambda x: x[order], tree), target[order], KEYS[order])
    assert turned[0] == results[0][4] and turned[4] == results[0][0]


def distances(tokens, p, references):
    """Return the distances of samples of growing size from the target's distribution and from 100 other ones."""
    to_target, to_references = [], []
    for number in (10, 100, 1000, 10_000, 100_000):
        some = tokens[:number]
        observed = np.bincount(some[some >= 0], minlength=10)
        observed = observed / observed.sum()
        to_target.append(np.linalg.norm(observed - p))
        to_references.append(np.linalg.norm(observed - references) / 100)
    return to_target[0] / to_target[-1], to_references[0] / to_references[-1]


@pytest.mark.parametrize("name", those(["standard"], ["standard", "block", "recursive_rejection"]))
def test_samples_approach_the_distribution_of_the_target(name):
    """The distance falls 20 times more than that from 100 distributions, from 10 to 100,000 samples."""
    rng, size = np.random.default_rng(3), 100_000
    q, logits = softmax(rng.random(10)), rng.random(10)
    p, references, drafted = softmax(logits), softmax(rng.random((100, 10))), rng.choice(10, (size, 3), p=q)
    of_all = lambda x: np.broadcast_to(x.astype(np.float32), (size, 4, 10))
    keys = rng.integers(0, 1 << 32, (size, 2), np.uint32)
    tree = chains(np.zeros((1, 3), int).tolist(), of_all(np.log(q))[:1])
    tree = jax.tree.map(lambda x: np.broadcast_to(x, (size, *x.shape[1:])), tree)
    tree = tree._replace(tokens=np.pad(drafted, ((0, 0), (1, 0))))
    tokens, count = jax.device_get(verdict_of(name, jax.random.wrap_key_data(keys), tree, of_all(logits)))
    change, reference = distances(np.where(np.arange(2) < count[:, None], tokens[:, :2], -1), p, references)
    assert change > 20 * reference
    change, reference = distances(drafted[:, :2], p, references)  # a rule that takes all drafts
    assert change < 20 * reference


def drafts_of(rng, batch, depth, vocab):
    """Return chains that were drawn from random distributions."""
    q = softmax(rng.random((batch, depth + 1, vocab), np.float32))
    drafted = (q.cumsum(-1) < rng.random((batch, depth + 1, 1))).sum(-1).clip(max=vocab - 1)
    return chains(drafted[:, :depth].tolist(), np.log(q))


@pytest.mark.parametrize("name", those(["standard"], ["standard", "block", "sample_and_match"]))
def test_top_k_and_top_p(name):
    """100 rows each of top-k 1, 5 and 99, and of top-p 0.5, 0.9 and 0.99: no token that the filter excludes."""
    rng = np.random.default_rng(4)
    ks, masses = np.repeat([1, 5, 99, 100, 100, 100], 100), np.repeat([1.0, 1.0, 1.0, 0.5, 0.9, 0.99], 100)
    tree, first = drafts_of(rng, 600, 3, 100), rng.permuted(np.tile(np.arange(100), (600, 4, 1)), axis=2)
    of_top_k, of_top_p = first < ks[:, None, None], rng.normal(size=(600, 4, 100)).astype(np.float32)
    order = np.argsort(of_top_p, -1)
    share = np.take_along_axis(softmax(of_top_p), order, -1).cumsum(-1)
    is_top = share > 1 - masses[:, None, None]
    is_top[..., -1] = True
    allowed = np.zeros_like(is_top)
    np.put_along_axis(allowed, order, is_top, -1)
    allowed[:300] = of_top_k[:300]
    logits = np.where(np.arange(600)[:, None, None] < 300, 0.1 * of_top_k, of_top_p).astype(np.float32)
    sampling = Sampling(jnp.ones(600), jnp.asarray(ks), jnp.asarray(masses))
    lists = emitted(name, tree, jax.jit(warp)(logits, sampling))
    assert sum(map(len, lists)) > 700  # some drafts are accepted
    assert all(allowed[row, place, token] for row, tokens in enumerate(lists) for place, token in enumerate(tokens))


@jax.jit
def processed(processor, tree, logits, prompt, history, count):
    """Return the logits of the nodes after a prompt and a decoded text of `count` tokens."""
    states = pipeline.init_states((processor,), prompt, jnp.full(len(prompt), prompt.shape[1]), 100)
    states = pipeline.update_states((processor,), states, history, jnp.full(len(prompt), count))
    above = operations.ancestor_mask(tree.parents, tree.valid)
    return pipeline.process((processor,), states, tree, above, logits)


def texts(processor, drafts, target, count=1):
    """Return the greedy tokens of logits with `OTHER` as second choice, after the prompts and texts of vLLM's tests."""
    prompt, history = (jnp.array(x) for x in ([[5, 6, 7], [6, 7, 8], [7, 8, 9]], [[2], [3], [4]]))
    tree = chains(drafts)
    return emitted("greedy", tree, processed(processor, tree, logits_of(target, OTHER), prompt, history, count))


def test_frequency_penalties():
    drafts, target = [[1, 1, 1], [], [1, 1, 1]], [[1, 1, 1, 1], [7], [1, 1, 1, 1]]
    assert texts(processors.frequency([1.5, 1.5, 0.7]), drafts, target) == [[1, OTHER], [7], [1, 1, OTHER]]


def test_bad_words():
    """Rows 0 and 2 have a bad word, and row 1 between them has none."""
    drafts, target = [[1, 2, 3], [1, 15, 3], [1, 2, 3]], [[1, 2, 3, 4], [1, 15, 3, 4], [1, 2, 3, 4]]
    words = processors.bad_words([[[2]], [], [[2]]], longest=3)
    assert texts(words, drafts, target) == [[1, OTHER], [1, 15, 3, 4], [1, OTHER]]
    # A word of three tokens over the end of the committed text, and one inside of the draft.
    words = processors.bad_words([[[2, 1, 2]], [[3, 1, 2]], [[1, 2, 3], [1, 2, 4]]])
    assert texts(words, drafts, target) == [[1, OTHER], [1, 15, 3, 4], [1, 2, OTHER]]


def test_allowed_token_ids():
    """The last token of row 2 is passed in by vLLM's test, so it is 5. Here it is as forbidden as the rest."""
    bans = processors.bias([dict.fromkeys(range(5), -np.inf), {}, dict.fromkeys(range(2, 7), -np.inf)])
    drafts, target = [[1, 2, 10], [10, 5, 3], [7, 10, 12]], [[1, 2, 10, 5], [10, 5, 10, 5], [7, 10, 12, 5]]
    assert texts(bans, drafts, target, count=0) == [[OTHER], [10, 5, 10], [7, 10, 12, OTHER]]


@pytest.mark.parametrize("vocab", those([100], [100, 8192, 10_000]))
def test_recovered_tokens(vocab):
    """A token after a rejection is drawn from [p - q]+, or from p without the rejected token of a fixed draft."""
    rng = np.random.default_rng(vocab)
    tree, logits = drafts_of(rng, 100, 3, vocab), rng.random((100, 4, vocab), np.float32)
    p, q = (softmax(np.asarray(x))[:, 0] for x in (logits, tree.logits))
    rows = emitted("standard", tree, logits)
    rejected = [(row, tokens[0]) for row, tokens in enumerate(rows) if len(tokens) == 1]
    assert rejected and all(p[row, token] > q[row, token] for row, token in rejected)
    fixed, drafted = emitted("sample_and_match", tree, logits), tree.tokens[:, 1]
    assert all(tokens[0] != drafted[row] for row, tokens in enumerate(fixed) if len(tokens) == 1)


BOUNDARIES = [
    (name, vocab)
    for name in ("standard", "sample_and_match", "block", "recursive_rejection")
    for vocab in (100, 8193, 10_000)
]


@pytest.mark.parametrize(
    ("name", "vocab"),
    [pair if pair in (("standard", 8193), ("sample_and_match", 100)) else exhaustive(*pair) for pair in BOUNDARIES],
)
def test_no_token_comes_from_behind_the_vocabulary(name, vocab):
    """The target gives the last words no mass (GHSA-8wr5-jm2h-8r4f); of 100 words, only word 0 has some."""
    rng, start = np.random.default_rng(6), vocab // 8192 * 8192
    logits = np.log(rng.random((2, 4, vocab), np.float32))
    logits[..., max(start, 1) :] = -np.inf
    tree = drafts_of(rng, 2, 3, vocab)
    if not start:
        tree = tree._replace(tokens=np.zeros_like(tree.tokens))
    for tokens in emitted(name, tree, logits):
        assert all(0 <= token < max(start, 1) for token in tokens)


def test_block_verification():
    """Two drafts with given uniforms: both tokens of the first are accepted, and none of the second."""
    last = [[1, 0, 0, 0]] * 2
    p = np.array([[[0, 0.8, 0, 0.2], [0.2, 0.1, 0.3, 0.4], *last], [[0.3, 0.6, 0.1, 0]] * 4])
    q = np.array([[[0, 0.6, 0, 0.4], [0.1, 0.2, 0.3, 0.4], *last], [[0.2, 0.7, 0.1, 0]] * 4])
    with np.errstate(divide="ignore"):
        tree, target = chains([[1, 0], [1]], np.log(q)), jnp.log(jnp.asarray(p, jnp.float32))
    end = jax.jit(block.core)(jnp.array([[0, 0.7, 0.6, 0.9], [0, 0.9, 0.9, 0.9]]), tree, target)
    assert end.num_nodes.tolist() == [3, 1]
    np.testing.assert_allclose(end.residual, [[1, 0, 0, 0]] * 2, atol=1e-6)


def test_min_p_of_drafted_tokens():
    """Each row has its own min-p, at all of its nodes. A row without one is unchanged."""
    logits = np.random.default_rng(7).normal(size=(3, 3, 64)).astype(np.float32)
    share = np.array([0.1, 0.05, 0.0], np.float32)
    ours = np.asarray(jax.jit(warp)(logits, Sampling(jnp.ones(3), None, None, jnp.asarray(share))))
    p = softmax(logits)
    expected = np.where(p < p.max(-1, keepdims=True) * share[:, None, None], -np.inf, logits)
    np.testing.assert_array_equal(ours, expected)
    assert np.isinf(ours[:2]).any() and not np.isinf(ours[2]).any()


@pytest.mark.exhaustive
def test_top_k_with_and_without_top_p():
    """A top-p of 1 changes nothing, and the filters agree with a sort."""
    rng = np.random.default_rng(8)
    logits = rng.random((64, 1024), np.float32)
    k = np.where(rng.random(64) < 0.5, 1024, rng.integers(1, 10, 64))
    apply, ones, k_of_row = jax.jit(warp), jnp.ones(64), jnp.asarray(k)
    alone = apply(logits, Sampling(ones, k_of_row))
    np.testing.assert_array_equal(alone, apply(logits, Sampling(ones, k_of_row, ones)))
    mass = np.where(rng.random(64) < 0.5, 1.0, rng.uniform(0.5, 1, 64))
    ours = softmax(np.asarray(apply(logits, Sampling(ones, k_of_row, jnp.asarray(mass, jnp.float32)))))
    expected = np.zeros((64, 1024))
    for row, values in enumerate(np.asarray(logits, np.float64)):
        order = np.argsort(-values)[: k[row]]
        p = np.exp(values[order]) / np.exp(values[order]).sum()
        count = np.sum(p.cumsum() - p < mass[row])
        expected[row, order[:count]] = p[:count] / p[:count].sum()
    np.testing.assert_allclose(ours, expected, atol=2e-5)
