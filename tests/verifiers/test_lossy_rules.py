"""The lossy rules: their lossless ends, the cards' golden values, and how far each takes the text from the target."""

import functools
import importlib
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import block_law, patterns, without_replacement
from toy import DATA, DRAFT_ROWS, TARGET_ROWS, branching_drafter, joint_law, markov, template

from specjax import decode
from specjax import tree as trees
from specjax.errors import UsageError
from specjax.sampling import draw
from specjax.types import TokenTree
from specjax.verifiers import VERIFIERS, greedy, recursive_rejection
from specjax.verifiers.bild import rollback
from specjax.verifiers.grouped import grouped, grouped_static, window
from specjax.verifiers.judge import init_judge, judge, judge_score
from specjax.verifiers.lantern import lantern
from specjax.verifiers.standard import rest_of_chain
from specjax.verifiers.typical import _log_threshold, typical
from specjax.verifiers.verifier import law

GOLDEN = json.loads((DATA / "verification_relaxed_rules.json").read_text())
P5, Q5 = np.array(GOLDEN["lantern"]["p"]), np.array(GOLDEN["lantern"]["q"])
NEAREST = np.array([GOLDEN["lantern"]["neighbours_nearest_first"][str(x)] for x in range(5)])
INF = float("inf")

module = lambda name: importlib.import_module(f"specjax.verifiers.{name}")  # the package names the objects


def jitted(name, core="core", static=()):
    return jax.jit(getattr(module(name), core), static_argnames=static)


standard_core, rsd_core = jitted("standard"), jitted("recursive_rejection")
typical_core, judge_core = jitted("typical"), jitted("judge")
rollback_core, fall_back = jitted("bild", static=("sample", "stop_below")), jitted("bild", "fall_back")
grouped_core, static_core = jitted("grouped", static=("size",)), jitted("grouped", "core_static")
lantern_jit, surrogate, longest_run = (
    jitted("lantern"),
    jitted("lantern", "surrogate"),
    jitted("typical", "longest_run"),
)


def lantern_core(u, tree, logits, neighbours, delta=0.0, share=0.0, offset=0):
    return lantern_jit(u, tree, logits, jnp.asarray(neighbours), delta, share, offset)


