"""Drafts that would bias the text are refused, by the name of the field."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import DRAFT_ROWS, branching_drafter, markov

from specjax import UsageError, decode, trees, verifiers
from specjax.drafters import two_model
from specjax.engine.value_checks import check_draft
from specjax.trees import operations
from specjax.types import Drafter, TokenTree, Traits, TreeSize

LOGITS = jnp.log(jnp.asarray(DRAFT_ROWS))


def tree(tokens=(0, 1, 2), parents=(-1, 0, 0), valid=(True, True, True), logits=None):
    tokens = jnp.array([tokens])
    return TokenTree(tokens, jnp.array([parents]), jnp.array([valid]), LOGITS[tokens] if logits is None else logits)


@pytest.mark.parametrize(
    ("draft", "draws", "target", "message"),
    [
        (tree(parents=(-1, 2, 0)), "without_replacement", LOGITS, "tree.parents is not topological"),
        (tree(parents=(0, 0, 0)), "without_replacement", LOGITS, "tree.parents is not topological"),
        (tree(parents=(-1, 0, 1), valid=(True, False, True)), "without_replacement", LOGITS, "tree.parents"),
        (tree(tokens=(0, 1, 1)), "without_replacement", LOGITS, "tree.tokens repeats a token among siblings"),
        (tree(), "chain", LOGITS, "repeats"),
        (tree(logits=LOGITS[None].at[0, 0, 1].set(-jnp.inf)), "with_replacement", LOGITS, r"q = 0"),
        (tree(logits=LOGITS[None].at[0, 0, 1].set(jnp.nan)), "with_replacement", LOGITS, "tree.logits contains NaN"),
        (tree(), "without_replacement", LOGITS.at[2, 2].set(jnp.nan), "target_logits contains NaN"),
        (tree(tokens=(0, 1, len(DRAFT_ROWS))), "point_mass", LOGITS, "outside of the vocabulary"),
        (tree(tokens=(0, -1, 1)), "point_mass", LOGITS, "outside of the vocabulary"),
    ],
)
def test_each_violation_is_named(draft, draws, target, message):
    with pytest.raises(UsageError, match=message):
        check_draft(draft, draws, target[None])


def test_good_drafts_pass():
    check_draft(tree(), "without_replacement", LOGITS[None])
    check_draft(tree(tokens=(0, 1, 1)), "with_replacement", LOGITS[None])
    check_draft(tree(valid=(True, False, False), parents=(-1, -1, -1)), "without_replacement", LOGITS[None])
    check_draft(tree(tokens=(0, 1, -1), valid=(True, True, False)), "point_mass", LOGITS[None])


def test_decode_refuses_a_drafter_that_repeats_siblings_only_when_debugging():
    drafter = branching_drafter((2,)).replace(params=jnp.asarray(DRAFT_ROWS))

    def propose(params, keys, state, context, limit):
        tree, state = drafter.propose(params, keys, state, context, limit)
        return tree._replace(tokens=tree.tokens.at[:, 2].set(tree.tokens[:, 1])), state

    mutant = drafter.replace(propose=propose)
    run = lambda drafter, **options: decode(
        markov(), drafter, [[0]], key=jax.random.key(0), max_new_tokens=4, temperature=1.0, **options
    )
    run(mutant)
    with pytest.raises(UsageError, match=r"row 0: tree\.tokens repeats"):
        run(mutant, debug=True)
    np.testing.assert_array_equal(run(drafter, debug=True).tokens, run(drafter).tokens)


def wrong(change, draws="point_mass"):
    """A drafter of two tokens whose trees `change(tree, context)` alters."""

    def propose(params, keys, state, context, limit):
        nodes = jnp.concatenate([context.root, jnp.zeros_like(context.root), jnp.ones_like(context.root)], 1)
        valid = jnp.arange(3) <= limit[:, None]
        return change(operations.chain(nodes, valid), context), state

    return Drafter(propose=propose, size=TreeSize(3, 2), traits=Traits(draws=draws))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tree, _: tree._replace(parents=jnp.zeros_like(tree.parents)), "tree.parents is not topological"),
        (lambda tree, _: tree._replace(parents=tree.parents + 1), "tree.parents is not topological"),
        (lambda tree, _: tree._replace(tokens=tree.tokens.at[:, 0].add(1)), "does not start with the last token"),
        (lambda tree, _: tree._replace(valid=jnp.ones_like(tree.valid)), "deeper than the argument limit"),
        (lambda tree, _: tree._replace(tokens=tree.tokens.at[:, 1].set(len(DRAFT_ROWS))), "outside of the vocabulary"),
        (lambda tree, _: tree._replace(tokens=tree.tokens.at[:, 1].set(-1)), "outside of the vocabulary"),
    ],
)
@pytest.mark.parametrize("rule", [None, "traversal", "recursive_rejection", "sample_and_match"])
def test_any_tree_ends_and_is_named_when_debugging(change, message, rule):
    """Parents that name themselves looped for ever; another root changed greedy text unnoticed."""
    point_mass = rule != "traversal"

    def drafted(tree, context):
        tree = change(tree, context)
        return tree if point_mass else tree._replace(logits=jnp.zeros((*tree.tokens.shape, len(DRAFT_ROWS))))

    drafter = wrong(drafted, "point_mass" if point_mass else "chain")
    options = {"key": jax.random.key(0), "max_new_tokens": 5}
    if rule is not None and not (point_mass and rule == "recursive_rejection"):
        options |= {"temperature": 1.0, "verifier": rule}
    result = decode(markov(), drafter, [[0]], **options)
    assert result.lengths.tolist() == [5]
    if "temperature" not in options:
        assert result.to_lists() == decode(markov(), "autoregressive", [[0]], **options).to_lists()
    with pytest.raises(UsageError, match=message):
        decode(markov(), drafter, [[0]], **options, debug=True, controller="fixed:1")


def test_a_rule_for_other_drafts_is_refused_when_building():
    drafter = two_model(markov(DRAFT_ROWS), tree=trees.branching("2x1"))
    for rule in (verifiers.standard, verifiers.specinfer, verifiers.block, verifiers.multipath_block(2)):
        with pytest.raises(
            UsageError, match=rf"verifier {rule.name.split('(')[0]}.* not valid for drafts drawn without"
        ):
            decode(markov(), drafter, [[0]], key=jax.random.key(0), max_new_tokens=4, temperature=1.0, verifier=rule)
    with pytest.raises(UsageError, match="sampling must be"):
        decode(markov(), drafter, [[0]], key=jax.random.key(0), max_new_tokens=4, sampling="nucleus")
    with pytest.raises(UsageError, match="always uses the verifier sample_and_match"):
        decode(
            markov(), drafter, [[0]], key=jax.random.key(0), max_new_tokens=4, sampling="coupled",
            verifier=verifiers.recursive_rejection,
        )  # fmt: skip
