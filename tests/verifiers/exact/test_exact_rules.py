"""Every exact rule against enumeration: joint distributions, golden values, mutants that must be caught."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import (
    block_distribution,
    draft,
    independent_paths,
    leaf_first_patterns,
    patterns,
    top_and_sampled,
    with_replacement,
    without_replacement,
)
from rules import module
from tiers import exhaustive
from toy import (
    DRAFT_ROWS,
    MARKOV,
    ONE_STEP,
    TARGET_ROWS,
    chi_square,
    joint_distribution,
    markov,
    sampled_triples,
    template,
)  # fmt: skip

from specjax import UsageError, controllers, trees, verifiers
from specjax.drafters import two_model
from specjax.trees import operations
from specjax.types import TokenTree
from specjax.verifiers.verifier import distribution

CORES = {
    name: module(name).core
    for name in ("standard", "block", "recursive_rejection", "specinfer", "spectr", "greedy_multi_draft", "traversal")
}
COMPILED = {name: jax.jit(core) for name, core in CORES.items()}  # not for mutants, which patch what `core` calls
multipath = lambda paths: functools.partial(module("multipath_block").core, paths=paths)


@functools.cache
def drafts(kind, *shape):
    """Every outcome of drawing from the toy, and its probability."""
    if kind in ("paths", "sets"):
        return independent_paths(DRAFT_ROWS, 0, *shape, sets=kind == "sets")
    return {"wor": without_replacement, "top": top_and_sampled}[kind](DRAFT_ROWS, 0, template(shape))


# golden row -> rule, how the draft is drawn, its shape (branching, or paths and depth), depth
GOLDEN = {
    "chain_sd_L2": ("standard", "wor", (1, 1), 2),
    "chain_sd_L3": ("standard", "wor", (1, 1, 1), 3),
    "block_verification_L2": ("block", "wor", (1, 1), 2),
    "block_verification_L3": ("block", "wor", (1, 1, 1), 3),
    "rsd_c_1_1": ("recursive_rejection", "wor", (1, 1), 2),
    "rsd_c_2_1": ("recursive_rejection", "wor", (2, 1), 2),
    "rsd_c_2_2": ("recursive_rejection", "wor", (2, 2), 2),
    "rsd_c_3_3": ("recursive_rejection", "wor", (3, 3), 2),
    "specinfer_rrs_iid_L2_K2": ("specinfer", "paths", (2, 2), 2),
    "spectr_kseq_iid_L2_K2": ("spectr", "paths", (2, 2), 2),
    "spectr_kseq_iid_L2_K3": ("spectr", "paths", (3, 2), 2),
    "gbv_L2_K1": (1, "paths", (1, 2), 2),
    "gbv_L2_K2": (2, "sets", (2, 2), 2),
    "gbv_L2_K3": (3, "sets", (3, 2), 2),
    "traversal_L2_K1": ("traversal", "wor", (1, 1), 2),
    "traversal_iid_L2_K2": ("traversal", "paths", (2, 2), 2),
    "traversal_wor_2_2": ("traversal", "wor", (2, 2), 2),
}


def distribution_of(core, kind, shape, depth, leaf_first=False):
    """(largest error of the joint distribution, distribution of the number accepted) of a rule on a kind of draft."""
    how = leaf_first_patterns if leaf_first else patterns
    joint, accepted = block_distribution(core, *drafts(kind, *shape), TARGET_ROWS, depth, how)
    return np.abs(joint - joint_distribution(TARGET_ROWS, 0, depth + 1)).max(), accepted


@pytest.mark.parametrize(
    "name",
    [exhaustive(n) if n.startswith("spectr_kseq_iid_L2_K3") else n for n in GOLDEN if n != "rsd_c_3_3"],
)
def test_joint_law_is_the_targets_and_matches_the_golden_table(name):
    rule, kind, shape, depth = GOLDEN[name]
    core = multipath(rule) if isinstance(rule, int) else CORES[rule]
    error, accepted = distribution_of(core, kind, shape, depth, rule == "traversal")
    golden = MARKOV[name]
    assert error < 1e-6
    expected = [golden["accepted_length_pmf"].get(str(i), 0.0) for i in range(len(accepted))]
    np.testing.assert_allclose(accepted, expected, atol=2e-6)
    tokens = (accepted * (1 + np.arange(len(accepted)))).sum()
    np.testing.assert_allclose(tokens, golden["expected_tokens_per_iteration"], atol=5e-6)


def test_greedy_multi_draft_accepts_everything_on_the_toy_and_is_exact_where_it_does_not():
    error, accepted = distribution_of(CORES["greedy_multi_draft"], "top", (2, 2), 2)
    assert error < 1e-6
    np.testing.assert_allclose(accepted, [0, 0, 1], atol=2e-6)  # the card: E = 3
    error, accepted = distribution_of(CORES["greedy_multi_draft"], "top", (1, 1), 2)
    assert error < 1e-6
    np.testing.assert_allclose(accepted, [0.2, 0.22, 0.58], atol=2e-6)  # n = 1: the standard rule


def top_two_and_their_top_two():
    """The likeliest two tokens and the likeliest two below each: equal logits to the lower id."""
    parents = np.array([-1, 0, 0, 1, 1, 2, 2], np.int32)
    tokens = np.zeros((1, 7), np.int32)
    for node in range(1, 7):
        tokens[0, node] = np.argsort(-DRAFT_ROWS[tokens[0, parents[node]]], kind="stable")[(node - 1) % 2]
    return draft(DRAFT_ROWS, tokens, parents), np.ones(1)


@pytest.mark.parametrize(
    ("name", "outcomes"),
    [("topk_onehot_2_2", top_two_and_their_top_two), ("nss_iid_L2_K2", lambda: drafts("paths", 2, 2))],
)
def test_sample_and_match_is_golden(name, outcomes):
    """The rule's randomness is one draw of the target per node: every combination of draws, each as one-hot rows.

    It follows the first of equal siblings; in the golden row of independent paths these are one node.
    """
    tree, weights = outcomes()
    tree, nodes = operations.merge_equal_siblings(tree), tree.tokens.shape[1]
    combinations = np.array(list(np.ndindex(*[3] * nodes)))
    logits = jnp.log(jax.nn.one_hot(jnp.asarray(combinations), 3))
    keys = jax.random.split(jax.random.key(0), (1, nodes))  # of no consequence
    rule = lambda tokens, parents, valid, logits: verifiers.sample_and_match(
        keys, TokenTree(tokens[None], parents[None], valid[None]), logits[None]
    ).num_nodes[0]
    end_tokens = jax.jit(jax.vmap(jax.vmap(rule, (None, None, None, 0)), (0, 0, 0, None)))(*tree[:3], logits)
    rows = TARGET_ROWS.astype(np.float64)
    chances = np.prod(rows[np.asarray(tree.tokens)[:, None], combinations[None]], -1) * weights[:, None]
    distribution = np.bincount(np.asarray(end_tokens).ravel() - 1, chances.ravel(), 3)
    golden = MARKOV[name]
    np.testing.assert_allclose(distribution, list(golden["accepted_length_pmf"].values()), atol=2e-6)
    np.testing.assert_allclose(distribution @ [1, 2, 3], golden["expected_tokens_per_iteration"], atol=5e-6)


def branching_with_replacement(children_of_duplicates):
    """Branching (2, 2), every pair of siblings drawn independently."""
    tree, weights = with_replacement(DRAFT_ROWS, 0, np.array([-1, 0, 0, 1, 1, 2, 2], np.int32))
    valid = np.ones(tree.tokens.shape, bool)
    valid[:, 5:] = children_of_duplicates | (tree.tokens[:, 1:2] != tree.tokens[:, 2:3])
    return tree._replace(valid=jnp.asarray(valid)), weights


def test_children_of_equal_siblings_are_tested_too():
    """The golden row drops the subtree of a duplicate; keeping it accepts more and stays exact."""
    efficiency = {}
    for keep in (False, True):
        joint, accepted = block_distribution(CORES["specinfer"], *branching_with_replacement(keep), TARGET_ROWS, 2)
        assert np.abs(joint - joint_distribution(TARGET_ROWS, 0, 3)).max() < 1e-6
        efficiency[keep] = (accepted * np.array([1, 2, 3])).sum()
    golden = MARKOV["rrs_with_replacement_2_2"]["expected_tokens_per_iteration"]
    np.testing.assert_allclose(efficiency[False], golden, atol=5e-6)
    assert efficiency[True] > golden + 0.01


TWINS = [  # parents of trees in which one of two equal siblings, or cousins, has children and the other has none
    (-1, 0, 0, 2),
    (-1, 0, 0, 0, 2, 3),
    (-1, 0, 1, 1, 3),
    (-1, 0, 0, 1, 2, 4),
]


@pytest.mark.parametrize("parents", TWINS)
@pytest.mark.parametrize("rule", ["specinfer", "spectr", "traversal"])
def test_equal_siblings_of_which_one_has_children(rule, parents):
    """The logits of the other are no distribution: they would be off by up to 0.035 in total variation."""
    tree, weights = with_replacement(DRAFT_ROWS, 0, np.array(parents, np.int32))
    depth = int(operations.depths(np.array([parents])).max())
    how = leaf_first_patterns if rule == "traversal" else patterns
    joint, _ = block_distribution(CORES[rule], tree, weights, TARGET_ROWS, depth, how)
    assert np.abs(joint - joint_distribution(TARGET_ROWS, 0, depth + 1)).max() < 1e-6


# ---------------------------------------------------------------------------------------------------- mutants


def skipped_residual(core):
    """After a rejection the next token is drawn from p, not from the residual."""

    def mutant(u, tree, logits):
        end = core(u, tree, logits)
        return end._replace(residual=distribution(logits, end.node))

    return mutant


def replaced_q(core):
    """Believes that the draft was drawn at temperature 2."""
    return lambda u, tree, logits: core(u, tree._replace(logits=tree.logits / 2), logits)


def sorted_siblings(core):
    """Tests siblings in order of q instead of draft order."""

    def mutant(u, tree, logits):
        above = jnp.take_along_axis(tree.logits, jnp.maximum(tree.parents, 0)[:, :, None], 1)
        q = jnp.take_along_axis(above, tree.tokens[:, :, None], 2)[:, :, 0]
        swap = (tree.parents[:, 1] == tree.parents[:, 2]) & (q[:, 2] > q[:, 1])
        order = jnp.where(swap[:, None], jnp.array([0, 2, 1, 5, 6, 3, 4]), jnp.arange(7))
        take = lambda x: jnp.take_along_axis(x, order.reshape(order.shape + (1,) * (x.ndim - 2)), 1)
        place = jnp.argsort(order, 1)
        parents = take(tree.parents)
        parents = jnp.where(parents < 0, -1, jnp.take_along_axis(place, jnp.maximum(parents, 0), 1))
        end = core(u, TokenTree(take(tree.tokens), parents, take(tree.valid), take(tree.logits)), take(logits))
        return end._replace(path=jnp.where(end.path >= 0, jnp.take_along_axis(order, jnp.maximum(end.path, 0), 1), -1))

    return mutant


def patched(where, name, value):
    """The rule with one function of its module replaced while it is traced."""

    def wrap(core):
        def mutant(u, tree, logits):
            original = getattr(where, name)
            setattr(where, name, value)
            try:
                return core(u, tree, logits)
            finally:
                setattr(where, name, original)

        return mutant

    return wrap


def stops_at_the_first_failed_test(core):
    def mutant(u, tree, logits):
        passed = jnp.stack(
            [core(u.at[:, i + 1 :].set(1.0), tree, logits).num_nodes > i for i in range(1, u.shape[1])], 1
        )
        run = jnp.cumprod(passed, 1, dtype=jnp.int32)
        return core(jnp.where(jnp.pad(run, ((0, 0), (1, 0)), constant_values=1) > 0, u, 1.0), tree, logits)

    return mutant


def first_child_of_the_largest_clamped_ratio(core):
    """The loose tie rule of multi-path selection."""
    where = module("multipath_block")
    return patched(where, "_order", lambda p, q, original=where._order: jnp.minimum(original(p, q), 0.0))(core)


def unskewed(order, q, rho, k):
    """Replace `_skew`: the chosen path is taken for any path."""
    return q, q


traversal_module, spectr_module = module("traversal"), module("spectr")
MUTANTS = [  # rule, mutant, draft, shape, least error of the joint distribution (about two thirds of what was seen)
    ("standard", skipped_residual, "wor", (1, 1), 0.03),
    ("standard", replaced_q, "wor", (1, 1), 0.006),
    ("block", skipped_residual, "wor", (1, 1), 0.03),
    ("block", replaced_q, "wor", (1, 1), 0.006),
    ("block", stops_at_the_first_failed_test, "wor", (1, 1), 0.006),
    ("recursive_rejection", skipped_residual, "wor", (2, 2), 0.02),
    ("recursive_rejection", replaced_q, "wor", (2, 2), 0.005),
    ("recursive_rejection", sorted_siblings, "wor", (2, 2), 0.035),  # the card: 0.054
    (
        "recursive_rejection",
        patched(module("descent"), "without", lambda d, token: d),
        "wor",
        (2, 2),
        0.002,
    ),
    ("specinfer", skipped_residual, "paths", (2, 2), 0.03),
    ("specinfer", replaced_q, "paths", (2, 2), 0.006),
    ("spectr", skipped_residual, "paths", (2, 2), 0.01),
    ("spectr", replaced_q, "paths", (2, 2), 0.003),
    ("spectr", patched(spectr_module, "division_factor", lambda p, q, k: jnp.ones(k.shape)), "paths", (2, 2), 0.01),
    ("greedy_multi_draft", replaced_q, "top", (2, 2), 0.001),
    ("greedy_multi_draft", patched(module("greedy_multi_draft"), "residual", lambda p, q: p), "top", (2, 2), 0.01),
    ("traversal", skipped_residual, "wor", (2, 2), 0.02),
    ("traversal", replaced_q, "wor", (2, 2), 0.003),
    ("traversal", patched(traversal_module, "without", lambda q, token: q), "wor", (2, 2), 0.002),
    (2, skipped_residual, "paths", (2, 2), 0.01),
    (2, replaced_q, "paths", (2, 2), 0.003),
    (2, patched(module("multipath_block"), "_skew", unskewed), "paths", (2, 2), 0.01),
]


@pytest.mark.parametrize(("rule", "mutant", "kind", "shape", "min_error"), MUTANTS)
def test_enumeration_catches_mutants(rule, mutant, kind, shape, min_error):
    core = mutant(multipath(rule) if isinstance(rule, int) else CORES[rule])
    error, _ = distribution_of(core, kind, shape, 2, rule == "traversal")
    assert error > min_error, error


def test_a_consistent_order_of_paths_is_exact_even_with_ties():
    """The card's trap: clamped keys tie. One strict order stays exact (E = 2.4943), the first drawn child would not."""
    core = first_child_of_the_largest_clamped_ratio(multipath(2))
    error, accepted = distribution_of(core, "paths", (2, 2), 2)
    assert error < 1e-6
    golden = MARKOV["gbv_L2_K2_clamped_consistent_order"]["expected_tokens_per_iteration"]
    np.testing.assert_allclose((accepted * np.array([1, 2, 3])).sum(), golden, atol=5e-6)


