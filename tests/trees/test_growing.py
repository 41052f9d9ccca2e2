"""Every builder with the two-model drafter: exact text and distribution, the drafter's cache, the golden trees."""

import dataclasses
import functools
import importlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import block_distribution
from rules import module
from scipy.stats import chisquare
from tiers import exhaustive, those
from toy import (
    DATA,
    DRAFT_ROWS,
    MARKOV,
    TARGET_ROWS,
    chi_square,
    joint_distribution,
    markov,
    sampled_triples,
    tiny_llama,
)

from specjax import UsageError, decode, trees, verifiers
from specjax.arrays import platforms
from specjax.drafters import two_model
from specjax.engine.prepare import Settings
from specjax.trees import growing
from specjax.types import Context, DraftOutput, Sampling

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


# One builder of each way to grow: the others differ in what they propose, which the distributions below tell apart.
@pytest.mark.parametrize("name", those(("top_and_sampled", "rsd_s", "eagle2"), BUILDERS))
def test_greedy_text_is_that_of_plain_decoding(name):
    assert run(name).to_lists() == plain()


@pytest.mark.parametrize("name", those(("dyspec",), BUILDERS))
def test_coupled_text_is_that_of_plain_sampling(name):
    assert run(name, 0.9, "coupled").to_lists() == plain(0.9)


