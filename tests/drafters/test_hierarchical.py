"""Three models: golden law, limits, and the caches of the two inner ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import (
    DRAFT_ROWS,
    MARKOV,
    TARGET_ROWS,
    branching_drafter,
    chi_square,
    joint_law,
    markov,
    sampled_triples,
    tiny_llama,
)

from specjax import UsageError, decode, trees
from specjax.drafters import autoregressive, hierarchical, prompt_lookup, two_model

MIDDLE_ROWS = np.array(MARKOV["mid_rows"], np.float32)
PROMPTS = [[1, 2, 3, 1, 2, 3, 1], [5], list(range(30)), [7, 7]]


def toy(min_tokens=2):
    inner = two_model(markov(DRAFT_ROWS), tree=trees.branching((2,)), lag=4)
    return hierarchical(markov(MIDDLE_ROWS), inner, min_tokens=min_tokens)


@pytest.mark.parametrize("min_tokens", [1, 2, 3])
def test_sampled_text_has_the_law_of_the_target(min_tokens):
    assert chi_square(sampled_triples(toy(min_tokens), TARGET_ROWS), joint_law(TARGET_ROWS, 0, 3)) > 1e-3


def test_replaced_middle_laws_are_caught():
    """A mutant: the target verifies with the tiny drafter's q instead of the middle model's."""
    drafter = toy()

    def propose(params, keys, state, context, limit):
        tree, state = drafter.propose(params, keys, state, context, limit)
        return tree._replace(logits=jnp.log(params[1])[tree.tokens]), state

    mutant = drafter.replace(propose=propose)
    assert chi_square(sampled_triples(mutant, TARGET_ROWS), joint_law(TARGET_ROWS, 0, 3)) < 1e-6


@pytest.mark.parametrize("temperature", [0.0, 0.9])
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
