"""A small model drafts for the target over a part of its cache, and the target verifies over all of it."""

import depths
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rules import takes_valid
from tiers import those
from toy import chi_square, markov, tiny_llama

from specjax import UsageError, decode
from specjax.catalog import METHODS
from specjax.drafters import rapid, triforce, two_model
from specjax.drafters.layers.sparse_cache import SELECTIONS
from specjax.drafters.making import make_drafter
from specjax.drafters.model.triforce import make_triforce
from specjax.types import Target

SMALL = {"sinks": 2, "window": 4, "chunk": 3, "budget": 7, "refresh": 5, "pays_from": 0}
PROMPT = (np.arange(24) ** 2 % 7 % 3).tolist()
NEW = 3


def draft(**changes) -> Target:
    return tiny_llama(seed=1, layers=1, **changes)


@pytest.mark.parametrize("selection", those({"retrieval"}, SELECTIONS))
def test_the_text_is_that_of_plain_decoding(selection):
    drafter = triforce(depths.target(), two_model(draft(), 2, lag=3), selection=selection, min_tokens=4, **SMALL)
    plain = depths.texts(depths.target())
    assert depths.texts(depths.target(), drafter) == plain
    assert depths.texts(depths.target(), drafter, verifier=takes_valid) != plain


def law_of(target: Target) -> np.ndarray:
    """Return the distribution [3, 3, 3] of the three tokens after PROMPT at temperature 2, by enumeration."""
    chains = np.array([[*PROMPT, *np.unravel_index(i, (3,) * NEW)] for i in range(3**NEW)])
    size = chains.shape[1]
    output, _ = target.model.forward(
        target.params, jnp.asarray(chains), target.model.init_cache(target.params, None, len(chains), 128),
        positions=jnp.broadcast_to(jnp.arange(size), chains.shape),
        mask=jnp.broadcast_to(jnp.tril(jnp.ones((size, size), bool)), (len(chains), size, size)),
    )  # fmt: skip
    p = np.asarray(jax.nn.softmax(output.logits.astype(jnp.float32) / 2.0), np.float64)[:, -NEW - 1 : -1]
    chances = np.take_along_axis(p, chains[:, -NEW:, None], 2)[..., 0].prod(1)
    return chances.reshape((3,) * NEW)


def counts_of(target: Target, drafter) -> tuple[np.ndarray, np.ndarray]:
    """Return the counts [3, 3, 3] of sampled texts, and the numbers of target passes."""
    result = decode(
        target, drafter, [PROMPT], key=jax.random.key(3), max_new_tokens=NEW, temperature=2.0, samples_per_prompt=4096
    )
    index = np.ravel_multi_index(np.asarray(result.to_lists()).T, (3,) * NEW)
    return np.bincount(index, minlength=3**NEW).reshape((3,) * NEW), np.asarray(result.stats.target_passes)


@pytest.mark.parametrize("selection", those({"retrieval"}, SELECTIONS))
def test_sampled_text_has_the_joint_law_of_the_target(selection):
    """Compare three sampled tokens with their exact distribution. A mutant verifies with the draft model's q."""
    target = tiny_llama(layers=3, vocab=3, stacked=True)
    inner = two_model(draft(vocab=3), 1, lag=3)
    drafter = triforce(target, inner, selection=selection, min_tokens=2, **SMALL)
    law = law_of(target)
    counts, passes = counts_of(target, drafter)
    assert chi_square(counts, law) > 1e-3
    assert passes.mean() < 2

    def propose(params, *args):
        tree, state = drafter.propose(params, *args)
        return tree._replace(logits=jnp.zeros_like(tree.logits)), state

    mutant, _ = counts_of(target, drafter.replace(propose=propose))
    assert chi_square(mutant, law) < 1e-6


def passes(drafter) -> list[int]:
    result = decode(depths.target(), drafter, depths.PROMPTS, key=jax.random.key(0), max_new_tokens=21)
    return result.stats.target_passes.tolist()


def test_equal_models_are_always_right():
    """The budget covers the whole text, so a chain has two inner rounds of 3 tokens, and the target adds one."""
    large = SMALL | {"budget": 64, "min_tokens": 5}
    inner = two_model(depths.target(), 2, lag=3)
    assert passes(triforce(depths.target(), inner, **large)) == [3] * 3
    assert passes(triforce(depths.target(), rapid(depths.target(), 2), **large)) == [3] * 3
    assert min(passes(triforce(depths.target(), two_model(draft(), 2, lag=3), **large))) > 3


def test_a_useless_inner_drafter_leaves_a_chain_of_the_target_over_its_selection():
    """The middle model adds a token in each inner round, so drafts of a random model only cost time."""
    large = SMALL | {"budget": 64, "min_tokens": 6}
    assert passes(triforce(depths.target(), two_model(draft(), 1, lag=3), **large)) == [3] * 3


def test_short_texts_are_decoded_plainly():
    drafter = make_drafter("triforce", depths.target(), draft())
    result = decode(depths.target(), drafter, depths.PROMPTS, key=jax.random.key(0), max_new_tokens=6)
    assert not np.asarray(result.stats.drafted).any()


def test_the_draft_model_may_read_a_part():
    make = lambda **options: make_drafter("triforce", depths.target(), draft(), **SMALL, **options)
    part = make(draft_budget=300, num_inner=2)
    assert depths.texts(depths.target(), part) == depths.texts(depths.target())
    assert METHODS["triforce"].option("draft_budget").default is None and part.max_depth == make(num_inner=2).max_depth


def test_what_is_refused():
    inner = two_model(draft(), 1)
    with pytest.raises(UsageError, match="min_tokens must be at least 1, not 0"):
        triforce(depths.target(), inner, min_tokens=0)
    with pytest.raises(UsageError, match="budget must be a whole number of at least 17, not 16"):
        triforce(depths.target(), inner, budget=16)
    with pytest.raises(UsageError, match="has no cache of keys and values on one device, which triforce needs"):
        triforce(markov(), inner)
    for option, smallest in (("num_inner", 1), ("draft_budget", 192)):
        with pytest.raises(UsageError, match=f"{option} must be a whole number of at least {smallest}, not 0"):
            make_triforce(depths.target(), draft(), **{option: 0})