def test_dropping_weak_drawn_siblings_is_caught():
    """valid must not depend on the token drawn: dropping siblings with q < 0.25 biases the result (card: 0.039)."""
    tree, weights = drafts("wor", 2, 2)
    q = np.exp(np.asarray(tree.logits))
    tokens, parents = np.asarray(tree.tokens), np.asarray(tree.parents)
    keep = q[np.arange(len(tokens))[:, None], np.maximum(parents, 0), tokens] >= 0.25
    keep[:, 0] = True
    keep[:, 3:] &= np.take_along_axis(keep, parents[:, 3:], 1)
    joint, _ = block_distribution(
        CORES["recursive_rejection"], tree._replace(valid=jnp.asarray(keep)), weights, TARGET_ROWS, 2
    )
    assert np.abs(joint - joint_distribution(TARGET_ROWS, 0, 3)).max() > 0.02


# ---------------------------------------------------------------------------------------------------- one step

PAIRS = {
    "multi_draft": (ONE_STEP["p"], ONE_STEP["q"]),
    "multi_draft_hard": tuple(ONE_STEP["multi_draft_hard"][k] for k in "pq"),
}


def one_step(rule, p, q, n):
    """(distribution of the next token, acceptance) with n children of the root."""
    rows = np.tile(np.array(q, np.float32), (len(q), 1))
    if rule in ("specinfer", "spectr"):
        outcome = independent_paths(rows, 0, n, 1)
    else:
        outcome = {"top": top_and_sampled, "wor": without_replacement}["top" if "greedy" in rule else "wor"](
            rows, 0, template((n,))
        )
    target = np.tile(np.array(p, np.float32), (len(p), 1))
    joint, accepted = block_distribution(
        CORES[rule], *outcome, target, 1, leaf_first_patterns if rule == "traversal" else patterns
    )
    return joint.sum(1), accepted[1]


