"""The features that the head drafter reads and forgets, for every kind of head.

Verification hides errors in them: the text is right whatever a head reads. So these tests check its memory and its
acceptance rate.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from head_memory import differs, knowing, knowing_module, permutation, run_rounds
from heads import separate_modules, tiny_head
from tiers import exhaustive, those
from toy import tiny_llama

from specjax import UsageError, decode, drafters, make_drafter, trees
from specjax.drafters.heads import head_drafter
from specjax.engine.prepare import Settings


def after_rounds(name, **options):
    """Return (head, job, state) after every row has had some steps that end at different times."""
    head = tiny_head(name, tiny_llama())
    drafter = make_drafter(name, tiny_llama(), head, **options)
    # Hot and with the target's own noise: what a random head drafts is accepted now and then.
    return head, *run_rounds(drafter, Settings(temperature=4.0, sampling="coupled"))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("clover", {}),
        ("dflash", {}),
        ("eagle", {"tree": trees.branching("2x2x1")}),
        ("eagle3", {}),
        ("hydra", {}),
        *(exhaustive(name, {}) for name in ("chimera", "clover", "kangaroo", "medusa", "p_eagle")),
        *(exhaustive(name, {"tree": trees.branching("2x2x1")}) for name in ("falcon", "hidden_transfer", "mtp")),
    ],
)
def test_a_head_remembers_the_text_as_if_it_had_read_it_at_once(name, options):
    assert differs(*after_rounds(name, **options)) < 1e-4


def test_separate_modules_remember_the_text_as_if_they_had_read_it_at_once():
    head = separate_modules(tiny_llama())
    drafter = make_drafter("mtp", tiny_llama(), head, tree=trees.branching("2x2x1"))
    assert differs(head, *run_rounds(drafter, Settings(temperature=4.0, sampling="coupled"))) < 1e-4


def test_a_head_remembers_what_others_drafted_too():
    """Retrieved text is longer than the two levels of the head's own tree."""
    head = tiny_head("eagle", tiny_llama())
    drafter = make_drafter("rasd", tiny_llama(), head, tree=trees.parse("top:2x1"), prune=False)
    job, state = run_rounds(drafter, Settings(), new=40, rounds=10, longest=3)
    assert differs(head, job, state, lambda draft: draft.model) < 1e-4


def of_the_token_before(drafter):
    """Make a mutant in which each token gets the feature of the previous token of the path."""

    def observe(*arguments):
        pairs = drafter.observe(*arguments)
        return pairs._replace(features=jnp.roll(pairs.features, 1, 1))

    return observe


def of_rejected_nodes(drafter):
    """Make a mutant that reads the features of the first nodes of the tree, accepted or not."""

    def observe(params, state, context, tree, verdict, output):
        first = jnp.where(verdict.path >= 0, jnp.arange(verdict.path.shape[1]), -1)
        return drafter.observe(params, state, context, tree, verdict._replace(path=first), output)._replace(
            tokens=drafter.observe(params, state, context, tree, verdict, output).tokens
        )

    return observe


@pytest.mark.parametrize("name", those({"eagle"}, ["eagle", "falcon", "hidden_transfer"]))
@pytest.mark.parametrize("mutant", [of_the_token_before, of_rejected_nodes])
def test_features_of_other_tokens_are_caught(mutant, name, monkeypatch):
    functions = head_drafter._functions
    monkeypatch.setattr(
        head_drafter, "_functions", functools.cache(lambda *a: (d := functions(*a)).replace(observe=mutant(d)))
    )
    assert differs(*after_rounds(name, tree=trees.branching("2x2x1"))) > 1e-2


@pytest.mark.parametrize("knows_by", ["token", "feature"])
def test_a_head_that_knows_the_target_is_always_right(knows_by):
    """The head predicts from the token after a feature or from the feature, so each must be at its right position."""
    target, move = permutation()
    none = np.zeros_like(move)
    head = knowing(target, 30 * move, none) if knows_by == "token" else knowing(target, none, move)
    prompts = [[0], [1, 4], [3, 6, 2, 5, 1]]
    result = decode(target, drafters.head_drafter(head, 4), prompts, key=0, max_new_tokens=20)
    assert result.to_lists() == decode(target, "autoregressive", prompts, key=0, max_new_tokens=20).to_lists()
    # A text of one token has no feature yet: its first round drafts from nothing.
    assert result.stats.target_passes.tolist() == [5, 4, 4]


@pytest.mark.parametrize(
    ("knows_by", "flags"),
    [("feature", {}), ("feature", {"chained": "raw", "hidden_first": True}), ("token", {})],
    ids=["feature", "raw", "token"],
)
def test_a_module_that_knows_the_target_has_an_acceptance_of_one(knows_by, flags):
    """The next two tokens are functions of the state, so all four drafts of a pass are accepted."""
    target, move = permutation()
    none = np.zeros_like(move)
    head = knowing_module(target, *((move, none) if knows_by == "token" else (none, move)), **flags)
    run = lambda drafter: decode(target, drafter, [[0], [1, 4], [3, 6, 2, 5, 1]], key=0, max_new_tokens=20)
    result = run(make_drafter("mtp", target, head, num_tokens=4))
    assert result.to_lists() == run("autoregressive").to_lists()
    # A text of one token has no state yet: its first round drafts from nothing.
    assert result.stats.target_passes.tolist() == [5, 4, 4]


def test_a_tree_deeper_than_the_head_is_refused():
    with pytest.raises(UsageError, match="the tree is 4 tokens deep, but the head drafts only 3"):
        make_drafter("medusa", tiny_llama(), tiny_head("medusa", tiny_llama()), num_tokens=4)


@pytest.mark.parametrize("combine", ["choice", "suffix", "rasd"])
def test_a_head_beside_what_drafts_deeper_must_take_that_in(combine):
    """Otherwise its memory would lose tokens of the text, and no text would show it."""
    head = tiny_head("eagle3", tiny_llama())
    short, deep = (
        drafters.head_drafter(head, tree=trees.parse("top:2x1"), max_accepted=max_accepted)
        for max_accepted in (None, 8)
    )
    make = {
        "choice": lambda of_head: drafters.choice(drafters.prompt_lookup(7), of_head),
        "suffix": lambda of_head: drafters.suffix(7, fallback=of_head),
        "rasd": lambda of_head: drafters.rasd(of_head, drafters.suffix(7)),
    }[combine]
    with pytest.raises(
        UsageError, match="7 drafted tokens, and one of the drafters reads at most 2; make it with max_accepted=8"
    ):
        make(short)
    assert make(deep).traits.max_accepted == 8
