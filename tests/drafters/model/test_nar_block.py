"""The block drafter of GAD (A11), with a model of known predictions: the marginals of a Markov chain."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import DRAFT_ROWS, TARGET_ROWS, chi_square, joint_distribution, markov, sampled_triples

from specjax import UsageError, decode
from specjax.drafters import nar_block
from specjax.types import Context
from specjax.verifiers import top_beta

MASK = 3


def marginals(params, tokens, visible, positions):
    """Return log P(token at position | given) of a Markov chain float32[V, V], from its powers."""
    last = jnp.max(jnp.where(visible, jnp.arange(tokens.shape[1]), -1), 1)
    row = jax.nn.one_hot(jnp.take_along_axis(tokens, last[:, None], 1)[:, 0], len(params))  # zeros after a mask token
    distributions = []
    for _ in range(positions.shape[1]):
        row = jnp.dot(row, params, precision="highest")
        distributions.append(row)
    asked_well = jnp.all(positions == last[:, None] + 1 + jnp.arange(positions.shape[1]))
    asked_well &= jnp.all(visible | (tokens == MASK))
    return jnp.pad(jnp.log(jnp.where(asked_well, jnp.stack(distributions, 1), jnp.nan)), ((0, 0), (0, 0), (0, 1)))


drafter_of = functools.partial(nar_block, marginals, mask_token=MASK, num_tokens=3)


def block_after(token, rows, count=3):
    return [int((np.linalg.matrix_power(rows.astype(np.float64), i)[token]).argmax()) for i in range(1, count + 1)]


def test_one_pass_drafts_the_likeliest_token_of_each_position():
    tokens = jnp.array([[0, 2, 1, 7, 7, 7, 7, 7], [1, 0, 2, 0, 2, 7, 7, 7]])  # 7: behind the text
    context = Context(tokens, jnp.array([3, 5]))
    drafter = drafter_of(jnp.asarray(DRAFT_ROWS))
    tree, _ = jax.jit(drafter.propose)(drafter.params, None, (), context, jnp.array([9, 2]))
    assert tree.tokens.tolist() == [[last, *block_after(last, DRAFT_ROWS)] for last in (1, 2)]
    assert tree.valid.tolist() == [[True] * 4, [True, True, True, False]]
    assert tree.logits is None and drafter.traits.draws == "point_mass"
    assert block_after(1, DRAFT_ROWS) != block_after(2, DRAFT_ROWS)


def test_sampled_text_has_the_law_of_the_target():
    counts = sampled_triples(drafter_of(jnp.asarray(DRAFT_ROWS)), TARGET_ROWS)
    assert chi_square(counts, joint_distribution(TARGET_ROWS, 0, 3)) > 1e-3


def test_relaxed_acceptance_ends():
    """Check that beta = 1 gives the target's greedy text, and beta = V with tau = inf the drafter's own blocks."""
    drafter = drafter_of(jnp.asarray(DRAFT_ROWS))
    run = lambda verifier: decode(
        markov(), drafter, [[0], [1, 2]], key=jax.random.key(0), max_new_tokens=8, temperature=1.0, verifier=verifier
    )
    best, greedy, drafted_rows = TARGET_ROWS.argmax(1), [], []
    for last in (0, 2):
        text = [last]
        while len(text) < 9:
            text.append(int(best[text[-1]]))
        greedy.append(text[1:])
        text = [last]
        while len(text) < 9:
            text += block_after(text[-1], DRAFT_ROWS)
            text.append(int(best[text[-1]]))
        drafted_rows.append(text[1:])
    assert run(top_beta(1, 0.0)).to_lists() == greedy
    loose = run(top_beta(3, float("inf")))  # three drafts and the target's own token a pass
    assert loose.to_lists() == drafted_rows != greedy
    assert loose.stats.target_passes.tolist() == [2, 2]


def test_bad_settings_and_no_recompilation():
    params = jnp.asarray(DRAFT_ROWS)
    assert jax.tree.structure(drafter_of(params)) == jax.tree.structure(drafter_of(params))
    with pytest.raises(UsageError, match="num_tokens must be at least 1"):
        nar_block(marginals, params, mask_token=MASK, num_tokens=0)
    with pytest.raises(UsageError, match="mask_token must be a token id"):
        nar_block(marginals, params, mask_token=-1)
