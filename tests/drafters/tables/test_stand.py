"""The card's examples of STAND (A6): the mean of distributions, the draws, a replay with a stored table."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare
from tiers import exhaustive
from toy import TARGET_ROWS, chi_square, joint_distribution, markov, sampled_triples

from specjax import UsageError, decode
from specjax.drafters import autoregressive, stand
from specjax.drafters.tables.stand import ACCEPTED, accepted_path, best_paths
from specjax.retrieval.contexts import find
from specjax.types import Context, Output, Sampling, TokenTree

CHAIN = tuple((0,) * d for d in range(1, 5))
SMALL = ((0,), (1,), (0, 0))
ONE = Context(jnp.zeros((1, 9), jnp.int32), jnp.ones(1, jnp.int32))  # a row with one token


def read_in_parts(drafter, context, logits, *parts):
    """Return the state after the prompt; its outputs come in chunks [start, stop)."""
    state = jax.jit(drafter.init)((), context)
    for start, stop in parts:
        count = jnp.clip(context.length - 1 - start, 0, stop - start)
        output = Output(logits[:, start:stop], logits[:, start:stop])
        state = jax.jit(drafter.hooks.prefill)((), state, context, context.tokens[:, start:stop], count, output)
    return state


def test_the_prompt_is_read_in_chunks():
    tokens = jnp.array([[0, 1, 2, 3, 1, 2, 0, 0], [3, 2, 1, 0, 0, 0, 0, 0]])
    context = Context(tokens, jnp.array([6, 3]))
    logits = jax.random.normal(jax.random.key(0), (2, 8, 4))
    drafter = stand(4, tree=SMALL, buckets=16)
    one_pass = read_in_parts(drafter, context, logits, (0, 8))
    parts = read_in_parts(drafter, context, logits, (0, 3), (3, 6))
    contexts = jnp.array([[[0, 1, 2, 3], [9, 9, 0, 1], [9, 9, 2, 0]], [[9, 9, 3, 2], [9, 9, 2, 1], [9, 9, 9, 9]]])
    for state in (one_pass, parts):
        entries = find((), state.table, contexts)
        assert entries.occurrences.tolist() == [[1, 1, 0], [1, 0, 0]]  # the last prompt token is decoded, not read
        np.testing.assert_allclose(entries.probs[0, 0], -np.sort(-jax.nn.softmax(logits[0, 3])), rtol=1e-5)
        np.testing.assert_array_equal(entries.tokens[1, 0], np.argsort(-logits[1, 1]))


@pytest.mark.parametrize("verify", ["sample_and_match", exhaustive("recursive_rejection")])
def test_children_are_drawn_without_replacement_from_the_stored_distribution(verify):
    """Draw at temperature 2 from squared probabilities, once per row: 20,000 of the card's 1e5 draws."""
    rows, p = 20_000, np.array([0.25, 0.04, 0.36])
    drafter = stand(3, tree=SMALL, buckets=2, verify=verify)
    one = Context(jnp.array([[0, 1, 0, 1]]), jnp.array([4]))
    draft_state = read_in_parts(drafter, one, jnp.log(jnp.asarray(p / p.sum()))[None, None].repeat(4, 1), (0, 4))

    @jax.jit
    def draw(table, keys):
        many = Context(one.tokens.repeat(rows, 0), jnp.full(rows, 4), Sampling(jnp.array(2.0)))
        tree, _ = drafter.propose(table, keys, drafter.init((), many), many, jnp.full(rows, 9))
        return tree

    tree = draw(jax.jit(drafter.hooks.export)((), draft_state), jax.random.split(jax.random.key(1), rows))
    assert tree.valid[:, :3].all()
    pairs = np.bincount(np.asarray(tree.tokens[:, 1] * 3 + tree.tokens[:, 2]), minlength=9).reshape(3, 3)
    q = p**0.5 / np.sum(p**0.5)
    wanted = q[:, None] * q / (1 - q)[:, None] * (1 - np.eye(3))
    assert np.trace(pairs) == 0
    off = ~np.eye(3, dtype=bool)
    assert chisquare(pairs[off], wanted[off] * rows).pvalue > 1e-3
    if verify == "sample_and_match":
        assert tree.logits is None
    else:
        np.testing.assert_allclose(jax.nn.softmax(tree.logits[0, 0]), q, rtol=1e-5)


@functools.cache
def taught(verify):
    """Return a drafter with the toy's distributions; 60 tokens have every context of two."""
    drafter = stand(3, tree=((0,), (1,), (0, 0), (0, 1)), verify=verify, read_prompt=False, buckets=64)
    settings = {"key": jax.random.key(9), "max_new_tokens": 60, "temperature": 1.0}
    return decode(markov(TARGET_ROWS), drafter, [[0]], **settings).drafter


