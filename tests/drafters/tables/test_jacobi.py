"""The card's oracle tests of speculative Jacobi decoding, and its window by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compiled_programs
from scipy.stats import chisquare
from toy import MARKOV, TARGET_ROWS, joint_distribution, markov

from specjax import UsageError, decode, stream
from specjax.controllers import fixed
from specjax.drafters import autoregressive
from specjax.drafters.tables.jacobi import JacobiState, jacobi
from specjax.processors import by_place, forced_tokens
from specjax.types import Context, Output, Sampling, TokenTree, Verdict
from specjax.verifiers import block

PASSES = MARKOV["speculative_jacobi_3_tokens"]
PROMPTS = [[1, 2, 3, 1, 2, 3, 1], [5], list(range(30)), [7, 7, 7]]
ROWS = 20_000


def triples(drafter, rows=TARGET_ROWS, **options):
    """Sample three tokens after token 0, in 20,000 rows."""
    prompts = (jnp.zeros((ROWS, 4), jnp.int32), jnp.full((ROWS,), 4))
    settings = {"key": jax.random.key(7), "max_new_tokens": 3, "temperature": 1.0, **options}
    return decode(markov(rows), drafter, prompts, **settings)


def p_value(result, distribution):
    """Return the chi-square of triples against a distribution; cells that expect fewer than 5 are merged."""
    vocab = distribution.shape[0]
    index = np.asarray(result.tokens[:, :3]) @ np.array([vocab**2, vocab, 1])
    observed, expected = np.bincount(index, minlength=vocab**3), distribution.ravel() * ROWS
    small = expected < 5
    if small.any():
        observed = np.append(observed[~small], observed[small].sum())
        expected = np.append(expected[~small], expected[small].sum())
    assert observed[expected == 0].sum() == 0
    observed, expected = observed[expected > 0], expected[expected > 0]
    return chisquare(observed, expected, sum_check=False).pvalue


@pytest.mark.parametrize("window", [1, 2])
def test_joint_law_and_expected_passes_with_random_tokens(window):
    result = triples(jacobi(3, window=window))
    assert p_value(result, joint_distribution(TARGET_ROWS, 0, 3)) > 1e-3
    passes = np.asarray(result.stats.target_passes)
    wanted = PASSES[f"window_{window}"]["expected_forward_passes_for_3_tokens"]
    assert abs(passes.mean() - wanted) < 4 * passes.std() / ROWS**0.5


@pytest.mark.parametrize("options", [{"initial": "repeat", "stride": 2}, {"initial": "sample", "ids": (1, 3)}])
def test_joint_law_with_every_kind_of_initial_token(options):
    assert p_value(triples(jacobi(3, window=2, **options)), joint_distribution(TARGET_ROWS, 0, 3)) > 1e-3


def test_joint_law_of_block_verification_with_warped_distributions():
    truncated = np.array([[25, 9, 0], [0, 36, 9], [1, 0, 4]])  # squares of the two largest; of equal ones the first
    distribution = joint_distribution(truncated / truncated.sum(1, keepdims=True), 0, 3)
    assert p_value(triples(jacobi(3, window=3), verifier=block, temperature=0.5, top_k=2), distribution) > 1e-3


LAYOUT = by_place([range(3), [2], [0, 1]], [0, 1, 2])


def test_joint_law_with_a_forced_token():
    """The second token is always drafted and accepted. The law is that of the processed target."""
    drafter = jacobi(3, window=2, forced=forced_tokens(LAYOUT))
    law = np.zeros((3, 3, 3))
    last = TARGET_ROWS[2, :2].astype(np.float64) / TARGET_ROWS[2, :2].sum()
    law[:, 2, :2] = TARGET_ROWS[0].astype(np.float64)[:, None] * last
    result, free = (triples(d, processors=(LAYOUT,)) for d in (drafter, jacobi(3, window=2)))
    assert p_value(result, law) > 1e-3 and p_value(free, law) > 1e-3
    passes, without = (np.asarray(r.stats.target_passes).mean() for r in (result, free))
    assert passes < without - 0.3
    assert (np.asarray(result.stats.target_passes) <= 2).all()


def keeps_old_tokens(window):
    """Check that a mutant fails: undecided tokens stay in the window, with the new distributions as their q."""
    inner = jacobi(3, window=window)

    def init(params, context):
        return inner.init(params, context), jnp.zeros((context.tokens.shape[0], window), jnp.int32)

    def propose(params, keys, state, context, limit):
        tree, _ = inner.propose(params, keys, state[0], context, limit)
        stays = jnp.arange(window) < state[0].num_valid[:, None]
        tokens = jnp.where(stays, state[1], tree.tokens[:, 1:])
        return tree._replace(tokens=jnp.concatenate([tree.tokens[:, :1], tokens], 1)), state

    def observe(params, state, context, tree, verdict, output):
        shift = verdict.num_nodes[:, None] + 1 + jnp.arange(window)
        old = jnp.take_along_axis(tree.tokens, jnp.minimum(shift, tree.tokens.shape[1] - 1), 1)
        new = inner.observe(params, state[0], context, tree, verdict, output)
        return new._replace(num_valid=jnp.maximum(new.num_valid - 1, 0)), old  # the last position had no token before

    return inner.replace(init=init, propose=propose, observe=observe)


def test_the_chi_square_catches_old_tokens_with_new_distributions():
    result, distribution = triples(keeps_old_tokens(2), max_new_tokens=5), joint_distribution(TARGET_ROWS, 0, 3)
    assert p_value(result, distribution) < 1e-6
    counts = np.bincount(np.asarray(result.tokens[:, :3]) @ np.array([9, 3, 1]), minlength=27)
    error = np.abs(counts / ROWS - distribution.ravel()).max()
    assert abs(error - 0.0123) < 4 * (0.125 / ROWS) ** 0.5  # three times token 0: p = 0.125


def test_greedy_text_is_that_of_plain_decoding():
    target = markov(np.random.default_rng(1).dirichlet(np.ones(40), 40).astype(np.float32))
    options = {"key": jax.random.key(0), "max_new_tokens": 24, "eos": (39,)}
    plain = decode(target, autoregressive(), PROMPTS, **options)
    ours = decode(target, jacobi(40, window=4, initial="sample"), PROMPTS, **options)
    assert ours.to_lists() == plain.to_lists()
    assert (ours.stats.target_passes <= ours.lengths).all()
    assert ours.stats.accepted.sum() > 0


def test_without_drafts_it_is_plain_sampling():
    options = {"key": jax.random.key(0), "max_new_tokens": 12, "temperature": 1.0}
    plain = decode(markov(), autoregressive(), [[0], [2, 1]], **options)
    ours = decode(markov(), jacobi(3, window=2), [[0], [2, 1]], controller=fixed(0), **options)
    assert ours.to_lists() == plain.to_lists()
    assert ours.stats.target_passes.tolist() == [12, 12]
    assert ours.stats.drafted.tolist() == [0, 0]


def test_every_redrafted_token_is_accepted_if_the_law_has_no_context():
    rows = np.broadcast_to(TARGET_ROWS[:1], (3, 3))
    left, previous = 60, None
    options = {"key": jax.random.key(3), "max_new_tokens": left, "temperature": 1.0}
    for step in stream(markov(rows), jacobi(3, window=3), [[0]], **options):
        if previous is not None:
            assert step.accepted[0] >= min(3 - previous, left - 1)
        previous, left = step.accepted[0], left - len(step.tokens[0])
    assert left == 0


def test_a_second_call_compiles_nothing():
    triples(jacobi(3, window=2)).tokens.block_until_ready()
    key = jax.block_until_ready(jax.random.key(8))
    with compiled_programs() as compiled:
        triples(jacobi(3, window=2), key=key).tokens.block_until_ready()
    assert compiled == []


def pass_over(tokens, valid, accepted, logits):
    """Return the arguments of `update` for one row."""
    nodes = jnp.array([tokens])
    tree = TokenTree(nodes, jnp.arange(-1, len(tokens) - 1)[None], jnp.arange(len(tokens))[None] < valid)
    return tree, Verdict(nodes, jnp.array([accepted + 1]), jnp.array([0])), Output(logits[None], logits[None])


def test_the_window_keeps_the_laws_behind_the_committed_token():
    logits = jax.nn.one_hot(jnp.array([3, 1, 4, 2]), 5)  # of the positions behind nodes 0 ... 3
    empty = JacobiState(jnp.zeros((1, 3, 5)), jnp.array([0]), jnp.array([-1]), jnp.array([1]))
    observe = functools.partial(jacobi(5, window=3).observe, (), empty, None)
    for accepted, window_rows in [(0, [1, 2, 3]), (1, [2, 3]), (2, [3]), (3, [])]:
        state = observe(*pass_over([0, 1, 2, 3], 4, accepted, logits))
        assert state.num_valid.tolist() == [len(window_rows)]
        np.testing.assert_array_equal(state.logits[0, : len(window_rows)], logits[jnp.array(window_rows, int)])
        assert state.likeliest.tolist() == [2]
    state = observe(*pass_over([0, 1, 2, 3], 2, 0, logits))  # nodes 2 and 3 were not drafted
    assert state.num_valid.tolist() == [1]
    np.testing.assert_array_equal(state.logits[0, 0], logits[1])
    assert state.likeliest.tolist() == [1]


def propose(drafter, state, text, temperature=1.0):
    """Return the drafter's tree for one row with the text `text`."""
    context = Context(jnp.array([[*text, 9, 9, 9]]), jnp.array([len(text)]), Sampling(temperature))
    return drafter.propose((), jax.random.split(jax.random.key(0), 1), state, context, jnp.array([8]))[0]


