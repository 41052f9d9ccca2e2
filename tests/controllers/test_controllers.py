"""Controllers: their traces, what they must not read, and exact text under a controller that tries to do harm."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import those
from toy import ADVERSARY, DRAFT_ROWS, TARGET_ROWS, chi_square, joint_distribution, markov, sampled_triples, tiny_llama

from specjax import UsageError, controllers, decode, trees
from specjax.controllers.spec_kv import HIDDEN, Weights
from specjax.costs import NO_SHARES
from specjax.drafters import autoregressive, hierarchical, two_model
from specjax.engine.prepare import Settings, prepare
from specjax.engine.run import start
from specjax.engine.step import step
from specjax.trees import stops


def trace(controller, rounds):
    """The limits after rounds of (drafted depth, accepted) of one row, the first before any."""
    state = controller.init(1)
    limits = [int(controller.limit(state)[0])]
    for drafted, accepted in rounds:
        info = SimpleNamespace(
            drafted_depth=jnp.array([drafted]), accepted=jnp.array([accepted]), active=jnp.array([True])
        )
        state = controller.update(state, info)
        limits.append(int(controller.limit(state)[0]))
    return limits


def test_additive_is_the_heuristic_of_assisted_generation():
    """Start 5; 2 more after a fully accepted round, 1 less otherwise, never below 1."""
    rounds = [(5, 5), (7, 7), (9, 8), (8, 0), (7, 7), (9, 1)]
    assert trace(controllers.additive(), rounds) == [5, 7, 9, 8, 7, 9, 8]
    assert trace(controllers.additive(2), [(2, 0), (1, 0), (1, 0)]) == [2, 1, 1, 1]
    assert trace(controllers.additive(19), [(19, 19)]) == [19, 20]


def test_multiplicative_doubles_and_halves():
    rounds = [(4, 4), (8, 8), (16, 16), (16, 3), (8, 0), (4, 0), (2, 0), (1, 0), (1, 1)]
    assert trace(controllers.multiplicative(), rounds) == [4, 8, 16, 16, 8, 4, 2, 1, 1, 2]


def batch_trace(controller, batch, rounds):
    """The limits of all rows after rounds of (drafted depth, accepted, active) per row, the first before any."""
    state = controller.init(batch)
    limits = [controller.limit(state).tolist()]
    for drafted, accepted, active in rounds:
        info = SimpleNamespace(
            drafted_depth=jnp.array(drafted), accepted=jnp.array(accepted), active=jnp.array(active, bool)
        )
        state = controller.update(state, info)
        limits.append(controller.limit(state).tolist())
    return limits


def test_bass_follows_the_best_row():
    """Worked by hand: 7 + 2, 9 + 2, 11 - 2, 9 - 1 - 1 as the step before lowered it too; then the best row's 6."""
    best = [7, 9, 4, 2, 6, 6, 0, 0]
    wanted = [7, 9, 11, 9, 7, 6, 8, 7, 5]
    assert trace(controllers.bass(), zip(wanted, best, strict=False)) == wanted
    rounds = [
        ([limit] * 3, [0, longest, longest // 2], [1, 1, 1]) for limit, longest in zip(wanted, best, strict=False)
    ]
    assert batch_trace(controllers.bass(), 3, rounds) == [[limit] * 3 for limit in wanted]
    assert trace(controllers.bass(31), [(31, 31), (32, 32), (32, 5)]) == [31, 32, 32, 28]
    assert trace(controllers.bass(2), [(2, 0), (1, 0), (1, 1), (3, 0)]) == [2, 1, 1, 3, 2]


def test_bass_does_not_count_rows_that_have_ended_or_drafted_nothing():
    ended = [([7, 7], [7, 1], [0, 1]), ([6, 6], [5, 1], [0, 1]), ([0, 4], [0, 4], [1, 1]), ([6, 6], [6, 6], [0, 0])]
    assert [limits[0] for limits in batch_trace(controllers.bass(), 2, ended)] == [7, 6, 4, 6, 6]


def test_bass_learns_from_a_rejection_beside_drafts_that_ended_early():
    """A short draft that was accepted whole does not raise the limit, nor does it hide another row's rejection."""
    rounds = [([3, 7], [3, 2], [1, 1]), ([5, 5], [5, 5], [1, 1]), ([5, 6], [5, 0], [1, 1])]
    assert [limits[0] for limits in batch_trace(controllers.bass(), 2, rounds)] == [7, 6, 6, 5]


@pytest.mark.parametrize("controller", [controllers.additive(4), controllers.multiplicative(4), controllers.bass(4)])
def test_a_draft_that_ended_early_does_not_raise_the_limit(controller):
    """A stop condition or the tree's depth may end a draft early. The limit must not grow beyond the drafted depth."""
    initial, ended, lowered, empty = trace(controller, [(2, 2), (3, 1), (0, 0)])
    assert initial == ended == 4 and lowered < 4 and empty == lowered


def test_rows_that_have_ended_keep_their_limit():
    controller = controllers.additive()
    info = SimpleNamespace(drafted_depth=jnp.array([5, 5]), accepted=jnp.array([5, 5]), active=jnp.array([True, False]))
    assert controller.update(controller.init(2), info).tolist() == [7, 5]


def test_the_ladder_by_batch():
    controller = controllers.by_batch(((1, 5), (4, 3), (16, 1)))
    depth = {batch: controller.limit(controller.init(batch)).tolist() for batch in (1, 2, 4, 5, 16, 17)}
    assert {batch: limits[0] for batch, limits in depth.items()} == {1: 5, 2: 3, 4: 3, 5: 1, 16: 1, 17: 0}
    assert all(limits == [limits[0]] * batch for batch, limits in depth.items())


# ------------------------------------------------------------------------------------------------------ losslessness

PROMPTS = [[1, 2, 3, 1, 2, 3, 1], [5], list(range(30)), [7, 7]]
TOYS = {
    "chain": lambda: two_model(markov(DRAFT_ROWS), 3),
    "stopping beams": lambda: two_model(markov(DRAFT_ROWS), tree=trees.beam(2, 3), stop=stops.fallback(0.5)),
    "hierarchical": lambda: hierarchical(
        markov(DRAFT_ROWS), two_model(markov(TARGET_ROWS[::-1].copy()), 2, lag=4), min_tokens=2
    ),
}


def test_the_adversary_drafts_nothing_now_and_then():
    state, limits = ADVERSARY.init(4), []
    for _ in range(8):
        limits.append(ADVERSARY.limit(state).tolist())
        state = ADVERSARY.update(state, SimpleNamespace(accepted=jnp.array([0, 1, 2, 0])))
    assert {limit for row in limits for limit in row} == {0, 1, 2, 3, 4}
    assert any(len(set(row)) > 2 for row in limits)


@pytest.mark.parametrize("name", those(("stopping beams",), TOYS))
def test_sampled_text_keeps_its_law_under_the_adversary(name):
    counts = sampled_triples(TOYS[name](), TARGET_ROWS, controller=ADVERSARY)
    assert chi_square(counts, joint_distribution(TARGET_ROWS, 0, 3)) > 1e-3


def test_a_limit_that_reads_the_draft_is_caught():
    """A mutant of what a controller is: the draft is cut before a token by what the token is."""
    drafter = two_model(markov(DRAFT_ROWS), 2)

    def propose(params, keys, state, context, limit):
        tree, state = drafter.propose(params, keys, state, context, limit)
        limit = jnp.where(tree.tokens[:, 1] == 2, 0, limit)
        return tree._replace(valid=jnp.arange(3) <= limit[:, None]), state

    counts = sampled_triples(drafter.replace(propose=propose), TARGET_ROWS)
    assert chi_square(counts, joint_distribution(TARGET_ROWS, 0, 3)) < 1e-6


def test_greedy_text_is_the_targets_under_the_adversary():
    """The text is the target's, and a draft model that is the target has every token accepted after rounds without a
    draft."""
    run = lambda drafter, **options: decode(
        tiny_llama(), drafter, PROMPTS, key=jax.random.key(0), max_new_tokens=20, **options
    )
    ours = run(two_model(tiny_llama(), 4, stop=stops.confidence(0.7)), controller=ADVERSARY)
    assert ours.to_lists() == run(autoregressive()).to_lists()
    assert ours.stats.accepted.tolist() == ours.stats.drafted.tolist()


_one = np.eye(1, HIDDEN)[0]  # only the first hidden unit is used: g - 20 (mean confidence) + 8
WEIGHTS = Weights(np.array([0, -20, 0, 0, 0, 1])[:, None] * _one, 8 * _one, -2 * _one, 2.0)  # longer where q is sure
ALL = {
    "fixed": controllers.fixed(3),
    "additive": controllers.additive(2),
    "multiplicative": controllers.multiplicative(2),
    "bass": controllers.bass(2),
    "by_batch": controllers.by_batch(),
    "spec_kv": controllers.spec_kv(WEIGHTS, gammas=(1, 2, 4), start=2),
    "goodput": controllers.goodput((0, 1, 2, 4), costs=(1.0, 1.1, 1.2, 1.4)),
}


def test_every_controller_is_tested():
    helpers = {"FORMS", "bandit", "fit_spec_kv", "parse", "read_spec_kv", "save_spec_kv"}
    of_heads = {"budget"}  # it needs a drafter with a confidence, see `test_budget`
    assert set(ALL) == set(controllers.__all__) - helpers - of_heads


@pytest.mark.parametrize("name", ALL)
def test_the_limit_does_not_depend_on_the_randomness_of_its_round(name):
    """The same past and another key: other drafts and verdicts, the same depth."""
    controller, drafter = ALL[name], two_model(markov(DRAFT_ROWS), 8)
    prompts = (jnp.zeros((64, 4), jnp.int32), jnp.full((64,), 4))
    settings = Settings(temperature=1.0, controller=controller)
    job = prepare(markov(), drafter, prompts, settings, key=jax.random.key(0), max_new_tokens=40)
    state, advance = start(job), jax.jit(step)
    for _ in range(2):
        state, _ = advance(job.parts, state)
    reseeded = state._replace(keys=jax.random.split(jax.random.key(9), 64))
    (_, ours), (_, theirs) = advance(job.parts, state), advance(job.parts, reseeded)
    np.testing.assert_array_equal(ours.drafted_depth, theirs.drafted_depth)
    np.testing.assert_array_equal(ours.drafted_depth, np.minimum(controller.limit(state.control), 8))
    assert (ours.accepted != theirs.accepted).any()
    if name not in ("fixed", "bass", "by_batch", "goodput"):  # one depth for all rows
        assert len(set(ours.drafted_depth.tolist())) > 1
    if name in ("bass", "goodput"):  # which follows the past
        assert int(ours.drafted_depth[0]) != int(controller.limit(controller.init(64))[0])


# ------------------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: controllers.additive(0), "1 <= low <= start <= high, not 1, 0 and 20"),
        (lambda: controllers.multiplicative(4, low=0), "1 <= low <= start <= high, not 0, 4 and 16"),
        (lambda: controllers.bass(0), "1 <= start <= high, not 0 and 32"),
        (lambda: controllers.bass(part=0), "up must be at least 0 and part at least 1, not 2 and 0"),
        (lambda: controllers.additive(up=-1), "up and down must be at least 0"),
        (lambda: controllers.by_batch(()), "sizes of a ladder must be at least 1 and increasing"),
        (
            lambda: controllers.by_batch(((4, 1), (2, 3))),
            r"sizes of a ladder must be at least 1 and increasing, not \[4, 2\]",
        ),
        (lambda: controllers.by_batch(((4, -1),)), "depths must be at least 0"),
        (lambda: controllers.parse("fixed"), '"fixed" is not a controller; the forms are fixed:N'),
        (lambda: controllers.parse("additive:"), "is not a controller"),
        (lambda: controllers.parse("by_batch:3"), "is not a controller"),
        (lambda: controllers.parse("goodness:3"), "is not a controller"),
    ],
)
def test_bad_settings(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def test_specs():
    assert controllers.parse("fixed:3") is controllers.fixed(3)
    assert controllers.parse("additive") is controllers.additive()
    assert controllers.parse("multiplicative:2") is controllers.multiplicative(2)
    assert controllers.parse("bass") is controllers.bass()
    assert controllers.parse("bass:3") is controllers.bass(3)
    assert controllers.parse("by_batch") is controllers.by_batch()
    assert controllers.parse("goodput", dtype="bfloat16") is controllers.goodput(
        costs=None, dtype="bfloat16", draft_cost=0.0, shares=NO_SHARES
    )
