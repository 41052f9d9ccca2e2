"""Every builder with the two-model drafter: exact text, exact law, and the drafter's cache."""

import functools

import jax
import pytest
from toy import DRAFT_ROWS, TARGET_ROWS, chi_square, joint_law, markov, sampled_triples, tiny_llama

from specjax import decode, trees
from specjax.drafters import two_model

BUILDERS = {
    "chain": trees.chain(3),
    "rsd_c": trees.branching("2x2x1"),
    "paths": trees.independent_paths(2, 3),
    "top_and_sampled": trees.branching((3, 2), "top_and_sampled"),
    "static_top_k": trees.branching((3, 2), "point_mass"),
    "sequoia": trees.static(trees.sequoia((0.6, 0.2, 0.1), 8)[1]),
    "rsd_s": trees.beam(3, 3),
    "dyspec": trees.dyspec(threshold=0.05, width=4, depth=3, children=3),
    "dyspec_fixed": trees.dyspec_fixed(5),
    "eagle2": trees.eagle2(top_k=3, depth=3, total=8),
}
PROMPTS = [[1, 2, 3, 1, 2, 3, 1], [5], list(range(30)), [7, 7]]


@functools.cache
def run(name, temperature=0.0, sampling="speculative", new=20):
    tree = BUILDERS.get(name)
    drafter = two_model(tiny_llama(seed=1, layers=1), tree=tree)
    return decode(
        tiny_llama(),
        drafter,
        PROMPTS,
        key=jax.random.key(0),
        max_new_tokens=new,
        temperature=temperature,
        sampling=sampling,
    )


@functools.cache
def plain(temperature=0.0, new=20):
    from specjax.drafters import autoregressive

    result = decode(
        tiny_llama(), autoregressive(), PROMPTS, key=jax.random.key(0), max_new_tokens=new, temperature=temperature
    )
    return result.to_lists()


@pytest.mark.parametrize("name", BUILDERS)
def test_greedy_text_is_that_of_plain_decoding(name):
    assert run(name).to_lists() == plain()


@pytest.mark.parametrize("name", BUILDERS)
def test_coupled_text_is_that_of_plain_sampling(name):
    assert run(name, 0.9, "coupled").to_lists() == plain(0.9)


@pytest.mark.parametrize("name", BUILDERS)
def test_a_drafter_that_is_the_target_is_always_right(name):
    """So the draft cache holds what a fresh prefill would: one wrong slot and drafts go astray."""
    tree = BUILDERS[name]
    drafter = two_model(tiny_llama(), tree=tree)
    result = decode(tiny_llama(), drafter, PROMPTS, key=jax.random.key(0), max_new_tokens=21)
    depth = tree.max_depth if name not in ("dyspec", "dyspec_fixed", "eagle2", "sequoia") else 2
    assert int(result.stats.target_passes.max()) <= -(-21 // (depth + 1)) + (depth < tree.max_depth)
    assert result.to_lists() == plain(new=21)


@pytest.mark.parametrize("name", BUILDERS)
def test_sampled_text_has_the_law_of_the_target(name):
    drafter = two_model(markov(DRAFT_ROWS), tree=BUILDERS[name])
    assert chi_square(sampled_triples(drafter, TARGET_ROWS), joint_law(TARGET_ROWS, 0, 3)) > 1e-3