@pytest.mark.parametrize("case", PAIRS)
@pytest.mark.parametrize("n", [2, 3])
def test_one_step_acceptance_is_golden(case, n):
    p, q = PAIRS[case]
    golden = ONE_STEP[case][f"n={n}"]
    wanted = {
        "spectr": golden["kseq"]["accept"],
        "specinfer": golden["rrs_with"] if "rrs_with" in golden else golden["rrs_with_replacement"]["accept_test"],
        "recursive_rejection": golden["rrs_without"]
        if "rrs_without" in golden
        else golden["rrs_without_replacement"]["accept_test"],
        "greedy_multi_draft": golden["greedy_draft"]["alpha"],
    }
    wanted["traversal"] = wanted["recursive_rejection"]  # depth 1: the same distribution
    for rule, acceptance in wanted.items():
        next_distribution, accepted = one_step(rule, p, q, n)
        np.testing.assert_allclose(accepted, acceptance, atol=2e-6, err_msg=rule)
        np.testing.assert_allclose(next_distribution, p, atol=1e-6, err_msg=rule)


@pytest.mark.parametrize(
    ("case", "n"), [("multi_draft", 2), ("multi_draft", 3), ("multi_draft_hard", 2), ("multi_draft_hard", 3)]
)
def test_division_factor_is_golden(case, n):
    p, q = (jnp.asarray([row], jnp.float32) for row in PAIRS[case])
    golden = ONE_STEP[case][f"n={n}"]["kseq"]
    rho = spectr_module.division_factor(p, q, jnp.array([n]))
    np.testing.assert_allclose(rho, golden["rho"], atol=2e-6)
    final = spectr_module._final(p, q * rho[:, None], jnp.array([n]))
    np.testing.assert_allclose(final[0], golden["residual"], atol=5e-6)


