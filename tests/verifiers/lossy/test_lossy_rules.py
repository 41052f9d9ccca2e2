"""All lossy rules: how far each takes the text from the target, their lossless ends, and invariances."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import block_distribution, without_replacement
from lossy import (
    INF,
    NEAREST,
    NEIGHBOURS3,
    NEIGHBOURS6,
    grouped_core,
    judge_core,
    lantern_core,
    output_tv,
    random_chains,
    rapid_core,
    rollback_core,
    rsd_core,
    standard_core,
    static_core,
    top_beta_core,
    typical_core,
    with_head,
)
from toy import DRAFT_ROWS, TARGET_ROWS, branching_drafter, joint_distribution, markov, template

from specjax import decode
from specjax.errors import UsageError
from specjax.trees import operations
from specjax.types import TokenTree
from specjax.verifiers import VERIFIERS, greedy, recursive_rejection, rules_with_arrays
from specjax.verifiers.lossy.bild import rollback
from specjax.verifiers.lossy.grouped import grouped, grouped_static
from specjax.verifiers.lossy.judge import init_judge, judge
from specjax.verifiers.lossy.lantern import lantern
from specjax.verifiers.lossy.rapid import rapid
from specjax.verifiers.lossy.top_beta import top_beta
from specjax.verifiers.lossy.typical import typical

pytestmark = pytest.mark.usefixtures("quick_compilation")

SCORES3 = jnp.array([-1.5, 0.3, 1.5])  # sigmoid: 0.18, 0.57, 0.82
typical_at = lambda epsilon, *x: typical_core(*x, epsilon=epsilon, delta=3.0)
judge_at = lambda threshold, *x: with_head(SCORES3, threshold)(*x)
lantern_at = lambda delta, *x: lantern_core(*x, NEIGHBOURS3, delta)
relative_at = lambda factor, *x: lantern_core(*x, NEIGHBOURS3, 0.0, factor - 1)
gap_at = lambda gap, *x: grouped_core(*x, gap, size=4)
keep_at = lambda alpha, *x: rollback_core(*x, alpha=alpha, sample=True)
keep_argmax_at = lambda alpha, *x: rollback_core(*x, alpha=alpha)

# rule: core, (value, distance of three tokens from the target's distribution, tokens per pass), the lossless value
# first. Exact chain, two drafted tokens: 0 and 2.38 tokens. The draft as it is, then a bonus token: 0.33 and 3.
SWEEPS = {
    "typical": (typical_at, [(1.0, 0.0, 1.0), (0.45, 0.15, 1.39), (0.22, 0.162, 1.96), (0.0, 0.33, 3.0)]),
    "judge": (judge_at, [(1.0, 0.0, 2.38), (0.9, 0.0, 2.38), (0.7, 0.22, 2.77), (0.5, 0.24, 2.91), (0.0, 0.33, 3.0)]),
    "lantern": (
        lantern_at,
        [(0.0, 0.0, 2.38), (0.28, 0.05, 2.43), (0.35, 0.22, 2.87), (0.65, 0.31, 2.96), (1, 0.33, 3)],
    ),
    "lantern++": (relative_at, [(1.0, 0.0, 2.38), (2.1, 0.05, 2.43), (3.1, 0.22, 2.87), (11.0, 0.33, 3.0)]),
    "rollback": (
        keep_at,
        [(-0.1, 0.0, 1.0), (0.9, 0.15, 1.39), (1.3, 0.162, 1.96), (2.0, 0.258, 2.88), (INF, 0.33, 3)],
    ),
}


@pytest.mark.parametrize("rule", SWEEPS)
def test_distance_from_the_target_grows_from_zero_at_the_lossless_end(rule):
    core, rows = SWEEPS[rule]
    values, *golden = np.array(rows).T
    distance, tokens = output_tv(core, values)
    assert distance[0] < 1e-6
    assert (np.diff(distance) >= -1e-6).all() and (np.diff(tokens) >= -1e-6).all() and distance[-1] > 0.3
    np.testing.assert_allclose([distance, tokens], golden, atol=2e-6)


TABLE = {name: rule for name, rule in {**VERIFIERS, **rules_with_arrays()}.items() if rule.guarantee == "lossy"}
CORES_OF_TABLE = {  # with the settings that are no parameters of the Verifier
    "typical": functools.partial(typical_core, epsilon=0.09, delta=0.3),
    "rollback": functools.partial(rollback_core, alpha=5.0),
    "top_beta": functools.partial(top_beta_core, beta=5, tau=3.0),
    "rapid": functools.partial(rapid_core, eta=10.0),
    "judge": lambda u, tree, logits, *head: judge_core(u, tree, logits, jax.nn.one_hot(tree.tokens, 3), *head),
    "lantern": lantern_core,
    "lantern++": lantern_core,
    "grouped": functools.partial(grouped_core, size=2),
    "grouped_static": static_core,
}


@pytest.mark.parametrize("name", TABLE)
def test_the_table_tells_the_distance(name):
    """The distance in the table is that of the rule as it stands there, by its own core."""
    rule = TABLE[name]
    assert rule.name == name and rule.setting
    core = lambda value, *args: CORES_OF_TABLE[name](*args, *(rule.params or ()))
    distance, _ = output_tv(core, [0.0])
    np.testing.assert_allclose(distance[0], rule.distance, atol=5e-4)


def test_distance_is_not_monotone_in_every_parameter():
    """A wider gap or cluster accepts no fewer tokens here; an argmax replacement never gives the distribution of p."""
    distance, tokens = output_tv(gap_at, [-1.0, 0.02, 0.12, 0.22, 0.35])
    np.testing.assert_allclose(distance, [0.0, 0.025, 0.113469, 0.146327, 0.29], atol=2e-6)
    np.testing.assert_allclose(tokens, [2.38, 2.39, 2.39, 2.591429, 2.96], atol=2e-6)
    distance, tokens = output_tv(lambda gap, *x: grouped_core(*x, gap, size=2), [INF])
    np.testing.assert_allclose([*distance, *tokens], [0.144286, 2.632857], atol=2e-6)
    distance, _ = output_tv(keep_argmax_at, [-0.1, 0.9, 1.3, 2.0, INF])
    np.testing.assert_allclose(distance, [0.5, 0.5, 0.331, 0.464, 0.497], atol=2e-6)


@pytest.mark.parametrize(
    ("core", "values", "golden"),
    [
        (lambda t, *x: with_head(-SCORES3, t)(*x), (1, 0.6, 0.4, 0), [(0, 2.56), (0.09, 2.65), (0.2, 2.92), (0.33, 3)]),
        (lantern_at, (0, 0.28, 0.35, 1), [(0, 2.56), (0.05, 2.61), (0.22, 2.87), (0.33, 3)]),
    ],
)
def test_distance_on_trees_drawn_without_replacement(core, values, golden):
    """At the lossless end these are recursive rejection: 2.56 tokens per pass is its golden value."""
    np.testing.assert_allclose(output_tv(core, values, (2, 1)).T, golden, atol=2e-6)


# ---------------------------------------------------------------------------------------------- lossless ends


@pytest.mark.parametrize(
    "core",
    [
        with_head([3.0, -3.0, 9.0, 0.0, 1.0, 2.0], 1.0),
        lambda *x: lantern_core(*x, NEIGHBOURS6, 0.0),
        lambda *x: lantern_core(*x, NEIGHBOURS6[:, :0], 0.9),
        lambda *x: lantern_core(*x, NEIGHBOURS6, 0.9, offset=6),  # no drafted token has a row
        functools.partial(grouped_core, max_gap=INF, size=0),
        functools.partial(grouped_core, max_gap=-1.0, size=4),
        functools.partial(static_core, clusters=jnp.arange(6)),
        functools.partial(rapid_core, eta=0.0),
        functools.partial(rapid_core, eta=0.0, residual="paper"),
    ],
    ids=[
        "judge",
        "lantern",
        "lantern_k0",
        "lantern_offset",
        "grouped",
        "grouped_gap",
        "grouped_static",
        "rapid",
        "rapid_paper",
    ],
)
def test_the_lossless_end_is_the_standard_rule_with_the_same_uniforms(core):
    u, tree, logits = random_chains()
    end, standard = core(u, tree, logits), standard_core(u, tree, logits)
    np.testing.assert_array_equal(end.path, standard.path)
    np.testing.assert_allclose(end.residual, standard.residual, atol=2e-6)
    assert len(np.unique(standard.num_nodes)) == 5


@pytest.mark.parametrize(
    "core", [with_head([5.0, 5.0, 5.0], 1.0), lambda *x: lantern_core(*x, NEIGHBOURS3)], ids=["judge", "lantern"]
)
def test_the_lossless_end_on_trees_is_recursive_rejection_and_exact_for_point_masses(core):
    drafts, _ = without_replacement(DRAFT_ROWS, 0, template((2, 2)))
    logits = jnp.log(jnp.asarray(TARGET_ROWS))[drafts.tokens]
    u = jax.random.uniform(jax.random.key(0), drafts.tokens.shape)
    jax.tree.map(np.testing.assert_array_equal, core(u, drafts, logits), rsd_core(u, drafts, logits))
    fixed = TokenTree(jnp.array([[0, 2, 1, 1, 0]]), jnp.array([[-1, 0, 0, 1, 2]]), jnp.ones((1, 5), bool))
    joint, accepted = block_distribution(core, fixed, [1.0], TARGET_ROWS, 2)
    np.testing.assert_allclose(joint, joint_distribution(TARGET_ROWS, 0, 3), atol=1e-6)
    np.testing.assert_allclose(accepted[0], TARGET_ROWS[0, 0], atol=1e-6)  # all but the mass of token 0


def one_hot_case(vocab=5, n=5, batch=64):
    """Greedy chains without logits that agree with the target at two nodes of three."""
    rng = np.random.default_rng(1)
    best = rng.integers(0, vocab, (batch, n))
    tokens = np.where(rng.uniform(size=(batch, n)) < 0.67, np.roll(best, 1, 1), rng.integers(0, vocab, (batch, n)))
    tree = operations.chain(jnp.asarray(tokens, jnp.int32), jnp.ones((batch, n), bool))
    return tree, jnp.log(jax.nn.one_hot(jnp.asarray(best), vocab))


def test_temperature_zero_is_greedy_verification():
    """Oracle of typical (2) and rollback (3), and the others at, or near, their lossless ends."""
    tree, logits = one_hot_case()
    keys = jax.random.split(jax.random.key(0), tree.tokens.shape)
    exact = (grouped_static(np.arange(5)), judge(*init_judge(2)), lantern(NEAREST, 0.0))
    close = (typical(), grouped(4), top_beta(), rapid(), rapid(sample=False), rapid(residual="paper"))
    rules = {str(i): rule for i, rule in enumerate((greedy, *exact, *close, rollback(), rollback(sample=True)))}
    run = jax.jit(lambda rules: {i: r(keys, tree, logits, jnp.zeros((64, 5, 2))) for i, r in rules.items()})
    ends = run(rules)
    for i, rule in rules.items():
        for got, wanted in zip(ends[i], ends["0"], strict=True):
            np.testing.assert_array_equal(got, wanted, rule.name)
    assert len(np.unique(ends["0"].num_nodes)) == 5


@pytest.mark.parametrize(
    "rule", ["judge", "lantern", "grouped", "grouped_static", "typical", "rollback", "top_beta", "rapid"]
)
def test_permuting_the_vocabulary_permutes_the_result(rule):
    u, tree, logits = random_chains(seed=3)
    permutation = np.random.default_rng(0).permutation(6)  # new id i is old id permutation[i]
    inverse = jnp.asarray(np.argsort(permutation))
    scores, embeddings = jax.random.normal(jax.random.key(1), (6,)), jax.random.normal(jax.random.key(2), (6, 2))
    core, params = {  # params of maps of ids, old to new, and of rows, new to old
        "judge": (lambda scores, *x: with_head(scores, 0.6)(*x), lambda new, old: scores[old]),
        "lantern": (lambda near, *x: lantern_core(*x, near, 0.3), lambda new, old: new[NEIGHBOURS6][old]),
        "grouped": (lambda e, *x: grouped_core(*x, 0.3, e, 2.0, size=4), lambda new, old: embeddings[old]),
        "grouped_static": (lambda c, *x: static_core(*x, c), lambda new, old: jnp.array([0, 0, 1, 1, 2, 2])[old]),
        "typical": (lambda _, *x: typical_core(*x, epsilon=0.2, delta=0.4), lambda new, old: None),
        "rollback": (lambda _, *x: rollback_core(*x, alpha=1.5), lambda new, old: None),
        "top_beta": (lambda _, *x: top_beta_core(*x, beta=3, tau=1.5), lambda new, old: None),
        "rapid": (lambda _, *x: rapid_core(*x, eta=3.0, residual="paper"), lambda new, old: None),
    }[rule]
    core, same = jax.jit(core), jnp.arange(6)
    plain = core(params(same, same), u, tree, logits)
    moved_tree = tree._replace(tokens=inverse[tree.tokens], logits=tree.logits[..., permutation])
    moved = core(params(inverse, jnp.asarray(permutation)), u, moved_tree, logits[..., permutation])
    np.testing.assert_array_equal(plain.path, moved.path)
    np.testing.assert_allclose(np.asarray(plain.residual)[:, permutation], moved.residual, atol=2e-6)
    assert (np.asarray(plain.path) != np.asarray(standard_core(u, tree, logits).path)).any()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: typical(-1), "typical: epsilon must be at least 0 and finite, not -1"),
        (lambda: typical(0.1, INF), "typical: delta must be at least 0 and finite, not inf"),
        (lambda: rollback(float("nan")), "rollback: alpha must be a number of nats"),
        (lambda: top_beta(0), "top_beta: beta must be at least 1"),
        (lambda: top_beta(tau=float("nan")), "top_beta: tau must be at least 0"),
        (lambda: rapid(INF), "rapid: eta must be at least 0"),
        (lambda: rapid(alpha=1.5), "rapid: alpha must be from 0 to 1"),
        (lambda: judge(jnp.zeros(2), threshold=1.5), "judge: threshold must be from 0 to 1"),
        (lambda: lantern(NEAREST, -0.1), "lantern: delta must be at least 0 and finite"),
        (lambda: lantern(NEAREST, float("nan"), relative=True), "lantern: delta must be at least 1"),
        (lambda: lantern(NEAREST, offset=-1), "lantern: offset must be at least 0"),
        (lambda: grouped(-2), "grouped: size must be at least 0"),
        (lambda: grouped(max_gap=float("nan")), "grouped: max_gap must be at least 0"),
        (lambda: grouped_static(jnp.array([0, 2])), "grouped_static: clusters must be one number from 0 to V - 1"),
    ],
)
def test_parameters_out_of_their_range(make, words):
    with pytest.raises(UsageError, match=words):
        make()


def test_the_table_knows_which_rules_are_greedy_at_temperature_zero():
    """A rule that the table lists as greedy gives the greedy text on one-hot rows, and one that it does not can give
    another."""
    tree, logits = one_hot_case(vocab=3)
    keys, hidden = jax.random.split(jax.random.key(0), tree.tokens.shape), jax.nn.one_hot(tree.tokens, 3)
    judged = jax.jit(lambda rule, *arguments: rule(*arguments))  # operation by operation it takes several times as long
    wanted = greedy(keys, tree, logits)
    endless = {"rollback inf": rollback(INF), "top_beta inf": top_beta(tau=INF)}
    for name, rule in {**TABLE, **endless}.items():
        end = judged(rule, keys, tree, logits, hidden)
        same = all((a == b).all() for a, b in zip(end, wanted, strict=True))
        assert same == rule.greedy_at_zero or name.startswith("lantern"), name  # a bound of 1 lends at 0 too


# ---------------------------------------------------------------------------------------------- in the loop


def test_the_decoding_loop_takes_rules_with_parameters():
    """The text at the lossless end is that of the exact rule with the same keys; a looser rule needs fewer passes."""
    drafter = branching_drafter((2, 1)).replace(params=jnp.asarray(DRAFT_ROWS))
    run = functools.partial(
        decode, markov(), drafter, [[0], [1]], key=jax.random.key(0), max_new_tokens=40, temperature=1.0
    )
    exact = run(verifier=recursive_rejection)
    width = len(TARGET_ROWS)  # of the toy's features
    strict, loose = judge(*init_judge(width)), judge(jnp.zeros(width), 9.0)  # the bias decides
    np.testing.assert_array_equal(run(verifier=strict).tokens, exact.tokens)
    assert (run(verifier=loose).stats.target_passes == 14).all()  # 3 tokens a pass
    with pytest.raises(UsageError, match="without_replacement"):
        run(verifier=grouped(2))