@pytest.mark.parametrize("verify", ["sample_and_match", "recursive_rejection"])
def test_sampled_text_has_the_joint_law_of_the_target(verify):
    counts = sampled_triples(taught(verify), TARGET_ROWS)
    assert chi_square(counts, joint_distribution(TARGET_ROWS, 0, 3)) > 1e-3


def test_good_entries_are_accepted():
    """Use the target's distributions as entries: nearly all tokens are accepted, 3 per pass (same noise, or q = p)."""
    prompts = [[0, 1, 2, 0]] * 4
    settings = {"key": jax.random.key(0), "max_new_tokens": 40, "temperature": 1.0, "debug": True}
    plain = decode(markov(TARGET_ROWS), autoregressive(), prompts, **settings)
    for verify in ("sample_and_match", "recursive_rejection"):
        coupled = decode(markov(TARGET_ROWS), taught(verify), prompts, sampling="coupled", **settings)
        assert coupled.to_lists() == plain.to_lists()
        assert float(coupled.block_efficiency.mean()) > 2.6
    rejecting = decode(markov(TARGET_ROWS), taught("recursive_rejection"), prompts, **settings)
    assert float(rejecting.block_efficiency.mean()) > 2.6


def counting(n=16):
    rows = np.full((n, n), 1e-6, np.float32)
    rows[np.arange(n - 1), np.arange(1, n)] = 1.0
    return markov(rows)


def test_a_trajectory_replayed_is_accepted_to_full_depth():
    settings = {"key": jax.random.key(0), "max_new_tokens": 12}
    first = decode(counting(), stand(16, tree=CHAIN, read_prompt=False, buckets=64), [[0], [0]], **settings)
    again = decode(counting(), first.drafter, [[0], [0]], **settings)
    assert again.to_lists() == first.to_lists() == [list(range(1, 13))] * 2
    assert first.stats.target_passes.tolist() == [12, 12]
    # The first pass has no context of two tokens; then 4 drafted and the bonus, twice; and what is left.
    assert again.stats.target_passes.tolist() == [4, 4]
    both, more = (jax.jit(_shared)(drafter.params) for drafter in (first.drafter, again.drafter))
    assert both.occurrences.tolist() == [[2, 2]]  # one of each row, the last of the text too
    assert more.occurrences.tolist() == [[4, 4]]


def test_the_prompt_teaches_the_first_drafts():
    """Draft after 0 to 11 and 0, 1, 2, 3: the prompt's continuation is drafted at once."""
    prompt = [*range(12), 0, 1, 2, 3]
    run = lambda **options: decode(
        counting(), stand(16, tree=CHAIN, buckets=64, **options), [prompt], key=jax.random.key(0), max_new_tokens=8
    )
    read, unread = run(), run(read_prompt=False)
    assert read.to_lists() == unread.to_lists() == [list(range(4, 12))]
    assert read.stats.target_passes.tolist() == [2]  # 4 drafted and the bonus, twice
    assert int(unread.stats.target_passes[0]) > 2


def _shared(params):
    """Return the stored entries of the contexts 4, 5 and 10, 11."""
    nothing = stand(16, tree=CHAIN, read_prompt=False, buckets=64).init((), ONE)
    return find(params, nothing.table, jnp.array([[[9, 9, 4, 5], [9, 9, 10, 11]]]))


def test_the_tree_of_calibration_results():
    tree = TokenTree(
        jnp.array([[0, 5, 6, 7, 8]]), jnp.array([[-1, 0, 0, 2, 2]]), jnp.array([[True, True, True, True, False]])
    )
    assert accepted_path(tree, 0, [6, 7, 1]) == (1, 0)
    assert accepted_path(tree, 0, [6, 8]) == (1,)  # invalid: not drafted
    assert accepted_path(tree, 0, [9]) == ()
    paths = [(0, 0), (0, 0), (1,), (0, 1), (2, 0), ()]
    assert best_paths(paths, 99) == ((0,), (0, 0), (1,), (2,), (0, 1), (2, 0))
    assert best_paths([(2,), (2,), (0,)], 3) == ((0,), (1,), (2,))  # 2 is drawn after 0 and 1


def test_the_default_tree_has_its_parents_first():
    for n in (1, 7, 32, len(ACCEPTED)):
        paths = set(ACCEPTED[:n])
        assert len(paths) == n
        assert all(path[:-1] in paths or len(path) == 1 for path in paths)
        assert all((*path[:-1], path[-1] - 1) in paths for path in paths if path[-1])  # no rank is left out


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_nodes": 0}, "num_nodes must be from 1 to"),
        ({"verify": "standard"}, "verify must be"),
        ({"draw": "beam"}, "draw must be"),
        ({"verify": "recursive_rejection", "draw": "likeliest"}, "needs sampled trees"),
        ({"tree": tuple((r,) for r in range(11))}, "rank 10"),
        ({"tree": ((0,), (0, 1))}, "without its earlier sibling; add"),
        ({"buckets": 5}, "power of two"),
    ],
)
def test_bad_settings(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        stand(99, **options)