def with_head(scores, threshold):
    """The judge's core, with one score in log-odds per token id."""
    scores = jnp.asarray(scores, jnp.float32)
    return lambda u, tree, logits: judge_core(
        u, tree, logits, jax.nn.one_hot(tree.tokens, len(scores)), scores, jnp.zeros(()), jnp.asarray(threshold)
    )


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    """The programs are small: compiling them is all the time that these tests take."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


# ---------------------------------------------------------------------------------------------- laws


def one_step(core, p, q):
    """(acceptance of each drafted token, law of the emitted token) for one drafted token."""
    target, rows = (np.tile(np.array(x, np.float32), (len(p), 1)) for x in (p, q))
    drafts, weights = without_replacement(rows, 0, template((1,)))
    probability, _ = patterns(core, drafts, jnp.log(jnp.asarray(target))[drafts.tokens])
    joint, _ = block_law(core, drafts, weights, target, 1)
    return probability[:, 1], joint.sum(1)


def tv(law, target):
    return 0.5 * np.abs(law - target).sum()


def output_tv(core, values, branching=(1, 1)):
    """Per value of a rule's parameter: total variation between emitted and target's text, and tokens per pass.

    `core(value, u, tree, logits)` is compiled once, with the values as a batch axis.
    """
    drafts, weights = without_replacement(DRAFT_ROWS, 0, template(branching))
    values = jnp.asarray(values, jnp.float32)
    stacked = jax.tree.map(lambda x: jnp.tile(x, (len(values), *(1,) * (x.ndim - 1))), drafts)

    def batched(u, tree, logits):
        split = lambda x: x.reshape(len(values), -1, *x.shape[1:])
        end = jax.vmap(core)(values, *jax.tree.map(split, (u, tree, logits)))
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), end)

    probability, end = patterns(batched, stacked, jnp.log(jnp.asarray(TARGET_ROWS))[stacked.tokens])
    rows = []
    for i in range(len(values)):
        part = slice(i * len(weights), (i + 1) * len(weights))
        known = lambda *_, part=part: (probability[part], jax.tree.map(lambda x: x[part], end))
        joint, accepted = block_law(None, drafts, weights, TARGET_ROWS, len(branching), known)
        np.testing.assert_allclose(joint.sum(), 1, atol=1e-6)
        distance = tv(joint, joint_law(TARGET_ROWS, 0, len(branching) + 1))
        rows.append((distance, (accepted * (1 + np.arange(len(accepted)))).sum()))
    return np.array(rows).T


NEIGHBOURS3 = jnp.array([[1, 2], [0, 2], [1, 0]])
SCORES3 = jnp.array([-1.5, 0.3, 1.5])  # sigmoid: 0.18, 0.57, 0.82
typical_at = lambda epsilon, *x: typical_core(*x, epsilon=epsilon, delta=3.0)
judge_at = lambda threshold, *x: with_head(SCORES3, threshold)(*x)
lantern_at = lambda delta, *x: lantern_core(*x, NEIGHBOURS3, delta)
relative_at = lambda factor, *x: lantern_core(*x, NEIGHBOURS3, 0.0, factor - 1)
gap_at = lambda gap, *x: grouped_core(*x, gap, size=4)
keep_at = lambda alpha, *x: rollback_core(*x, alpha=alpha, sample=True)
keep_argmax_at = lambda alpha, *x: rollback_core(*x, alpha=alpha)

# rule: core, (value, distance of three tokens from the target's law, tokens per pass), the lossless value first.
# Exact chain, two drafted tokens: 0 and 2.38 tokens. The draft as it is, then a bonus token: 0.33 and 3.
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


@pytest.mark.parametrize("name", [name for name, v in VERIFIERS.items() if v.guarantee == "lossy"])
def test_the_table_tells_the_distance(name):
    """Of the rule as it stands in the table, by its own core."""
    defaults = {
        "typical": {"epsilon": 0.09, "delta": 0.3},
        "rollback": {"alpha": 5.0, "sample": False, "stop_below": 0.0},
    }
    core = functools.partial(module({"rollback": "bild"}.get(name, name)).core, **defaults[name])
    distance, _ = output_tv(lambda value, *args: core(*args), [0.0])
    np.testing.assert_allclose(distance[0], VERIFIERS[name].distance, atol=5e-4)


def test_distance_is_not_monotone_in_every_parameter():
    """A wider gap or cluster accepts no fewer tokens here; an argmax replacement never gives the law of p."""
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


def random_chains(seed=0, batch=512, n=5, vocab=6):
    rng = np.random.default_rng(seed)
    p, q = rng.normal(size=(2, batch, n, vocab)).astype(np.float32) * 1.5
    noise = rng.gumbel(size=(batch, n, vocab))
    tokens = np.concatenate([np.zeros((batch, 1)), (q + noise).argmax(-1)[:, :-1]], 1).astype(np.int32)
    valid = np.arange(n) <= rng.integers(0, n, (batch, 1))
    u = rng.uniform(size=(batch, n)).astype(np.float32)
    return jnp.asarray(u), trees.chain(jnp.asarray(tokens), jnp.asarray(valid), jnp.asarray(q)), jnp.asarray(p)


NEIGHBOURS6 = jnp.array([[j for j in np.argsort(np.abs(np.arange(6) - i), kind="stable") if j != i] for i in range(6)])


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
    ],
    ids=["judge", "lantern", "lantern_k0", "lantern_offset", "grouped", "grouped_gap", "grouped_static"],
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
    joint, accepted = block_law(core, fixed, [1.0], TARGET_ROWS, 2)
    np.testing.assert_allclose(joint, joint_law(TARGET_ROWS, 0, 3), atol=1e-6)
    np.testing.assert_allclose(accepted[0], TARGET_ROWS[0, 0], atol=1e-6)  # all but the mass of token 0


def one_hot_case(vocab=5, n=5, batch=64):
    """Greedy chains without logits that agree with the target at two nodes of three."""
    rng = np.random.default_rng(1)
    best = rng.integers(0, vocab, (batch, n))
    tokens = np.where(rng.uniform(size=(batch, n)) < 0.67, np.roll(best, 1, 1), rng.integers(0, vocab, (batch, n)))
    tree = trees.chain(jnp.asarray(tokens, jnp.int32), jnp.ones((batch, n), bool))
    return tree, jnp.log(jax.nn.one_hot(jnp.asarray(best), vocab))


def test_temperature_zero_is_greedy_verification():
    """Oracle of typical (2) and rollback (3), and the others at, or near, their lossless ends."""
    tree, logits = one_hot_case()
    keys = jax.random.split(jax.random.key(0), tree.tokens.shape)
    exact, close = (grouped_static(np.arange(5)), judge(*init_judge(2)), lantern(NEAREST, 0.0)), (typical(), grouped(4))
    rules = {str(i): rule for i, rule in enumerate((greedy, *exact, *close, rollback(), rollback(sample=True)))}
    run = jax.jit(lambda rules: {i: r(keys, tree, logits, jnp.zeros((64, 5, 2))) for i, r in rules.items()})
    ends = run(rules)
    for i, rule in rules.items():
        for got, wanted in zip(ends[i], ends["0"], strict=True):
            np.testing.assert_array_equal(got, wanted, rule.name)
    assert len(np.unique(ends["0"].num_nodes)) == 5


@pytest.mark.parametrize("rule", ["judge", "lantern", "grouped", "grouped_static", "typical", "rollback"])
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
    }[rule]
    core, same = jax.jit(core), jnp.arange(6)
    plain = core(params(same, same), u, tree, logits)
    moved_tree = tree._replace(tokens=inverse[tree.tokens], logits=tree.logits[..., permutation])
    moved = core(params(inverse, jnp.asarray(permutation)), u, moved_tree, logits[..., permutation])
    np.testing.assert_array_equal(plain.path, moved.path)
    np.testing.assert_allclose(np.asarray(plain.residual)[:, permutation], moved.residual, atol=2e-6)
    assert (np.asarray(plain.path) != np.asarray(standard_core(u, tree, logits).path)).any()


# ---------------------------------------------------------------------------------------------- typical


@jax.jit
def _typical_on_each_token(p, epsilon, delta):
    tokens = jnp.stack([jnp.zeros(8, jnp.int32), jnp.arange(8)], 1)
    logits = jnp.log(jnp.broadcast_to(p, (8, 2, 8)))
    tree = trees.chain(tokens, jnp.ones((8, 2), bool))
    end = typical_core(jnp.zeros((8, 2)), tree, logits, epsilon=epsilon, delta=delta)
    return end.num_nodes == 2, jnp.exp(_log_threshold(logits[0, 0], epsilon, delta))


def accepted_tokens(p, epsilon=0.09, delta=0.3):
    """Which tokens are accepted as the only draft below a node with the law p, and the threshold."""
    accepted, threshold = _typical_on_each_token(jnp.array([*p, *[0.0] * (8 - len(p))]), epsilon, delta)
    return np.flatnonzero(accepted).tolist(), float(threshold)


def test_typical_threshold_and_accepted_tokens_are_golden():
    flat = GOLDEN["medusa_typical_flat8"]
    flat |= {"p": [flat["p_token"]] * 8, "accepted_tokens": list(range(8)), "entropy_nats": np.log(8)}
    for case in (GOLDEN["medusa_typical"], GOLDEN["medusa_typical_peaked"], flat):
        accepted, threshold = accepted_tokens(case["p"])
        assert accepted == case["accepted_tokens"]
        np.testing.assert_allclose(threshold, case["threshold"], atol=1e-6)
        np.testing.assert_allclose(-np.log(accepted_tokens(case["p"], 1.0, 1.0)[1]), case["entropy_nats"], atol=1e-6)
    assert accepted_tokens([0.0, 1.0, 0.0]) == ([1], pytest.approx(0.09))  # greedy
    assert accepted_tokens([0.5, 0.5], 0.5, 9.0)[0] == []  # strict
    assert accepted_tokens([0.5, 0.5], 0.49, 9.0)[0] == [0, 1]


def test_typical_draws_the_next_token_from_p_with_the_key_of_the_last_node():
    u, tree, logits = random_chains()
    keys = jax.random.split(jax.random.key(5), tree.tokens.shape)
    verify = jax.jit(typical(0.2, 0.4))
    verdict = verify(keys, tree, logits)
    rows, last = np.arange(len(u)), np.asarray(verdict.num_nodes) - 1
    np.testing.assert_array_equal(verdict.next_token, jax.jit(draw)(keys[rows, last], logits[rows, last]))
    again = verify(jax.random.split(jax.random.key(6), tree.tokens.shape), tree, logits)
    np.testing.assert_array_equal(verdict.path, again.path)  # acceptance is deterministic
    assert (verdict.next_token != again.next_token).any()
    assert typical(0.2, 0.4) is typical(0.2, 0.4) and typical() is not typical(0.2, 0.4)


def test_longest_run_equals_plain_python():
    rng = np.random.default_rng(0)
    batch, n = 256, 9
    parents = np.array([[-1] + [rng.integers(0, i) for i in range(1, n)] for _ in range(batch)], np.int32)
    valid, passes = rng.uniform(size=(2, batch, n)) < 0.8
    valid[:, 0], passes[:, 0] = True, rng.uniform(size=batch) < 0.5  # the root's own entry is not read
    for b, i in np.ndindex(batch, n):
        valid[b, i] &= i == 0 or valid[b, parents[b, i]]
    log_p = -rng.integers(1, 4, (batch, n)).astype(np.float32)  # ties
    log_p[:, 0], log_p[rng.uniform(size=(batch, n)) < 0.1] = 0, -np.inf
    log_p[:, 0] = 0
    tree = TokenTree(jnp.zeros((batch, n), jnp.int32), jnp.asarray(parents), jnp.asarray(valid))
    path, num_nodes, last = jax.device_get(longest_run(tree, passes, log_p))
    for b in range(batch):
        runs = {0: ([0], 0.0)}
        for i in range(1, n):
            if parents[b, i] in runs and valid[b, i] and passes[b, i]:
                before, total = runs[parents[b, i]]
                runs[i] = ([*before, i], total + log_p[b, i])
        best = max(runs.values(), key=lambda run: (len(run[0]), run[1]))[0]  # the first of equals
        assert path[b].tolist() == best + [-1] * (n - len(best))
        assert int(num_nodes[b]) == len(best) and int(last[b]) == best[-1]


# ---------------------------------------------------------------------------------------------- judge


def test_judge_mask_is_golden():
    case = GOLDEN["judge"]
    n = len(case["standard_ok"]) + 1
    p, q = np.log([[0.5, 0.5], [0.4, 0.6]]).astype(np.float32)
    tree = trees.chain(jnp.ones((1, n), jnp.int32), jnp.ones((1, n), bool), jnp.tile(q, (1, n, 1)))
    u = jnp.where(jnp.array([1, *case["standard_ok"]]) == 1, 0.1, 0.95)[None]  # accepted below 0.5 / 0.6
    hidden = jnp.where(jnp.array([0, *case["judge_ok"]]) == 1, 2.0, -2.0)[None, :, None]
    core = jax.jit(lambda t: judge_core(u, tree, jnp.tile(p, (1, n, 1)), hidden, jnp.ones(1), jnp.zeros(()), t))
    counts = {}
    for name, threshold in (("accepted_standard", 1.0), ("accepted_combined", 0.5)):
        end = core(jnp.asarray(threshold))
        counts[name] = int(end.num_nodes[0]) - 1
        np.testing.assert_allclose(end.residual[0], [1.0, 0.0], atol=1e-6)  # norm([p - q]+)
    assert counts == {name: case[name] for name in counts}


def test_judge_accepts_more_the_lower_its_threshold_and_all_at_zero():
    u, tree, logits = random_chains()
    core = jax.jit(lambda threshold: with_head([-4.0, -2.0, 0.0, 1.0, 2.0, 4.0], threshold)(u, tree, logits))
    ends = [core(threshold) for threshold in (1.0, 0.95, 0.8, 0.55, 0.3, 0.05, 0.0)]
    lengths = [np.asarray(end.num_nodes) for end in ends]
    for low, high in itertools.pairwise(lengths):
        assert (high >= low).all() and (high > low).any()
    np.testing.assert_array_equal(lengths[0], standard_core(u, tree, logits).num_nodes)
    np.testing.assert_array_equal(lengths[-1], tree.valid.sum(1))
    bonus = law(logits, ends[-1].node)  # also after a short draft
    np.testing.assert_allclose(ends[-1].residual, bonus, atol=2e-6)


def test_judge_descends_into_the_first_judged_sibling():
    tree = TokenTree(jnp.array([[0, 1, 2, 0]]), jnp.array([[-1, 0, 0, 2]]), jnp.ones((1, 4), bool))
    logits = jnp.log(jnp.full((1, 4, 3), jnp.array([0.5, 0.3, 0.2])))
    u = jnp.full((1, 4), 0.99)
    core = jax.jit(lambda scores: with_head(scores, 0.5)(u, tree, logits))
    accept = lambda scores: core(jnp.array(scores)).path[0].tolist()
    assert accept([-1, -1, -1]) == [0, -1, -1, -1]
    assert accept([-1, -1, 1]) == [0, 2, -1, -1]
    assert accept([1, -1, 1]) == [0, 2, 3, -1]
    assert accept([1, 1, 1]) == [0, 1, -1, -1]  # shorter than with the head that doubts token 1
    left = core(jnp.array([-1, -1, 1])).residual[0]
    np.testing.assert_allclose(left, [0, 0.6, 0.4], atol=1e-6)  # p without the rejected token 0


def test_judge_reads_the_feature_of_the_node_itself():
    """After it has read x; the feature that predicted x would be that of the parent."""
    u, tree, logits = random_chains(batch=8)
    hidden = jnp.where(jnp.arange(5) == 1, 1.0, -1.0)[None, :, None] * jnp.ones((8, 1, 1))
    reject = jnp.full_like(logits, -jnp.inf).at[:, :, 0].set(0.0)
    never = tree._replace(tokens=jnp.ones_like(tree.tokens), valid=jnp.ones_like(tree.valid))
    end = judge_core(u, never, reject, hidden, jnp.ones(1), jnp.zeros(()), jnp.asarray(0.5))
    assert end.num_nodes.tolist() == [2] * 8


def test_a_new_head_compiles_nothing_and_an_untrained_one_accepts_nothing():
    _, tree, logits = random_chains(batch=8)
    keys = jax.random.split(jax.random.key(0), tree.tokens.shape)
    hidden = jax.random.normal(jax.random.key(1), (*tree.tokens.shape, 3), jnp.bfloat16)
    compiled = []

    @jax.jit
    def verify(rule):
        compiled.append(rule.name)
        return rule(keys, tree, logits, hidden)

    untrained = verify(judge(*init_judge(3)))
    jax.tree.map(np.testing.assert_array_equal, untrained, jax.jit(recursive_rejection)(keys, tree, logits))
    everything = verify(judge(jnp.ones(3), 100.0, 0.2))
    assert compiled == ["judge"]
    np.testing.assert_array_equal(everything.num_nodes, tree.valid.sum(1))
    with pytest.raises(ValueError, match="hidden"):
        judge(*init_judge(3))(keys, tree, logits)


def test_training_the_head_leaves_the_target_alone():
    inputs = jax.random.normal(jax.random.key(0), (4, 3))
    weight, bias = init_judge(2)

    def loss(target, weight, bias):
        return jnp.sum(jax.nn.softplus(judge_score(jnp.tanh(inputs @ target), weight + 1, bias)))

    to_target, to_weight, to_bias = jax.grad(loss, (0, 1, 2))(jnp.ones((3, 2)), weight, bias)
    assert (to_target == 0).all() and (to_weight != 0).all() and to_bias != 0


# ---------------------------------------------------------------------------------------------- LANTERN


@pytest.mark.parametrize(("k", "delta"), [(0, 0.0), (2, 0.25), (4, 0.45)])
def test_lantern_is_golden(k, delta):
    case = GOLDEN["lantern"][f"k={k},delta={delta}"]
    accept, output = one_step(lambda *x: lantern_core(*x, NEAREST[:, :k], delta), P5, Q5)
    np.testing.assert_allclose(accept, case["accept_prob_per_token"], atol=2e-6)
    np.testing.assert_allclose(accept @ Q5, case["acceptance"], atol=2e-6)
    np.testing.assert_allclose(output, case["output"], atol=2e-6)
    np.testing.assert_allclose(tv(output, P5), case["tv_to_target"], atol=2e-6)
    p = jnp.tile(jnp.asarray(P5, jnp.float32), (5, 1))
    lent = surrogate(p, jnp.arange(5), jnp.asarray(NEAREST[:, :k]), delta, 0.0, 0)
    for x, used in enumerate(case["neighbourhood_used"]):
        assert np.flatnonzero(lent[x] == 0).tolist() == sorted(used)
        np.testing.assert_allclose(lent[x, x], P5[x] + P5[used].sum(), atol=1e-6)
        assert tv(np.asarray(lent[x]), P5) <= delta + 1e-6


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0, 2.0, 4.0])
def test_lantern_relative_bound_equals_plain_python(share):
    """LANTERN++: the neighbours may add at most (lambda - 1) p(x)."""
    lent = surrogate(jnp.tile(jnp.asarray(P5, jnp.float32), (5, 1)), jnp.arange(5), jnp.asarray(NEAREST), 0.0, share, 0)
    expected = np.tile(P5, (5, 1))
    for x in range(5):
        total = 0.0
        for y in NEAREST[x]:
            total += P5[y]
            if total > share * P5[x]:
                break
            expected[x, x], expected[x, y] = expected[x, x] + P5[y], 0.0
    np.testing.assert_allclose(lent, expected, atol=1e-6)


def test_lantern_relative_arguments():
    assert [float(x) for x in lantern(NEAREST, 3.0, relative=True).params[1:3]] == [0.0, 2.0]
    assert float(lantern(NEAREST, 0.25).params[1]) == 0.25
    with pytest.raises(ValueError, match="at least 1"):
        lantern(NEAREST, 0.1, relative=True)


def test_lantern_accepts_more_the_larger_delta_and_all_at_one():
    u, tree, logits = random_chains()
    core = jax.jit(lambda delta: lantern_core(u, tree, logits, NEIGHBOURS6, delta).num_nodes)
    lengths = [np.asarray(core(delta)) for delta in (0.0, 0.05, 0.15, 0.3, 0.5, 0.8, 1.0)]
    for low, high in itertools.pairwise(lengths):
        assert (high >= low).all() and (high > low).any()
    np.testing.assert_array_equal(lengths[-1], tree.valid.sum(1))


def test_lantern_point_masses_take_out_the_token_and_what_it_borrowed():
    """The one-hot setting of EAGLE-2: token 0 (p .3) borrows from 1 (.22); rejected, both are gone."""
    tree = TokenTree(jnp.array([[2, 0, 1, 3]]), jnp.array([[-1, 0, 0, 0]]), jnp.ones((1, 4), bool))
    logits = jnp.log(jnp.asarray(P5, jnp.float32))[None, None].repeat(4, 1)
    core = jax.jit(lambda u: lantern_core(u, tree, logits, NEAREST, 0.25))
    run = lambda *u: core(jnp.array([[0.0, *u]]))
    assert run(0.5, 1.0, 1.0).path[0, :2].tolist() == [0, 1]  # 0.5 < 0.3 + 0.22
    rest = np.array([0, 0, 0.2, 0.16, 0.12]) / 0.48
    end = run(0.53, 0.0, 0.99)  # token 1 has nothing left: rejected at u = 0. Then 3 borrows from 4: no more than 0.25
    assert end.num_nodes[0] == 1
    np.testing.assert_allclose(end.residual[0], np.array([0, 0, rest[2], 0, rest[4]]) / (rest[2] + rest[4]), atol=1e-6)
    assert run(0.53, 0.0, 0.3).path[0, :2].tolist() == [0, 3]  # 0.3 < 0.16 / 0.48


def test_lantern_offset_shifts_the_table():
    p = jnp.tile(jnp.array([0.1, 0.1, *(P5 * 0.8)], jnp.float32), (7, 1))
    lent = surrogate(p, jnp.arange(7), jnp.asarray(NEAREST[:, :2]), 0.25, 0.0, 2)
    within = surrogate(p[:5, 2:], jnp.arange(5), jnp.asarray(NEAREST[:, :2]), 0.25, 0.0, 0)
    np.testing.assert_array_equal(lent[:2], p[:2])  # tokens without a row borrow nothing
    np.testing.assert_array_equal(lent[2:, 2:], within)
    np.testing.assert_array_equal(lent[2:, :2], p[2:, :2])
    assert (within != p[:5, 2:]).any()


# ---------------------------------------------------------------------------------------------- GSD


@pytest.mark.parametrize("size", [0, 2, 4])
def test_grouped_is_golden(size):
    case = GOLDEN["gsd_dynamic"][f"G={size}"]
    accept, output = one_step(functools.partial(grouped_core, max_gap=INF, size=size), P5, Q5)
    np.testing.assert_allclose(accept, case["accept_prob"], atol=2e-6)
    np.testing.assert_allclose(accept @ Q5, case["acceptance"], atol=2e-6)
    np.testing.assert_allclose(output, case["output"], atol=2e-6)
    np.testing.assert_allclose(tv(output, P5), case["tv_to_target"], atol=2e-6)
    ids, member = window(jnp.log(jnp.asarray(P5, jnp.float32))[None, None].repeat(5, 1), jnp.arange(5)[None], size)
    clusters = [np.sort(np.asarray(i)[np.asarray(m)]).tolist() for i, m in zip(ids[0], member[0], strict=True)]
    assert clusters == case["clusters"]


def test_grouped_clusters_equal_plain_python():
    """With a gap and embedding distances, and tokens without mass."""
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(8), 2)
    p[3] = 0
    p /= p.sum()
    embeddings = rng.normal(size=(8, 2))
    core = functools.partial(grouped_core, max_gap=0.12, embeddings=jnp.asarray(embeddings), max_distance=4.0, size=6)
    with np.errstate(divide="ignore"):
        accept, _ = one_step(core, p, q)
    order = np.argsort(-p, kind="stable").tolist()
    expected, plain = np.zeros(8), np.minimum(1, p / q)
    for x in range(8):
        i = order.index(x)
        cluster = [
            y
            for y in order[max(0, i - 3) : i + 4]
            if y == x
            or (p[y] > 0 < p[x] and abs(p[y] - p[x]) <= 0.12 and ((embeddings[y] - embeddings[x]) ** 2).sum() <= 4.0)
        ]
        expected[x] = min(1, p[cluster].sum() / q[cluster].sum())
    np.testing.assert_allclose(accept, expected, atol=2e-6)
    assert accept[3] == 0 and np.abs(expected - plain).max() > 0.05


def test_one_cluster_accepts_everything():
    u, tree, logits = random_chains()
    for core in (functools.partial(grouped_core, max_gap=INF, size=12),
                 functools.partial(static_core, clusters=jnp.full(6, 5))):  # fmt: skip
        end = core(u, tree, logits)
        np.testing.assert_array_equal(end.num_nodes, tree.valid.sum(1))
        np.testing.assert_allclose(end.residual, law(logits, end.node), atol=2e-6)


def test_fixed_clusters_keep_the_law_of_the_clusters():
    case = GOLDEN["gsd_static_partition"]
    clusters = jnp.array([3, 3, 1, 1, 1])
    core = functools.partial(static_core, clusters=clusters)

    def with_token_residual(u, tree, logits):
        """The residual of the dynamic rule, which does not keep it."""
        end = core(u, tree, logits)
        return end._replace(residual=rest_of_chain(tree, end.node, law(logits, end.node)))

    for rule, golden in ((core, case["cluster_residual"]), (with_token_residual, case["token_residual"])):
        accept, output = one_step(rule, P5, Q5)
        np.testing.assert_allclose(accept @ Q5, golden["acceptance"], atol=2e-6)
        np.testing.assert_allclose(output, golden["output"], atol=2e-6)
        mass = [output[c].sum() for c in case["clusters"]]
        np.testing.assert_allclose(mass, golden["cluster_mass_of_output"], atol=2e-6)
    accept, _ = one_step(functools.partial(static_core, clusters=jnp.arange(5)), P5, Q5)
    np.testing.assert_allclose(accept @ Q5, case["sd_acceptance"], atol=2e-6)


def test_fixed_clusters_accept_no_less_than_the_standard_rule_on_average():
    """1 - TV of the clusters >= 1 - TV of the tokens; a single token can be accepted less."""
    p, q = np.random.default_rng(0).dirichlet(np.ones(6), 2)
    clusters = np.array([2, 0, 1, 2, 1, 0])
    accept, _ = one_step(functools.partial(static_core, clusters=jnp.asarray(clusters)), p, q)
    mass = lambda x: np.bincount(clusters, x, 3)
    np.testing.assert_allclose(accept @ q, 1 - tv(mass(p), mass(q)), atol=2e-6)
    assert accept @ q > 1 - tv(p, q) + 1e-3
    assert (accept < np.minimum(1, p / q) - 1e-3).any()


# ---------------------------------------------------------------------------------------------- BiLD


def bild_case():
    """The golden trace: law rows of the small model with the given maxima, and the large model's losses."""
    case = GOLDEN["bild"]
    row = lambda top: np.log([top, *[(1 - top) / 2] * 2])
    tokens = jnp.zeros((1, 4), jnp.int32)
    small = jnp.asarray(np.stack([row(x) for x in (*case["small_argmax_prob"], 0.9)]), jnp.float32)[None]
    large = jnp.asarray(np.stack([row(np.exp(-x)) for x in (*case["nll_large_of_small_tokens"], 0.2, 0.2)]))[None]
    return case, trees.chain(tokens, jnp.ones((1, 4), bool), small), large.at[:, 1, 2].add(1e-3)


