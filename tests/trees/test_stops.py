"""Stop rules: the cards' traces, exactness, and passes of the drafter that do not run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import block_distribution
from lossy import fall_back
from rules import module
from scipy.stats import chisquare
from tiers import exhaustive
from toy import (
    DRAFT_ROWS,
    TARGET_ROWS,
    chi_square,
    joint_distribution,
    markov,
    markov_model,
    sampled_triples,
    tiny_llama,
)

from specjax import UsageError, controllers, decode, trees
from specjax.drafters import autoregressive, two_model
from specjax.engine.prepare import Settings, prepare
from specjax.engine.run import run
from specjax.models import cache as kv
from specjax.models.heads.acceptance import AcceptanceHead, AcceptanceLayer
from specjax.trees import stops
from specjax.trees.operations import depths
from specjax.types import Capabilities, Context, Controller, DraftOutput, Model, Output, Sampling, Target

bild, standard = module("bild"), module("standard")

# ------------------------------------------------------------------------------------------------------ the cards


def scripted(tops, builder, *, limit=None, temperature=None):
    """The tree that `builder` grows where the i-th pass (0: the root's) gives as the largest probability
    `tops[b][i]`, per row; and how many passes ran, the root's not counted."""
    tops = np.asarray(tops, np.float32)
    distributions = np.log(np.stack([tops, *[(1 - tops) / 2] * 2], -1))  # [B, passes, 3]
    root = jnp.zeros(len(tops), jnp.int32)
    context = Context(root[:, None], root + 1, Sampling(temperature and jnp.float32(temperature)))
    keys = jax.random.split(jax.random.key(0), len(tops))

    def feed(passes, frontier):
        return passes + 1, jnp.take_along_axis(distributions, frontier.depth[:, :, None], 1)

    limit = jnp.full(len(tops), builder.max_depth) if limit is None else jnp.asarray(limit)
    run = lambda: trees.grow(builder, feed, jnp.int32(0), root, distributions[:, 0], keys, context, limit)
    grown, passes = jax.jit(run)()
    return grown.tree, int(passes)


drafted = lambda tree: (np.asarray(tree.valid).sum(1) - 1).tolist()


def test_kangaroo_trace():
    """The card: .9, .7, .5, .8 with threshold .6 give 3 tokens, the third pass being the last."""
    tree, passes = scripted([[0.9, 0.7, 0.5, 0.8, 0.9, 0.9]], trees.chain(6, stop=stops.kangaroo()))
    assert drafted(tree) == [3] and passes == 2
    assert drafted(scripted([[0.5] * 6], trees.chain(6, stop=stops.confidence(0.0)))[0]) == [6]
    tree, passes = scripted([[0.9] * 6], trees.chain(6, stop=stops.confidence(1.1)))
    assert drafted(tree) == [1] and passes == 0


def test_the_fallback_of_bild_discards_the_weak_token():
    """The card: .9, .8, .5 with .6 give two pending tokens; above 1 every token is the target's."""
    for temperature in (None, 1.0):
        tree, _ = scripted([[0.9, 0.8, 0.5, 0.9]], trees.chain(4, stop=stops.fallback()), temperature=temperature)
        assert drafted(tree) == [2]
    tree, passes = scripted([[0.9] * 4], trees.chain(4, stop=stops.fallback(1.1)))
    assert drafted(tree) == [0] and passes == 0


def test_specdec_plus_plus_trace():
    """The card: .9, .8, .7, .6 and threshold .3 draft 4 tokens, 3 without the lag; at 1 all, below 0 the least."""
    tops = [[0.9, 0.8, 0.7, 0.6, 0.9, 0.9]]
    count = lambda *settings, **more: drafted(
        scripted(tops, trees.chain(6, stop=stops.acceptance(*settings, **more)))[0]
    )
    assert count(0.3, min_tokens=1) == [4]
    assert count(0.3, min_tokens=1, lag=False) == [3]
    assert count(0.3, min_tokens=5) == [5]
    assert count(1.0) == [6]
    assert count(-1e-3) == [2] and count(-1e-3, min_tokens=1) == [1]


def test_acceptance_by_another_predictor():
    """The numbers of the card from a predictor that does not look at them, which are sure of every token."""
    script = jnp.array([0.9, 0.8, 0.7, 0.6, 0.9, 0.9])
    predict = lambda fed: jnp.broadcast_to(script[fed.depth], fed.depth.shape)
    tops = [[0.99] * 6]
    count = lambda **more: drafted(
        scripted(tops, trees.chain(6, stop=stops.acceptance(0.3, min_tokens=1, predict=predict, **more)))[0]
    )
    assert count() == [4] and count(lag=False) == [3]
    assert drafted(scripted(tops, trees.chain(6, stop=stops.acceptance(0.3, min_tokens=1)))[0]) == [6]


def test_entropy_in_nats():
    """Largest probabilities .9, .5, .9: entropies 0.394, 1.040, 0.394."""
    assert drafted(scripted([[0.9, 0.5, 0.9]], trees.chain(3, stop=stops.entropy(1.0)))[0]) == [2]
    assert drafted(scripted([[0.9, 0.5, 0.9]], trees.chain(3, stop=stops.entropy(1.1)))[0]) == [3]


def test_the_loop_ends_when_the_last_row_does_and_rows_do_not_see_each_other():
    builder = trees.chain(5, stop=stops.confidence(0.6))
    tops = [[0.9, 0.5, 0.9, 0.9, 0.9], [0.9, 0.9, 0.9, 0.5, 0.9], [0.5] * 5]
    both, passes = scripted(tops, builder, temperature=1.0)
    assert drafted(both) == [2, 4, 1] and passes == 3
    alone, passes = scripted(tops[:1], builder, temperature=1.0)
    assert passes == 1
    for ours, theirs in zip(alone, both, strict=True):
        np.testing.assert_array_equal(ours[0], theirs[0])  # the distributions, too


@pytest.mark.parametrize(("limit", "passes"), [([0, 0], 0), ([1, 0], 0), ([2, 3], 2), ([9, 0], 4)])
def test_a_limit_saves_passes_too(limit, passes):
    tree, ran = scripted([[0.9] * 5] * 2, trees.chain(5), limit=limit)
    assert drafted(tree) == [min(n, 5) for n in limit] and ran == passes


@pytest.mark.parametrize("builder", [trees.beam(2, 4), trees.branching((2, 2, 1, 1)), trees.eagle2(top_k=2, depth=4)])
def test_trees_stop_by_node_and_stand_at_the_front(builder):
    """The distribution of level 2 is flat: nothing is drafted below level 3, and the pass over it does not run."""
    stopped = trees.with_stop(builder, stops.confidence(0.6))
    tree, passes = scripted([[0.9, 0.9, 0.5, 0.9], [0.9] * 4], stopped)
    assert passes == 3
    valid = np.asarray(tree.valid)
    assert valid[0].sum() < valid[1].sum()
    assert (np.diff(valid.astype(int), axis=1) <= 0).all()
    assert scripted([[0.9, 0.9, 0.5, 0.9]], stopped)[1] == 2
    depth = np.asarray(depths(tree.parents))
    assert depth[0][valid[0]].max() == 3 and depth[1][valid[1]].max() == 4


def test_the_greedy_tree_of_dyspec_draws_elsewhere_when_a_branch_stops():
    """Below a stopped node nothing grows, but the other draws of the budget are spent on its siblings."""
    builder = trees.dyspec_fixed(6, children=3)
    tree, _ = scripted([[0.6, 0.4, 0.6, 0.6, 0.6, 0.6]], trees.with_stop(builder, stops.fallback(0.5)))
    assert (np.asarray(tree.parents)[0][np.asarray(tree.valid)[0]] <= 0).all() and drafted(tree) == [3]
    tree, _ = scripted([[0.4] + [0.6] * 6], trees.with_stop(builder, stops.confidence(0.5)))
    assert drafted(tree) == [3]  # as where the root's own children are the last
    assert drafted(scripted([[0.6] * 7], builder, limit=[1])[0]) == [3]


def judged(accepted, builder):
    """Tokens that `builder` drafts where the head finds the i-th token it reads (1: the first draft) `accepted[i - 1]`
    likely to be right; of the root it says nothing that counts."""
    root, flat = jnp.zeros(1, jnp.int32), jnp.zeros((1, 1, 3))
    scores = jnp.asarray([0.0, *accepted])  # a root that would stop everything
    feed = lambda memory, frontier: (memory, DraftOutput(flat, accepted=scores[frontier.depth]))
    start = DraftOutput(flat[:, 0], accepted=scores[:1])
    context, limit = Context(root[:, None], root + 1, Sampling(None)), jnp.full(1, builder.max_depth)
    run = lambda: trees.grow(builder, feed, (), root, start, None, context, limit)[0].tree
    return drafted(jax.jit(run)())[0]


@pytest.mark.parametrize(("scores", "lagging"), [((0.9, 0.8, 0.7, 0.6), 4), ((0.95, 0.9, 0.8, 0.9), 4)])
def test_specdec_by_its_head(scores, lagging):
    """1 - .9 .8 .7 = .496 and 1 - .95 .9 .8 = .316, above 0.3 once the third is read; then the fourth is drawn."""
    scores = (*scores, 0.9, 0.9)
    assert judged(scores, trees.chain(6, stop=stops.acceptance_head(0.3))) == lagging
    assert judged(scores, trees.chain(6, stop=stops.acceptance_head(0.3, lag=False))) == lagging - 1
    assert stops.parse("trained:0.3") is stops.acceptance_head(0.3)


def test_the_bounds_of_specdec():
    scores = [0.5] * 6
    assert judged(scores, trees.chain(6, stop=stops.acceptance_head(1.0))) == 6
    assert judged(scores, trees.chain(6, stop=stops.acceptance_head(-1.0))) == 2
    assert judged(scores, trees.chain(6, stop=stops.acceptance_head(-1.0, min_tokens=3, lag=False))) == 3
    with pytest.raises(UsageError, match="min_tokens must be at least 1, not 0"):
        stops.acceptance_head(0.3, min_tokens=0)


# ------------------------------------------------------------------------------------------------------ exactness

SURE = np.array([[0.6, 0.2, 0.2], [0.3, 0.3, 0.4], [0.1, 0.1, 0.8]], np.float32)  # unsure after token 1 alone
RULES = {
    "confidence": stops.confidence(0.5),
    "fallback": stops.fallback(0.5),
    "entropy": stops.entropy(1.0),
    "acceptance": stops.acceptance(0.6, min_tokens=1),
    "acceptance at once": stops.acceptance(0.6, min_tokens=1, lag=False),
}


def grown(builder, count=20_000):
    """`count` trees that a builder draws below token 0 of the Markov chain `SURE`."""
    logits, root = jnp.log(jnp.asarray(SURE)), jnp.zeros((count,), jnp.int32)
    context = Context(root[:, None], root + 1, Sampling(jnp.asarray(1.0)))
    keys = jax.random.split(jax.random.key(1), count)
    feed = lambda memory, frontier: (memory, logits[frontier.tokens])
    run = lambda: trees.grow(builder, feed, (), root, logits[root], keys, context, root + builder.max_depth)[0].tree
    return jax.jit(run)()


@pytest.mark.parametrize("rule", RULES)
def test_stopped_chains_are_exact(rule):
    """Each chain that can be drawn, with its chance: the product of q of its tokens, since rules decide before them."""
    tree = grown(trees.chain(4, stop=RULES[rule]))
    tokens, valid = np.asarray(tree.tokens), np.asarray(tree.valid)
    _, first, counts = np.unique(np.where(valid, tokens, -1), axis=0, return_index=True, return_counts=True)
    tree, tokens, valid = jax.tree.map(lambda x: x[first], tree), tokens[first], valid[first]
    lengths = valid.sum(1) - 1
    assert len(set(lengths.tolist())) > 1  # the rule does something
    q = SURE.astype(np.float64)[tokens[:, :-1], tokens[:, 1:]]
    chances = np.where(valid[:, 1:], q, 1.0).prod(1)
    np.testing.assert_allclose(chances.sum(), 1, atol=1e-6)
    assert chisquare(counts, chances * counts.sum(), sum_check=False).pvalue > 1e-3
    joint, _ = block_distribution(standard.core, tree, chances, TARGET_ROWS, 4)
    np.testing.assert_allclose(joint, joint_distribution(TARGET_ROWS, 0, 5), atol=1e-6)


def test_nodes_stop_one_by_one():
    """Token 1 has no children, the others have two, and there is no gap between the valid nodes."""
    tree = jax.device_get(grown(trees.with_stop(trees.branching((2, 2)), stops.fallback(0.5)), 64))
    assert (np.diff(tree.valid.astype(int), axis=1) <= 0).all()
    for tokens, parents, valid in zip(tree.tokens, tree.parents, tree.valid, strict=True):
        wanted = [0 if token == 1 else 2 for token in tokens[1:3]]
        assert [int(valid[parents == node].sum()) for node in (1, 2)] == wanted
        assert valid.sum() == 3 + sum(wanted)
    assert len({int(valid.sum()) for valid in tree.valid}) == 2


@pytest.mark.parametrize(
    "tree",
    [
        exhaustive(trees.chain(2)),
        trees.branching((2, 2)),
        exhaustive(trees.beam(2, 2)),
        exhaustive(trees.dyspec_fixed(3)),
    ],
)
def test_sampled_text_has_the_law_of_the_target(tree):
    drafter = two_model(markov(SURE), tree=tree, stop=stops.fallback(0.5))
    assert chi_square(sampled_triples(drafter, TARGET_ROWS), joint_distribution(TARGET_ROWS, 0, 3)) > 1e-3


def scoring(scores):
    """An acceptance head of the Markov chain `SURE`, whose features of a token are log p behind it."""
    odds = np.log(scores) - np.log1p(-np.asarray(scores))
    weight = jnp.asarray(np.linalg.solve(np.log(SURE), odds), jnp.float32)
    return AcceptanceHead((), AcceptanceLayer(jnp.stack([0 * weight, weight]), jnp.zeros(2)))


def test_an_acceptance_head_judges_the_token_that_was_read():
    """A head that finds token 1 alone wrong lets one more be drawn behind it, and no other."""
    drafter = two_model(
        markov(SURE), 4, acceptance=scoring([0.99, 0.2, 0.99]), stop=stops.acceptance_head(0.5, min_tokens=1)
    )
    text = jnp.zeros((64, 8), jnp.int32)
    context = Context(text, jnp.full(64, 2), Sampling(jnp.asarray(1.0)), target=markov(TARGET_ROWS))
    keys, limit = jax.random.split(jax.random.key(0), 64), jnp.full(64, 4)
    propose = lambda params: drafter.propose(params, keys, drafter.init(params, context), context, limit)[0]
    tree = jax.jit(propose)(drafter.params)
    for tokens, length in zip(np.asarray(tree.tokens)[:, 1:], drafted(tree), strict=True):
        wrong = np.flatnonzero(tokens[:3] == 1)
        assert length == (wrong[0] + 2 if len(wrong) else 4)
    assert set(drafted(tree)) == {2, 3, 4}


def test_sampled_text_has_the_law_of_the_target_whatever_an_acceptance_head_says():
    head = scoring([0.9, 0.2, 0.9])
    drafter = two_model(markov(SURE), 3, acceptance=head, stop=stops.acceptance_head(0.5, min_tokens=1))
    assert chi_square(sampled_triples(drafter, TARGET_ROWS), joint_distribution(TARGET_ROWS, 0, 3)) > 1e-3
    bare = lambda head: two_model(markov(SURE), 3, acceptance=head).replace(params=None)
    assert bare(head) == bare(scoring([0.1, 0.2, 0.3])) != bare(None)  # its parameters are arguments


def test_dropping_the_token_that_is_judged_is_caught():
    """A mutant: the node itself is dropped where the distribution behind it, which depends on its token, is flat."""
    drafter = two_model(markov(SURE), 2)

    def propose(params, keys, state, context, limit):
        tree, state = drafter.propose(params, keys, state, context, limit)
        sure = jnp.max(params[tree.tokens], -1) >= 0.5
        return tree._replace(valid=jnp.cumprod(sure.at[:, 0].set(True), 1).astype(bool) & tree.valid), state

    counts = sampled_triples(drafter.replace(propose=propose), TARGET_ROWS)
    assert chi_square(counts, joint_distribution(TARGET_ROWS, 0, 3)) < 1e-6


PROMPTS = [[1, 2, 3, 1, 2, 3, 1], [5], list(range(30)), [7, 7]]


def test_coupled_text_is_the_targets_wherever_rows_stop():
    """The draft model is the target, so every token that was drafted is right: the draft cache is, too."""
    run = lambda drafter: decode(
        tiny_llama(), drafter, PROMPTS, key=jax.random.key(0), max_new_tokens=20, temperature=0.9, sampling="coupled"
    )
    ours = run(two_model(tiny_llama(), 4, stop=stops.confidence(0.7)))
    assert ours.to_lists() == run(autoregressive()).to_lists()
    assert ours.stats.accepted.tolist() == ours.stats.drafted.tolist()
    by_depth = ours.stats.drafted_by_depth
    assert (by_depth[:, 0] > by_depth[:, 3]).any()


def test_an_acceptance_head_that_is_missing_or_of_another_width():
    run = lambda drafter: decode(tiny_llama(), drafter, [[1, 2]], key=0, max_new_tokens=4)
    with pytest.raises(UsageError, match="trained:T needs a drafter with an acceptance head"):
        run(two_model(tiny_llama(), 2, stop=stops.acceptance_head()))
    with pytest.raises(UsageError, match="reads features of width 3, but those of the draft model have width 32"):
        run(two_model(tiny_llama(), 2, acceptance=scoring([0.1, 0.2, 0.3])))


# ------------------------------------------------------------------------------------------------------ BiLD


def finished_draft_cut(stop_below, alpha):
    """The rule that cuts a finished draft, in place of a drafter that stops."""
    return lambda keys, tree, logits: bild.rollback(alpha)(keys, fall_back(tree, stop_below), logits)


def test_fallback_in_the_loop_gives_the_text_of_fallback_on_the_finished_draft():
    draft, alpha, options = tiny_llama(seed=1, layers=1), 2.0, {"temperature": 1.0, "max_new_tokens": 24}
    run = lambda drafter, rule: decode(
        tiny_llama(), drafter, PROMPTS, key=jax.random.key(0), verifier=rule, **options
    )  # fmt: skip
    late = run(two_model(draft, 4), finished_draft_cut(0.3, alpha))
    early = run(two_model(draft, 4, stop=stops.fallback(0.3)), bild.rollback(alpha))
    assert early.to_lists() == late.to_lists()
    assert early.stats.target_passes.tolist() == late.stats.target_passes.tolist()
    assert int(early.stats.drafted.sum()) < int(late.stats.drafted.sum())  # fewer are even drafted


# ------------------------------------------------------------------------------------------------------ passes


PASSES = []


@functools.cache
def counting(vocab: int) -> Model:
    """The Markov model; notes every forward pass that really runs."""

    def forward(params, tokens, cache, *, positions, mask, taps=(), earlier=None):
        jax.debug.callback(lambda: PASSES.append(tokens.shape[1]))
        return Output(jnp.log(params[tokens]), jnp.zeros((*tokens.shape, 1))), ()

    return markov_model(vocab)._replace(forward=forward, name="counting", capabilities=Capabilities())


def passes_of(controller=None, stop=None, new=12, eos=()):
    """(passes of one token that the draft model ran, rounds) over `new` tokens of two rows, 00... and 11..."""
    draft = Target(counting(3), jnp.asarray(TARGET_ROWS))
    PASSES.clear()
    result = decode(
        markov(), two_model(draft, 4, stop=stop), [[2, 0], [2, 1]], key=jax.random.key(0), max_new_tokens=new,
        controller=controller, eos=eos,
    )  # fmt: skip
    jax.block_until_ready(result.tokens)
    jax.effects_barrier()
    return PASSES.count(1), int(result.stats.target_passes.max())


def test_passes_that_are_not_needed_do_not_run():
    """The root's pass, which also keeps the draft's cache, feeds two tokens; the others one."""
    ran, rounds = passes_of(new=11)
    assert rounds == 3 and ran == 3 + 3 + 0  # chains of 4, 4 and, with one token left, 0
    assert passes_of(stop=stops.confidence(1.1))[0] == 0
    assert passes_of(stop=stops.fallback(1.1)) == (0, 12)
    assert passes_of(controllers.fixed(0)) == (0, 12)
    ran, rounds = passes_of(controllers.fixed(2))
    assert ran == rounds == 4


def test_a_row_that_has_ended_keeps_no_pass_running():
    """Only the first row drafts, and it ends with its first token."""
    first = Controller(lambda batch: jnp.array([4, 0]), lambda state: state, lambda state, info: state)
    assert passes_of(first) == (3 + 3 + 0, 12)  # 5, 5 and 2 tokens of the first row
    assert passes_of(first, eos=0) == (3, 12)


def copies(drafter, batch=8):
    """Copies of a layer's slots of the cache within the loops of the compiled program."""
    prompts = (jnp.ones((batch, 384), jnp.int32), jnp.full((batch,), 384))
    target = tiny_llama(head_dim=64, num_kv_heads=1)
    job = prepare(target, drafter, prompts, Settings(), key=jax.random.key(0), max_new_tokens=32)
    program = run.lower(job).compile().as_text().split("ENTRY")[0]
    slots = -(-(job.tokens.shape[1] + 4) // kv.SLOTS) * kv.SLOTS
    shape = f"f32[{batch},2,{slots},64]"
    assert shape in program
    return [line for line in program.splitlines() if f"= {shape}" in line and " copy(" in line]


def test_a_loop_that_may_end_early_does_not_copy_the_draft_cache():
    assert copies(two_model(tiny_llama(head_dim=64), 3, stop=stops.confidence(0.4))) == []


# ------------------------------------------------------------------------------------------------------ settings


def test_settings():
    assert stops.confidence(0.4) is stops.confidence(0.4) and stops.parse("confidence:0.4") is stops.confidence(0.4)
    assert stops.parse("own:0.5") is stops.drafter_confidence(0.5) and not stops.drafter_confidence(0.5).keeps
    assert stops.parse("fallback:0.6") == stops.fallback() and stops.kangaroo() is stops.confidence(0.6)
    draft = markov(DRAFT_ROWS)
    assert (
        two_model(draft, 3, stop=stops.confidence(0.4)).propose
        is two_model(draft, 3, stop=stops.confidence(0.4)).propose
    )
    assert two_model(draft, tree=trees.chain(3, stop=stops.confidence(0.4))).traits.widths == (1,)
    for bad in ("confidence", "confidence:x", "surprise:1", "confidence:nan"):
        with pytest.raises(UsageError, match="is not a stop condition"):
            stops.parse(bad)
    with pytest.raises(UsageError, match="at least 0, not -1"):
        stops.fallback(-1.0)
    with pytest.raises(UsageError, match="min_tokens must be at least 1"):
        stops.acceptance(min_tokens=0)