def test_initial_tokens_and_their_distributions():
    logits = jnp.log(jax.nn.one_hot(jnp.array([[5, 6, 7, 8]]), 10))
    state = lambda count, likeliest=8: JacobiState(logits, jnp.array([count]), jnp.array([likeliest]), jnp.array([1]))
    make = lambda **options: jacobi(10, window=4, **options)
    tree = propose(make(initial="repeat"), state(2), [1, 2, 3])
    assert tree.tokens[0].tolist() == [3, 5, 6, 6, 6]
    np.testing.assert_array_equal(jnp.argmax(tree.logits[0, :4], -1), tree.tokens[0, 1:])
    assert (jnp.sum(jnp.exp(tree.logits[0, :4]), -1) == 1).all()
    assert tree.valid.all()
    assert propose(make(initial="repeat"), state(0), [1, 2, 3]).tokens[0].tolist() == [3, 3, 3, 3, 3]
    assert propose(make(initial="repeat", stride=3), state(1), [1, 2, 3]).tokens[0].tolist() == [3, 5, 2, 3, 5]
    first = propose(make(initial="repeat", stride=3, ids=(4, 5)), state(0), [1, 2]).tokens[0]
    assert first.tolist() == [2, 4, 1, 2, 4]  # no token three places back yet: random
    assert propose(make(initial="sample"), state(2), [1, 2, 3]).tokens[0].tolist() == [3, 5, 6, 8, 8]
    assert propose(make(initial="sample", ids=(4, 5)), state(0, -1), [1]).tokens[0].tolist() == [1, 4, 4, 4, 4]
    assert propose(make(ids=(4, 5)), state(1), [1]).tokens[0].tolist() == [1, 5, 4, 4, 4]
    greedy = propose(make(ids=(4, 5)), state(3), [1], None)
    assert greedy.logits is None
    assert greedy.tokens[0].tolist() == [1, 5, 6, 7, 4]


def test_lists_are_accepted_and_equal_settings_give_one_drafter():
    assert jacobi(5, ids=[0, 3], forced=[-1, 4]) is jacobi(5, ids=(0, 3), forced=(-1, np.int32(4)))


def test_usage_errors():
    for options, message in [
        ({"window": 0}, "window must be at least 1"),
        ({"initial": "zero"}, "initial must be"),
        ({"ids": (5, 5)}, "ids must be a range within 0 to 5"),
        ({"stride": 2}, "stride must be"),
        ({"forced": (0, 5)}, "forced must be token ids below 5"),
        ({"forced": (0, 1.5)}, "forced must be token ids below 5"),
    ]:
        with pytest.raises(UsageError, match=message):
            jacobi(5, **options)