def test_bild_trace_is_golden():
    case, tree, large = bild_case()
    kept = fall_back(tree, case["alpha_fb"])
    assert int(kept.valid.sum()) - 1 == case["fallback_before_token"]
    end = rollback_core(jnp.zeros((1, 4)), kept, large, alpha=case["alpha_rb"])
    assert int(end.num_nodes[0]) - 1 == case["rollback_index"] == case["kept_small_tokens"]
    np.testing.assert_array_equal(end.residual[0], [0, 0, 1])  # the large argmax
    sampled = rollback_core(jnp.zeros((1, 4)), kept, large, alpha=case["alpha_rb"], sample=True)
    np.testing.assert_allclose(sampled.residual[0], np.exp(large[0, 1]) / np.exp(large[0, 1]).sum(), atol=1e-6)
    late = rollback_core(jnp.zeros((1, 4)), tree, large, alpha=7.0, stop_below=case["alpha_fb"])
    assert int(late.num_nodes[0]) == 3 and int(jnp.argmax(late.residual)) == 0  # cut by fallback, then one appended
    assert int(rollback_core(jnp.zeros((1, 4)), tree, large, alpha=7.0).num_nodes[0]) == 4


def test_fallback_ends():
    _, tree, _ = bild_case()
    np.testing.assert_array_equal(fall_back(tree, 0.0).valid, tree.valid)
    assert fall_back(tree, 1.01).valid.tolist() == [[True, False, False, False]]  # every token from the large model
    sure, unsure = [0.8, 0.2], [0.5, 0.5]
    laws = jnp.array([[sure, unsure, sure, sure, unsure, sure]])
    branched = TokenTree(
        jnp.zeros((1, 6), jnp.int32), jnp.array([[-1, 0, 0, 1, 2, 3]]), jnp.ones((1, 6), bool), jnp.log(laws)
    )
    assert fall_back(branched, 0.6).valid.tolist() == [[True, True, True, False, True, False]]