@pytest.mark.parametrize("rule", [r for r in CORES if r != "traversal"])
def test_one_child_is_the_standard_rule(rule):
    """Both rules end alike with the same uniforms, on random distributions of a larger vocabulary."""
    key = jax.random.split(jax.random.key(3), 4)
    p, q = jax.random.normal(key[0], (2, 500, 2, 9)) * 2
    token = jax.random.categorical(key[1], q[:, 0])
    tree = operations.chain(jnp.stack([token * 0, token], 1), jnp.ones((500, 2), bool), q)
    u = jax.random.uniform(key[2], (500, 2))
    ours, wanted = COMPILED[rule](u, tree, p), COMPILED["standard"](u, tree, p)
    np.testing.assert_array_equal(ours.num_nodes, wanted.num_nodes)
    np.testing.assert_allclose(ours.residual, wanted.residual, atol=2e-5)


def expected_length(core, p, q, tree, leaf_first=False):
    probability, end = (leaf_first_patterns if leaf_first else patterns)(core, tree, p)
    return (probability * (np.asarray(end.num_nodes) - 1)).sum(1)


def test_block_accepts_at_least_as_much_as_token_by_token_on_random_pairs():
    """Block verification accepts at least as much in expectation over drafts: chains of 2 over 3 tokens, 1,000 random
    pairs of distributions."""
    rng = np.random.default_rng(0)
    for _ in range(4):
        rows = rng.dirichlet(np.ones(3), (2, 250, 4)).astype(np.float32)  # [p or q, pair, context, V]; context 3: start
        tokens = np.array([(0, a, b) for a in range(3) for b in range(3)], np.int32)
        context = np.stack([np.full(9, 3), tokens[:, 1], tokens[:, 2]], 1)
        p, q = (np.log(r[:, context]).reshape(-1, 3, 3) for r in rows)
        everything = np.tile(tokens, (250, 1))
        tree = operations.chain(jnp.asarray(everything), jnp.ones(everything.shape, bool), jnp.asarray(q))
        weight = (rows[1][:, 3, tokens[:, 1]] * rows[1][:, tokens[:, 1], tokens[:, 2]]).reshape(250, 9)
        mean = lambda core, p=p, q=q, tree=tree, weight=weight: (
            expected_length(core, jnp.asarray(p), q, tree).reshape(250, 9) * weight
        ).sum(1)
        gain = mean(CORES["block"]) - mean(CORES["standard"])
        assert gain.min() > -1e-5
        assert gain.mean() > 0.002


