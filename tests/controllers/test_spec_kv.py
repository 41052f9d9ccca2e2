"""SpecKV: the card's scores, the signals it reads, and what it learns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from toy import DRAFT_ROWS, TARGET_ROWS, chi_square, joint_distribution, markov, sampled_triples

from specjax import UsageError, controllers, decode, stream, trees
from specjax.controllers.spec_kv import HIDDEN, Weights, choose, features, fit, predict, records, scores
from specjax.drafters import prompt_lookup, two_model
from specjax.types import Signals

GAMMAS = (2, 4, 6, 8)
ZEROS = Weights(np.zeros((6, HIDDEN)), np.zeros(HIDDEN), np.zeros(HIDDEN), 0.0)


def test_the_scores_of_the_card():
    """Acceptance .9, .7, .5, .4: 8 tokens by the paper's rule, 4 at a draft cost of .25 and a target cost of 1."""
    acceptance = jnp.array([0.9, 0.7, 0.5, 0.4])
    np.testing.assert_allclose(scores(acceptance, GAMMAS), [2.8, 3.8, 4.0, 4.2], atol=1e-6)
    assert int(choose(acceptance, GAMMAS)) == 8
    costs = tuple(0.25 * g + 1 for g in GAMMAS)
    np.testing.assert_allclose(scores(acceptance, GAMMAS, costs), [1.867, 1.9, 1.6, 1.4], atol=5e-4)
    assert int(choose(acceptance, GAMMAS, costs)) == 4
    assert int(choose(jnp.full(4, 0.1), GAMMAS)) == 8  # equal acceptance: the longest


def test_features_of_a_round():
    nan = jnp.nan
    signals = Signals(
        confidence=jnp.array([[0.9, 0.5, nan], [1.0, nan, nan], [nan] * 3]),
        entropy=jnp.array([[0.2, 0.6, nan], [0.0, nan, nan], [nan] * 3]),
        judged=jnp.array([[True, True, False], [True, False, False], [False] * 3]),
    )
    wanted = [[0.4, 0.7, 0.6, 0.5, 2], [0, 1, 0, 1, 2], [0, 0, 0, 1, 2]]  # of no draft: nothing that is not finite
    np.testing.assert_allclose(features(signals, code=2), wanted, atol=1e-6)


@pytest.mark.parametrize("tree", [trees.chain(3), trees.branching((2, 2))])
def test_signals_are_of_the_accepted_tokens_and_the_first_rejected(tree):
    drafter = two_model(markov(DRAFT_ROWS), tree=tree)
    prompts = (jnp.zeros((256, 4), jnp.int32), jnp.full((256,), 4))
    controller = controllers.fixed()._replace(reads_signals=True)
    step = next(
        stream(
            markov(), drafter, prompts, key=jax.random.key(1), max_new_tokens=9, temperature=1.0, controller=controller
        )
    )
    info = step.info
    depth = tree.max_depth
    assert len(set(info.accepted.tolist())) == depth + 1
    for b in range(256):
        text, judged = [0, *step.tokens[b]], info.signals.judged[b]
        assert judged.sum() == min(info.accepted[b] + 1, depth)
        for j in range(judged.sum()):  # the distribution behind the j-th accepted token, from which the next was drawn
            row = DRAFT_ROWS[text[j]]
            np.testing.assert_allclose(info.signals.confidence[b, j], row.max(), atol=1e-6)
            np.testing.assert_allclose(info.signals.entropy[b, j], -(row * np.log(row)).sum(), atol=1e-5)


def test_fit_learns_when_drafts_are_accepted():
    """A token is accepted with the mean confidence: the network finds that, and that the rest does not matter."""
    rng = np.random.default_rng(0)
    x = rng.uniform(size=(4000, 5)).astype(np.float32)
    x[:, 4] = 1  # one code only: a feature that never changes
    gamma = rng.choice(GAMMAS, 4000)
    accepted = rng.binomial(gamma, x[:, 1])
    weights = fit(x, gamma, accepted, key=jax.random.key(0), steps=300)
    fresh = rng.uniform(size=(500, 6)).astype(np.float32) * [1, 1, 1, 1, 0, 8] + [0, 0, 0, 0, 1, 0]
    error = np.abs(np.asarray(predict(weights, jnp.asarray(fresh, jnp.float32))) - fresh[:, 1])
    assert error.mean() < 0.05
    assert np.abs(0.5 - fresh[:, 1]).mean() > 0.2  # what it would be without learning
    controllers.spec_kv(weights)  # has the right shapes