def test_fallback_keeps_an_exact_rule_exact():
    """It reads the law, never the token drawn."""
    rows = np.array([[0.7, 0.1, 0.2], [0.4, 0.4, 0.2], [0.2, 0.6, 0.2]], np.float32)
    drafts, weights = without_replacement(rows, 0, template((1, 1)))
    drafts = fall_back(drafts, 0.5)  # drafts nothing below token 1
    np.testing.assert_array_equal(drafts.valid[:, 2], drafts.tokens[:, 1] != 1)
    joint, accepted = block_law(standard_core, drafts, weights, TARGET_ROWS, 2)
    np.testing.assert_allclose(joint, joint_law(TARGET_ROWS, 0, 3), atol=1e-6)
    assert accepted[2] > 0.1


@pytest.mark.parametrize("branching", [(1, 1, 1), (2, 2)])
def test_rollback_below_ln2_is_greedy_for_any_draft(branching):
    rows = np.array([[0.51, 0.45, 0.04], [0.1, 0.3, 0.6], [0.05, 0.9, 0.05]], np.float32)
    drafts, _ = without_replacement(DRAFT_ROWS, 0, template(branching))
    logits = np.log(rows)[np.asarray(drafts.tokens)]
    end = jax.device_get(rollback_core(jnp.zeros(drafts.tokens.shape), drafts, logits, alpha=0.69))
    text = np.take_along_axis(np.asarray(drafts.tokens), np.maximum(end.path, 0), 1)
    for row, count, following in zip(text, end.num_nodes, end.residual.argmax(-1), strict=True):
        emitted = [*row[: int(count)].tolist(), int(following)]
        assert all(rows[a].argmax() == b for a, b in itertools.pairwise(emitted))
    depth = np.bincount(end.num_nodes, minlength=len(branching) + 2)
    assert (depth[1:] > 0).all()