def test_children_that_cover_the_vocabulary_are_always_accepted():
    tree, _ = drafts("wor", 3, 3)
    u = jax.random.uniform(jax.random.key(0), tree.tokens.shape)
    end = CORES["recursive_rejection"](u, tree, jnp.log(jnp.asarray(TARGET_ROWS))[tree.tokens])
    assert int(end.num_nodes.min()) == 3


@pytest.mark.parametrize("rule", CORES)
def test_edges(rule):
    def one_token(p, q, token, u):
        with np.errstate(divide="ignore"):
            p, q = (np.log(np.array([[row, row]], np.float32)) for row in (p, q))
        tree = TokenTree(np.array([[0, token]]), np.array([[-1, 0]]), np.ones((1, 2), bool), q)
        return COMPILED[rule](np.array([[0.0, u]], np.float32), tree, p)

    same = one_token([0.5, 0.5], [0.5, 0.5], 0, 0.999999)  # q = p: always accepted
    assert int(same.num_nodes[0]) == 2
    apart = one_token([1.0, 0.0], [0.0, 1.0], 1, 0.0)  # p(x) = 0 is rejected even at u = 0
    assert int(apart.num_nodes[0]) == 1
    np.testing.assert_allclose(apart.residual[0], [1.0, 0.0])
    if rule != "greedy_multi_draft":  # there a child without mass is a fixed one
        bug = one_token([0.5, 0.5], [1.0, 0.0], 1, 0.0)  # q(x) = 0: rejected, never nan
        assert int(bug.num_nodes[0]) == 1
        assert np.isfinite(np.asarray(bug.residual)).all()


