"""Three models: golden distribution, limits, and the caches of the two inner ones."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import exhaustive
from toy import (
    DRAFT_ROWS,
    MARKOV,
    TARGET_ROWS,
    branching_drafter,
    chi_square,
    joint_distribution,
    markov,
    sampled_triples,
    tiny_llama,
)

from specjax import UsageError, decode, stream, trees
from specjax.drafters import autoregressive, hierarchical, prompt_lookup, two_model

MIDDLE_ROWS = np.array(MARKOV["mid_rows"], np.float32)
PROMPTS = [[1, 2, 3, 1, 2, 3, 1], [5], list(range(30)), [7, 7]]


def toy(min_tokens=2):
    inner = two_model(markov(DRAFT_ROWS), tree=trees.branching((2,)), lag=4)
    return hierarchical(markov(MIDDLE_ROWS), inner, min_tokens=min_tokens)


@pytest.mark.parametrize("min_tokens", [exhaustive(1), 2, exhaustive(3)])
def test_sampled_text_has_the_law_of_the_target(min_tokens):
    assert chi_square(sampled_triples(toy(min_tokens), TARGET_ROWS), joint_distribution(TARGET_ROWS, 0, 3)) > 1e-3


def chance_of_accepted(min_tokens, own_token):
    """float64: the chances of 0, 1, ... accepted tokens of one pass on the toy, by enumeration in numpy.

    The inner draft is two children drawn without replacement.
    own_token: the chain starts with a token of the middle model's own, as in our loop; without, as in the golden row.
    """
    p, m, q = (rows.astype(np.float64) for rows in (TARGET_ROWS, MIDDLE_ROWS, DRAFT_ROWS))
    found = np.zeros(min_tokens + 2)

    def target(chain, chance):
        """The target's test of a whole chain, which begins with the last token of the text."""
        for accepted, (before, token) in enumerate(itertools.pairwise(chain)):
            passed = min(1.0, p[before, token] / m[before, token])
            found[accepted] += chance * (1 - passed)
            chance *= passed
        found[len(chain) - 1] += chance

    def middle(chain, chance):
        """Passes of the middle model: recursive rejection of two children and one token more, until it is enough."""
        if len(chain) > min_tokens:
            target(chain, chance)
            return
        for pair in itertools.permutations(range(3), 2):
            distribution, draft = m[chain[-1]], q[chain[-1]]
            left = chance * draft[pair[0]] * draft[pair[1]] / (1 - draft[pair[0]])
            for child in pair:
                passed = min(1.0, distribution[child] / draft[child])
                for token in range(3):
                    middle((*chain, child, token), left * passed * m[child, token])
                left *= 1 - passed
                if left == 0:
                    break
                distribution = np.maximum(distribution - draft, 0) / np.maximum(distribution - draft, 0).sum()
                draft = np.where(np.arange(3) == child, 0, draft) / (1 - draft[child])
            for token in np.flatnonzero(distribution) if left else ():
                middle((*chain, int(token)), left * distribution[token])

    if own_token:
        for token in range(3):
            middle((0, token), m[0, token])
    else:
        middle((0,), 1.0)
    return found


def test_the_enumeration_is_the_golden_row():
    golden = MARKOV["hierarchical_min2"]
    found = chance_of_accepted(2, own_token=False)
    np.testing.assert_allclose(found, list(golden["accepted_length_pmf"].values()), atol=2e-6)
    np.testing.assert_allclose(found @ (1 + np.arange(4)), golden["expected_tokens_per_iteration"], atol=2e-6)


@pytest.mark.parametrize("min_tokens", [2, 3])
def test_tokens_per_pass_are_those_of_the_enumeration(min_tokens):
    """No setting of our loop replays the golden row: there every token comes from verdicts of the middle model on a
    draft, here the first is its own, without a draft (the card's option), so the chains have other lengths.
    """
    distribution, rows = chance_of_accepted(min_tokens, own_token=True), 40_000
    prompts = (jnp.zeros((rows, 4), jnp.int32), jnp.full((rows,), 4))
    step = next(stream(markov(), toy(min_tokens), prompts, key=jax.random.key(5), max_new_tokens=8, temperature=1.0))
    counts = np.bincount(step.accepted, minlength=len(distribution))
    error = step.accepted.std() / rows**0.5
    assert abs(step.accepted.mean() - distribution @ np.arange(len(distribution))) < 4 * error < 0.03
    assert chi_square(counts, distribution) > 1e-3
    assert chi_square(counts, chance_of_accepted(min_tokens, own_token=False)) < 1e-6  # another loop is caught


def test_replaced_middle_laws_are_caught():
    """A mutant: the target verifies with the tiny drafter's q instead of the middle model's."""
    drafter = toy()

    def propose(params, keys, state, context, limit):
        tree, state = drafter.propose(params, keys, state, context, limit)
        return tree._replace(logits=jnp.log(params[1])[tree.tokens]), state

    mutant = drafter.replace(propose=propose)
    assert chi_square(sampled_triples(mutant, TARGET_ROWS), joint_distribution(TARGET_ROWS, 0, 3)) < 1e-6


@pytest.mark.parametrize("temperature", [exhaustive(0.0), 0.9])
def test_greedy_and_coupled_text_is_the_targets(temperature):
    draft = two_model(tiny_llama(seed=2, layers=1), tree=trees.branching((2, 1)), lag=4)
    run = lambda drafter: decode(
        tiny_llama(),
        drafter,
        PROMPTS,
        key=jax.random.key(0),
        max_new_tokens=20,
        temperature=temperature,
        sampling="coupled",
    ).to_lists()
    assert run(hierarchical(tiny_llama(seed=1, layers=1), draft, min_tokens=3)) == run(autoregressive())


def test_three_equal_models_are_always_right():
    """So the caches of both inner models hold what a fresh prefill would, after every full acceptance."""
    inner = two_model(tiny_llama(), tree=trees.chain(2), lag=4)
    drafter = hierarchical(tiny_llama(), inner, min_tokens=4)  # 1 own token + 3 of an inner round
    result = decode(tiny_llama(), drafter, PROMPTS, key=jax.random.key(0), max_new_tokens=20)
    assert result.stats.target_passes.tolist() == [4] * 4  # 4 drafts and the bonus token a pass


def test_a_useless_inner_drafter_leaves_a_chain_of_the_middle_model():
    rows = np.roll(np.eye(3, dtype=np.float32), 1, 1)  # the middle model is sure, the drafter of something else
    useless = branching_drafter((1,)).replace(params=jnp.roll(jnp.asarray(rows), 1, 1) + 1e-9)
    drafter = hierarchical(markov(rows + 1e-9), useless, min_tokens=3)
    result = decode(markov(rows + 1e-9), drafter, [[0, 1]], key=jax.random.key(0), max_new_tokens=12, temperature=1.0)
    assert result.stats.target_passes.tolist() == [3]  # 3 drafts and the bonus token a pass


def test_bad_settings():
    with pytest.raises(UsageError, match="min_tokens"):
        hierarchical(tiny_llama(), prompt_lookup(), min_tokens=0)
    with pytest.raises(UsageError, match="lag"):
        two_model(tiny_llama(), lag=1)