@pytest.mark.parametrize("name", those(("rsd_s",), BUILDERS))
def test_a_drafter_that_is_the_target_is_always_right(name):
    """The draft cache holds what a fresh prefill would: with one wrong slot drafts go astray."""
    tree = BUILDERS[name]
    drafter = two_model(tiny_llama(), tree=tree)
    result = decode(tiny_llama(), drafter, PROMPTS, key=jax.random.key(0), max_new_tokens=21)
    depth = tree.max_depth if name not in ("dyspec", "dyspec_fixed", "eagle2", "sequoia") else 2
    assert int(result.stats.target_passes.max()) <= -(-21 // (depth + 1)) + (depth < tree.max_depth)
    assert result.to_lists() == plain(new=21)


@pytest.mark.parametrize("name", those(("paths", "top_and_sampled", "sequoia", "rsd_s", "dyspec"), BUILDERS))
def test_sampled_text_has_the_law_of_the_target(name):
    drafter = two_model(markov(DRAFT_ROWS), tree=BUILDERS[name])
    assert chi_square(sampled_triples(drafter, TARGET_ROWS), joint_distribution(TARGET_ROWS, 0, 3)) > 1e-3


UNEVEN = trees.static(((0,), (1,), (1, 0)), "with_replacement")


@pytest.mark.parametrize("rule", [None, exhaustive(verifiers.spectr), exhaustive(verifiers.traversal)])
def test_the_children_of_one_of_two_equal_siblings_come_from_its_own_logits(rule):
    """The logits of the other sibling are zeroed: with them the text would be off by 0.02 in total variation."""
    counts = sampled_triples(two_model(markov(DRAFT_ROWS), tree=UNEVEN), TARGET_ROWS, verifier=rule)
    assert chi_square(counts, joint_distribution(TARGET_ROWS, 0, 3)) > 1e-3


@pytest.mark.parametrize(
    ("paths", "even"),
    [
        (((0,), (1,), (0, 0), (1, 0)), True),
        (((0,), (1,), (0, 0), (1, 0), (1, 1)), True),  # the rule of paths reads first children only
        (((0,), (1,), (0, 0), (1, 0), (0, 1), (1, 0, 0)), False),
        (((0,), (1,), (0, 0)), False),
    ],
)
def test_paths_that_the_shape_ends_apart_are_not_verified_as_one_block(paths, even):
    drafter = two_model(markov(DRAFT_ROWS), tree=trees.static(paths, "with_replacement"))
    verifier = Settings(temperature=1.0, verifier=verifiers.multipath_block()).select_verifier
    if even:
        assert verifier(drafter).name == "multipath_block"
    else:
        with pytest.raises(UsageError, match=r"not valid for drafts drawn with_replacement_uneven.* specinfer"):
            verifier(drafter)


MIXED = {**BUILDERS, "chain_with_siblings": trees.chain_with_siblings(3)}


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("name", those(("sequoia", "rsd_s", "chain_with_siblings"), MIXED))
def test_rows_of_temperature_0_draft_as_in_greedy_decoding(name, coupled):
    """Greedy rows draft the same in `serve`, where it is data which rows are sampled; and those draft what they draft
    without the others."""
    logits, root = jnp.asarray(np.random.default_rng(0).normal(size=(20, 20)), jnp.float32), jnp.array([3, 4])
    keys = jax.random.split(jax.random.key(0), 2)
    feed = lambda memory, frontier: (memory, logits[frontier.tokens])

    def tree(sampling):
        context = Context(root[:, None], jnp.ones_like(root), sampling, keys if coupled else None)
        run = lambda: trees.grow(MIXED[name], feed, (), root, logits[root], keys, context, root + 9)[0].tree
        return jax.device_get(jax.jit(run)()._replace(logits=None))

    greedy, mixed, sampled = (tree(Sampling(t)) for t in (None, jnp.array([0.0, 0.8]), jnp.array([0.8, 0.8])))
    for row, alone in enumerate((greedy, sampled)):
        valid = alone.valid[row]
        np.testing.assert_array_equal(mixed.valid[row], valid)
        np.testing.assert_array_equal(mixed.tokens[row, valid], alone.tokens[row, valid])
        np.testing.assert_array_equal(mixed.parents[row], alone.parents[row])


def kept_by_eagle2(distributions, total):
    """The `total` tokens that EAGLE-2 keeps below token 0 of a Markov chain, in order; two per node, two levels."""
    rows = np.full((7, 7), 1e-9, np.float32)
    for token, distribution in distributions.items():
        rows[token, list(distribution)] = list(distribution.values())
    logits, root = jnp.log(jnp.asarray(rows)), jnp.zeros((1,), jnp.int32)
    context, keys = Context(root[:, None], root + 1, Sampling()), jax.random.split(jax.random.key(0), 1)
    feed = lambda memory, frontier: (memory, logits[frontier.tokens])
    builder = trees.eagle2(top_k=2, depth=2, total=total)
    run = lambda: trees.grow(builder, feed, (), root, logits[root], keys, context, root + 2)[0].tree
    tree = jax.jit(run)()
    return tree.tokens[0, 1:][tree.valid[0, 1:]].tolist()


A, B, C, D, E, F = range(1, 7)


@pytest.mark.parametrize(
    ("total", "nodes"),
    [(2, [A, B]), (3, [A, B, C]), (4, [A, B, C, E]), (6, [A, B, C, D, E, F])],
    ids=["2-kept0", "3-kept1", "4-kept2", "6-kept3"],
)
def test_the_toy_of_eagle2(total, nodes):
    """The card: of a .6, b .3 and their children c .30, d .24, e .27, f .015 the three best are a, b and c."""
    distributions = {0: {A: 0.6, B: 0.3, 0: 0.1}, A: {C: 0.5, D: 0.4, 0: 0.1}, B: {E: 0.9, F: 0.05, 0: 0.03, A: 0.02}}
    assert kept_by_eagle2(distributions, total) == nodes


def test_of_equal_nodes_eagle2_keeps_the_earlier():
    """b and c, of exactly a quarter each."""
    distributions = {0: {A: 0.5, B: 0.25, E: 0.125, F: 0.125}, A: {C: 0.5, D: 0.25, 0: 0.25}, B: {E: 0.5, F: 0.5}}
    assert kept_by_eagle2(distributions, 2) == [A, B]


# ---------------------------------------------------------------------------------------------------- golden trees
# What a builder draws on the toy is sampled until every tree it can draw was seen; the distribution of the trees is
# known, so what recursive rejection accepts of them is enumerated.

recursive_rejection = module("recursive_rejection").core
SMALL = {**{f"dyspec_m{m}": trees.dyspec_fixed(m) for m in (2, 3, 4)}, "rsd_s_L2_W2": trees.beam(2, 2)}  # golden row


def grown(builder, count):
    """`count` trees that a builder draws on the toy below token 0."""
    logits, root = jnp.log(jnp.asarray(DRAFT_ROWS)), jnp.zeros((count,), jnp.int32)
    context = Context(root[:, None], root + 1, Sampling(jnp.asarray(1.0)))
    keys = jax.random.split(jax.random.key(1), count)
    feed = lambda memory, frontier: (memory, logits[frontier.tokens])
    run = lambda: trees.grow(builder, feed, (), root, logits[root], keys, context, root + builder.max_depth)[0].tree
    return jax.jit(run)()


def distinct(tree):
    """The different trees of a batch, and how often each occurs."""
    of_valid = [np.where(tree.valid, x, -1) for x in (tree.tokens, tree.parents)]
    _, first, counts = np.unique(np.concatenate(of_valid, 1), axis=0, return_index=True, return_counts=True)
    return jax.tree.map(lambda x: x[first], tree), counts


def chances(tree):
    """Return each tree's chance if every sibling comes from q without those before it, as DySpec decides before it
    draws.

    float64[B], and the sum over the nodes of q down to them, which is what DySpec believes to be accepted.
    """
    tokens, parents, valid = map(np.asarray, tree[:3])
    rows, chance = np.arange(len(tokens)), np.ones(len(tokens))
    left, reach = np.ones(tokens.shape), np.ones(tokens.shape)
    for i in range(1, tokens.shape[1]):
        above = parents[:, i]
        q = np.where(valid[:, i], DRAFT_ROWS.astype(np.float64)[tokens[rows, above], tokens[:, i]], 0.0)
        chance *= np.where(valid[:, i], q / left[rows, above], 1.0)
        left[rows, above] -= q
        reach[:, i] = reach[rows, above] * q
    return chance, reach[:, 1:].sum(1)


def beam_chances(tree):
    """Return the chance of each tree of stochastic beam search with two beams of two tokens, by exponential clocks.

    The best beam a keeps its best child first. Let r = q(a) (1 - q(a1 | a)). The second place goes to the second child
    of a with chance r / (r + 1 - q(a)), else to the best child of beam b.
    """
    q = DRAFT_ROWS.astype(np.float64)
    result = []
    for tokens, parents in zip(*map(np.asarray, tree[:2]), strict=True):
        a, b, a1, last = tokens[1:]
        assert parents.tolist()[:4] == [-1, 0, 0, 1]
        same = q[0, a] * (1 - q[a, a1])
        same /= same + 1 - q[0, a]
        second = same * q[a, last] / (1 - q[a, a1]) if parents[4] == 1 else (1 - same) * q[b, last]
        result.append(q[0, a] * q[0, b] / (1 - q[0, a]) * q[a, a1] * second)
    return np.array(result)


@pytest.mark.parametrize("name", SMALL)
def test_golden_trees_and_what_is_accepted_of_them(name):
    builder = SMALL[name]
    tree, counts = distinct(grown(builder, 40_000))
    distribution = beam_chances(tree) if "rsd_s" in name else chances(tree)[0]
    np.testing.assert_allclose(distribution.sum(), 1, atol=1e-6)  # every tree was seen
    assert chisquare(counts, distribution * counts.sum(), sum_check=False).pvalue > 1e-3
    joint, accepted = block_distribution(recursive_rejection, tree, distribution, TARGET_ROWS, builder.max_depth)
    np.testing.assert_allclose(joint, joint_distribution(TARGET_ROWS, 0, builder.max_depth + 1), atol=1e-6)
    golden = MARKOV[name]
    wanted = [golden["accepted_length_pmf"].get(str(i), 0.0) for i in range(builder.max_depth + 1)]
    np.testing.assert_allclose(accepted, wanted, atol=2e-6)
    tokens = (accepted * (1 + np.arange(len(accepted)))).sum()
    np.testing.assert_allclose(tokens, golden["expected_tokens_per_iteration"], atol=5e-6)
    if "dyspec_m" in name:
        believed = distribution @ chances(tree)[1]
        np.testing.assert_allclose(believed, golden["expected_accepted_if_draft_prob_were_acceptance"], atol=2e-6)
    if "rsd_s" in name:
        both = distribution[np.asarray(tree.parents)[:, 4] == 1].sum()
        np.testing.assert_allclose(both, MARKOV["rsd_s_both_level2_slots_on_best_beam"]["exact"], atol=2e-6)


def check_large_trees(name, threshold, width, size):
    """40,000 trees of DySpec's threshold form, one verdict on each: accepted tokens and drafted nodes are golden."""
    tree = grown(trees.dyspec(threshold=threshold, width=width, depth=3, children=3), 40_000)
    u = jax.random.uniform(jax.random.key(2), tree.tokens.shape)
    end = jax.jit(recursive_rejection)(u, tree, jnp.log(jnp.asarray(TARGET_ROWS))[tree.tokens])
    accepted, drafted, golden = np.asarray(end.num_nodes) - 1, np.asarray(tree.valid).sum(1) - 1, MARKOV[name]
    for x, wanted in ((1 + accepted, golden["expected_tokens_per_iteration"]), (drafted, size)):
        assert abs(x.mean() - wanted) < 4 * x.std() / len(x) ** 0.5 < 0.02
    distribution = np.array([golden["accepted_length_pmf"].get(str(i), 0.0) for i in range(4)])
    counts = np.bincount(accepted, minlength=4)
    assert (
        chi_square(counts[distribution > 0], distribution[distribution > 0]) > 1e-3
        and not counts[distribution == 0].any()
    )


@pytest.mark.parametrize(
    ("name", "threshold", "width", "size"),
    [
        # Values of exactly 0.3 count as reaching it. The card's size of 5.714286 is one where float64 rounds some of
        # them down, which does not change the tokens.
        ("dyspec_threshold_0.3_depth3", 0.3 - 1e-6, 4, 6.4),
        ("dyspec_threshold_0.15_depth3", 0.15, 9, 10.3),
    ],
)
def test_golden_trees_that_are_too_large_to_enumerate(name, threshold, width, size):
    """The standard errors of the means are 0.002 tokens and up to 0.004 nodes."""
    check_large_trees(name, threshold, width, size)


def test_the_large_golden_trees_catch_a_mutant():
    """The next sibling is not drawn where its value is equal to the threshold: 2.03 tokens instead of 2.74."""
    with pytest.raises(AssertionError):
        check_large_trees("dyspec_threshold_0.3_depth3", 0.3 + 1e-6, 4, 6.4)


race = importlib.import_module("specjax.trees.builders.dyspec")._race  # the package names the objects


def even_draws(parents, count):
    """A mutant of DySpec: takes every token to be equally likely."""
    tokens, q = race(parents, count)
    return tokens, jnp.full_like(q, 1 / len(DRAFT_ROWS))


@pytest.mark.parametrize(
    ("name", "where", "function", "mutant"),
    [
        ("dyspec_m4", "dyspec", "_race", even_draws),
        ("rsd_s_L2_W2", "beam", "_condition", lambda g, psi: g),  # without the parents' luck
    ],
)
def test_the_golden_trees_catch_mutants(name, where, function, mutant, monkeypatch):
    monkeypatch.setattr(importlib.import_module(f"specjax.trees.builders.{where}"), function, mutant)
    with pytest.raises(AssertionError):
        test_golden_trees_and_what_is_accepted_of_them(name)


def test_eagle2_keeps_the_golden_nodes():
    golden = json.loads((DATA / "verification_tree_builders.json").read_text())["eagle2"]
    builder = trees.eagle2(top_k=golden["k"], depth=1 + golden["extra_levels"], total=golden["total"])
    tree = jax.tree.map(lambda x: np.asarray(x)[0], grown(builder, 1))
    assert tree.valid.all() and tree.logits is None
    paths = [[]]
    for node in range(1, builder.num_nodes):
        paths.append([*paths[tree.parents[node]], int(tree.tokens[node])])
    assert paths[1:] == [node["path"] for node in golden["nodes"]]
    chance = [np.prod([DRAFT_ROWS[a, b] for a, b in zip([0, *path], path, strict=False)]) for path in paths[1:]]
    np.testing.assert_allclose(chance, [node["prob"] for node in golden["nodes"]], atol=1e-6)


def test_a_weighed_tree_says_how_likely_each_node_is():
    """Every node where it belongs, the one that there is not as well: of three children none has rank 4."""
    builder = dataclasses.replace(trees.static(((0,), (1,), (4,), (0, 0)), "point_mass"), scored=True)
    rows, root = jnp.log(jnp.asarray(DRAFT_ROWS)), jnp.zeros((1,), jnp.int32)
    context = Context(root[:, None], root + 1, Sampling())

    def grown(says):
        feed = lambda memory, frontier: (memory, says(rows[frontier.tokens], 0.25))
        return trees.grow(builder, feed, (), root, says(rows[root], 0.5), None, context, root + 2)[0]

    plain, confident = jax.jit(
        lambda: (
            grown(lambda logits, sure: logits),
            grown(lambda logits, sure: DraftOutput(logits, jnp.full(logits.shape[:-1], sure))),
        )
    )()
    first, second = np.argsort(-DRAFT_ROWS[0])[:2]
    p, q, below = DRAFT_ROWS[0, first], DRAFT_ROWS[0, second], DRAFT_ROWS[first].max()
    assert plain.tree.valid.tolist() == [[True, True, True, False, True]]
    assert plain.tree.tokens[0, :3].tolist() == [0, first, second] and plain.tree.parents[0, 4] == 1
    real = np.array([0, 1, 2, 4])
    np.testing.assert_allclose(plain.chances[0, real], [1, p, q, below], rtol=1e-5)
    np.testing.assert_allclose(confident.chances[0, real], [1, 0.5, 0.5 * q / p, 0.25], rtol=1e-5)


@pytest.mark.parametrize("name", ["rsd_s", "dyspec"])
def test_levels_on_gpus_have_a_fixed_number_unless_drafts_end_early(name, monkeypatch):
    """The text stays that of plain decoding. Three rows, so that nothing is traced before the patch."""
    prompts, key = PROMPTS[:3], jax.random.key(0)
    drafter = two_model(tiny_llama(seed=1, layers=1), tree=BUILDERS[name])
    monkeypatch.setattr(platforms, "of_program", lambda: "gpu")
    loops, while_loop = [], jax.lax.while_loop
    monkeypatch.setattr(
        growing.jax.lax, "while_loop", lambda test, *rest: loops.append(test) or while_loop(test, *rest)
    )
    text = decode(tiny_llama(), drafter, prompts, key=key, max_new_tokens=20).to_lists()
    assert text == plain()[:3]
    conditions = {test.func for test in loops if isinstance(test, functools.partial)}
    assert (growing._has_levels in conditions) == (name == "rsd_s")
    assert (growing._has_work in conditions) == (name == "dyspec")