def test_rollback_of_a_model_that_agrees_never_happens():
    u, tree, logits = random_chains()
    agreeing = jnp.concatenate([tree.tokens[:, :1], jnp.argmax(logits, -1)[:, :-1].astype(jnp.int32)], 1)
    same = trees.chain(agreeing, jnp.ones_like(tree.valid))
    worst = -float(jnp.log(law(logits).max(-1)).min())
    assert (rollback_core(u, same, logits, alpha=worst + 1e-5).num_nodes == 5).all()
    assert (rollback_core(u, same, logits, alpha=worst / 2).num_nodes < 5).any()
    zero = logits.at[:, 1].set(jnp.where(jnp.arange(6) == tree.tokens[:, 2, None], -jnp.inf, logits[:, 1]))
    end = rollback_core(u, tree, zero, alpha=INF)  # also what the target could never draw
    np.testing.assert_array_equal(end.num_nodes, tree.valid.sum(1))


# ---------------------------------------------------------------------------------------------- in the loop


def test_the_decoding_loop_takes_rules_with_parameters():
    """The text at the lossless end is that of the exact rule with the same keys; a looser rule needs fewer passes."""
    drafter = branching_drafter((2, 1)).replace(params=jnp.asarray(DRAFT_ROWS))
    run = functools.partial(
        decode, markov(), drafter, [[0], [1]], key=jax.random.key(0), max_new_tokens=40, temperature=1.0
    )
    exact = run(verifier=recursive_rejection)
    strict, loose = judge(*init_judge(1)), judge(jnp.zeros(1), 9.0)  # the toy's features are 0: the bias decides
    np.testing.assert_array_equal(run(verifier=strict).tokens, exact.tokens)
    assert (run(verifier=loose).stats.target_passes == 14).all()  # 3 tokens a pass
    with pytest.raises(UsageError, match="without_replacement"):
        run(verifier=grouped(2))