def test_worked_block_paths_are_golden():
    for name in ("bv_worked_path", "bv_worked_path_2"):
        tokens = np.array([[0, *MARKOV[name]["path"]]], np.int32)
        tree = draft(DRAFT_ROWS, tokens, np.arange(-1, 3, dtype=np.int32))
        logits = np.log(TARGET_ROWS)[tokens]
        for i, h in enumerate(MARKOV[name]["h_i"], 1):
            end_of = lambda u, i=i, tree=tree, logits=logits: int(
                COMPILED["block"](np.where(np.arange(4) == i, u, 1).astype(np.float32)[None], tree, logits).num_nodes[0]
            )
            assert (end_of(max(h - 1e-5, 0)) == 1 + i) == (h > 0)
            assert end_of(h + 1e-5) == 1


def test_skewed_laws_are_golden():
    golden = MARKOV["gbv_root_skew"]
    where, p, q = module("multipath_block"), TARGET_ROWS[:1], DRAFT_ROWS[:1]
    for k in (1, 2, 3):
        skewed, _ = where._skew(where._order(p, q), q, jnp.ones(1), jnp.array([k]))
        np.testing.assert_allclose(skewed[0], golden[f"K{k}"], atol=1e-6)


@pytest.mark.parametrize("rule", ["specinfer", "spectr", 2, "traversal"])
def test_the_order_of_independent_paths_does_not_matter(rule):
    """The distribution is invariant; for the multi-path rule even the result, given the uniforms of the chosen path."""
    core = multipath(rule) if isinstance(rule, int) else CORES[rule]
    tree, _ = drafts("paths", 2, 2)
    swap = jnp.array([0, 2, 1, 4, 3])
    swapped = tree._replace(tokens=tree.tokens[:, swap], logits=tree.logits[:, swap])
    p = jnp.log(jnp.asarray(TARGET_ROWS))[tree.tokens]
    if isinstance(rule, int):
        u = jnp.broadcast_to(
            jax.random.uniform(jax.random.key(0), (len(p), 3))[:, jnp.array([0, 1, 1, 2, 2])], (len(p), 5)
        )
        ours, theirs = core(u, tree, p), core(u, swapped, p[:, swap])
        np.testing.assert_array_equal(ours.num_nodes, theirs.num_nodes)
        np.testing.assert_allclose(ours.residual, theirs.residual, atol=1e-6)
        return
    how = leaf_first_patterns if rule == "traversal" else patterns
    length = lambda tree, p: (lambda x: (x[0] * x[1].num_nodes).sum(1))(how(core, tree, p))
    both = [length(tree, p), length(swapped, p[:, swap])]
    _, weights = drafts("paths", 2, 2)
    np.testing.assert_allclose((both[0] * weights).sum(), (both[1] * weights).sum(), atol=1e-5)