def test_records_pair_a_round_with_the_features_of_the_one_before():
    drafter = two_model(markov(DRAFT_ROWS), 4)
    prompts = (jnp.zeros((8, 4), jnp.int32), jnp.full((8,), 4))
    steps = list(
        stream(
            markov(), drafter, prompts, key=jax.random.key(1), max_new_tokens=24, temperature=1.0,
            controller=controllers.fixed(3)._replace(reads_signals=True),
        )
    )  # fmt: skip
    infos = [step.info for step in steps]
    x, gamma, accepted = records(infos, code=1)
    wanted = [(i, b) for i in range(1, len(infos)) for b in range(8) if infos[i].active[b] and infos[i].drafted[b]]
    assert len(x) == len(gamma) == len(accepted) == len(wanted) > 20
    for row, (i, b) in enumerate(wanted):
        np.testing.assert_allclose(x[row], features(infos[i - 1].signals, 1)[b], atol=1e-6)
        assert gamma[row] == infos[i].drafted_depth[b] and accepted[row] == infos[i].accepted[b]
    assert [len(part) for part in records([])] == [0, 0, 0]


def test_the_law_of_the_target_is_kept():
    weights = ZEROS._replace(w1=np.eye(6, HIDDEN) * 3, w2=np.linspace(-3, 3, HIDDEN))
    controller = controllers.spec_kv(weights, gammas=(1, 2), start=1)
    drafter = two_model(markov(DRAFT_ROWS), 2)
    assert (
        chi_square(sampled_triples(drafter, TARGET_ROWS, controller=controller), joint_distribution(TARGET_ROWS, 0, 3))
        > 1e-3
    )


def test_greedy_decoding_reads_the_laws_too_if_they_are_kept():
    """The acceptance that the network predicts is 1/2 everywhere: the paper's rule drafts most, after `start`."""
    run = lambda drafter: decode(
        markov(), drafter, [[0, 1, 2]], key=jax.random.key(0), max_new_tokens=12,
        controller=controllers.spec_kv(ZEROS, gammas=(1, 3), start=2),
    )  # fmt: skip
    result = run(two_model(markov(), 4, keep_logits=True))
    assert result.stats.target_passes.tolist() == [4]  # 3 + 4 + 4 + 1 tokens
    for drafter in (two_model(markov(), 4), prompt_lookup(4)):
        with pytest.raises(UsageError, match="reads the drafter's distributions"):
            run(drafter)


def test_bad_settings():
    with pytest.raises(UsageError, match="weights must have the shapes"):
        controllers.spec_kv(ZEROS._replace(b1=np.zeros(3)))
    with pytest.raises(UsageError, match="gammas and start must be at least 1"):
        controllers.spec_kv(ZEROS, gammas=(0, 2))
    for costs in ((1.0, 2.0), (1.0, 2.0, 3.0, float("nan")), (1.0, 2.0, 3.0, 0.0)):
        with pytest.raises(UsageError, match="round_costs must contain one positive number for each"):
            controllers.spec_kv(ZEROS, round_costs=costs)
    with pytest.raises(UsageError, match="code must be 0, 1 or 2, not 9"):
        controllers.spec_kv(ZEROS, code=9)
    with pytest.raises(UsageError, match="fit needs as many"):
        fit(np.zeros((0, 5)), np.zeros(0), np.zeros(0), key=jax.random.key(0))
    with pytest.raises(UsageError, match="steps must be"):
        fit(np.zeros((1, 5)), np.ones(1), np.ones(1), key=jax.random.key(0), steps=-1)
    assert controllers.spec_kv(ZEROS) is controllers.spec_kv(jax.tree.map(jnp.asarray, ZEROS))


def test_the_network_is_saved_and_read_and_named_in_a_text(tmp_path):
    file = tmp_path / "network.safetensors"
    weights = Weights(*(np.random.default_rng(0).normal(size=np.shape(x)).astype(np.float32) for x in ZEROS))
    controllers.save_spec_kv(file, weights)
    for x, y in zip(controllers.read_spec_kv(file), weights, strict=True):
        np.testing.assert_array_equal(x, y)
    ours = controllers.spec_kv(weights, gammas=(1, 3), start=2, round_costs=(1.0, 1.5))
    assert controllers.parse(f"spec_kv:{file},gammas=1/3,start=2,round_costs=1/1.5") is ours
    assert controllers.parse(f"spec_kv:{file}") is controllers.spec_kv(weights)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        (None, "there is no file"),
        ({"w1": np.zeros((5, HIDDEN), np.float32)}, r"has no array w1 of shape \[6, 16\]"),
        ({"other": np.zeros(2, np.float32)}, "which is not part of SpecKV's network"),
        ({"b1": np.full(HIDDEN, np.nan, np.float32)}, "not finite"),
    ],
)
def test_files_of_other_arrays_are_refused(tmp_path, arrays, words):
    file = tmp_path / "network.safetensors"
    if arrays is not None:
        network = {name: np.asarray(x, np.float32) for name, x in ZEROS._asdict().items()}
        safetensors.numpy.save_file(network | arrays, file)
    with pytest.raises(UsageError, match=words):
        controllers.parse(f"spec_kv:{file}")
    with pytest.raises(UsageError, match="lacks weights, the file of a trained network"):
        controllers.parse("spec_kv")