@pytest.mark.parametrize("rule", CORES)
def test_permuting_the_vocabulary_permutes_the_verdict(rule):
    rng = np.random.default_rng(0)
    p, q = rng.normal(size=(2, 1, 3, 8)).astype(np.float32)
    permutation = rng.permutation(8)
    inverse = np.argsort(permutation)
    tokens = np.array([[1, 5, 2]], np.int32)
    u = rng.uniform(size=(1, 3)).astype(np.float32)
    chain = lambda tokens, q: TokenTree(tokens, np.array([[-1, 0, 1]]), np.ones((1, 3), bool), q)
    plain = COMPILED[rule](u, chain(tokens, q), p)
    moved = COMPILED[rule](u, chain(inverse[tokens].astype(np.int32), q[..., permutation]), p[..., permutation])
    np.testing.assert_array_equal(plain.path, moved.path)
    np.testing.assert_allclose(np.asarray(plain.residual)[..., permutation], moved.residual, atol=1e-6)


EXACT = [n for n, v in verifiers.VERIFIERS.items() if v.guarantee == "distribution"]


@pytest.mark.parametrize("name", [n for n in EXACT if "point_mass" not in verifiers.VERIFIERS[n].draws])
def test_point_mass_trees_are_refused(name):
    tree = operations.chain(jnp.zeros((1, 3), jnp.int32), jnp.ones((1, 3), bool))
    with pytest.raises(UsageError, match=r"needs the draft's tree\.logits"):
        verifiers.VERIFIERS[name](jax.random.split(jax.random.key(0), 1), tree, jnp.zeros((1, 3, 4)))


@pytest.mark.parametrize("name", EXACT)
def test_a_full_vocabulary_needs_little_more_than_its_inputs(name):
    """N = 64, V = 152,064: what XLA allocates beyond the two inputs stays below 3 N V floats; chains far below."""
    verifier = verifiers.VERIFIERS[name]
    n, vocab = 64, 152_064
    shape = lambda *s, dtype=jnp.float32: jax.ShapeDtypeStruct(s, dtype)
    tree = TokenTree(
        shape(1, n, dtype=jnp.int32), shape(1, n, dtype=jnp.int32), shape(1, n, dtype=bool), shape(1, n, vocab)
    )
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 1))
    used = jax.jit(verifier).lower(keys, tree, shape(1, n, vocab)).compile().memory_analysis().temp_size_in_bytes
    floats = used / 4 / (n * vocab)
    print(name, floats)
    assert floats < (3 if name == "traversal" else 0.5), floats


def ends_where_unsure(tree):
    """Cut a tree as a stop rule does: nothing below token 1 whose row is the flattest, and the valid nodes in front."""
    above = jnp.take_along_axis(tree.tokens, jnp.maximum(tree.parents, 0), 1)
    goes_on = (above != 1) | (tree.parents <= 0)
    below = operations.ancestor_mask(tree.parents)
    return operations.compact(tree._replace(valid=tree.valid & jnp.all(~below | goes_on[:, None], -1)))


def at_most(count):
    """Every path cut at a depth, and the tree to `count` nodes, as a narrower pass has it."""

    def cut(tree):
        valid = tree.valid & (operations.depths(tree.parents) <= 1)
        return operations.cut(operations.compact(tree._replace(valid=valid)), count)

    return cut


@pytest.mark.parametrize(
    ("paths", "kind", "shape", "change"),
    [
        (None, "sets", (3, 2), lambda tree: tree),
        (2, "paths", (3, 2), lambda tree: tree),
        (None, "sets", (2, 3), ends_where_unsure),
        (3, "sets", (3, 2), ends_where_unsure),
        (2, "paths", (3, 2), ends_where_unsure),
        (3, "sets", (3, 2), at_most(4)),
        (2, "paths", (3, 2), at_most(5)),
        (1, "paths", (2, 2), ends_where_unsure),
    ],
)
def test_multipath_block_is_exact_for_paths_that_end_early_and_for_some_of_the_paths(paths, kind, shape, change):
    tree, weights = drafts(kind, *shape)
    tree = change(tree)
    joint, accepted = block_distribution(multipath(paths), tree, weights, TARGET_ROWS, shape[1])
    assert np.abs(joint - joint_distribution(TARGET_ROWS, 0, shape[1] + 1)).max() < 1e-6
    if tree.tokens.shape[1] > 5 and change is not ends_where_unsure:  # the golden rows of so many paths
        golden = MARKOV[f"gbv_L2_K{paths or 3}"]["accepted_length_pmf"]
        np.testing.assert_allclose(accepted, [golden.get(str(i), 0.0) for i in range(3)], atol=2e-6)


def test_paths_that_end_by_their_own_place_are_caught():
    """A mutant of the draft: whether the second path goes on is not decided by its text."""
    tree, weights = drafts("paths", 2, 2)
    tree = tree._replace(valid=tree.valid & (jnp.arange(5) != 4))
    joint, _ = block_distribution(multipath(None), tree, weights, TARGET_ROWS, 2)
    assert np.abs(joint - joint_distribution(TARGET_ROWS, 0, 3)).max() > 0.002


def test_other_trees_with_replacement_are_read_as_chains():
    joint, _ = block_distribution(multipath(None), *branching_with_replacement(True), TARGET_ROWS, 2)
    assert np.abs(joint - joint_distribution(TARGET_ROWS, 0, 3)).max() < 1e-6


def test_multipath_block_takes_at_least_one_path():
    with pytest.raises(UsageError, match="paths must be at least 1, not 0"):
        verifiers.multipath_block(0)


@pytest.mark.parametrize("paths", [None, exhaustive(3), exhaustive(2)])
@pytest.mark.parametrize(
    ("stop", "controller"),
    [(trees.stops.confidence(0.45), None), (None, controllers.fixed(2)), exhaustive(trees.stops.fallback(0.45), None)],
)
def test_multipath_block_in_passes_of_any_width(paths, stop, controller):
    """Three paths of three tokens, in a loop whose passes are as wide as the draft."""
    drafter = two_model(markov(DRAFT_ROWS), tree=trees.independent_paths(3, 3), stop=stop)
    counts = sampled_triples(drafter, TARGET_ROWS, verifier=verifiers.multipath_block(paths), controller=controller)
    assert chi_square(counts, joint_distribution(TARGET_ROWS, 0, 3)) > 1e-3
