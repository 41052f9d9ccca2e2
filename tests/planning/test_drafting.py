"""Tests of what the draft of a workload is worth in tokens, and of which drafter it is."""

from __future__ import annotations

import pytest

from specjax import trees
from specjax.costs.tokens import rank_acceptance
from specjax.drafters.widths import WIDTHS
from specjax.planning import drafting
from specjax.planning.inputs.model_configs import load_config
from specjax.planning.inputs.topologies import parse_topology
from specjax.planning.workload import Workload, describe, make_workload


def workload(**changes):
    return Workload(load_config("smollm2_135m", "bfloat16"), parse_topology("v5e:1x1"), **changes)


@pytest.mark.parametrize(
    ("changes", "nodes", "depth", "tokens"),
    [
        ({"method": "prompt_lookup"}, 6, 5, 2.94117),
        ({"method": "two_model", "tree": "2x1"}, 5, 2, 1 + 0.91 + 0.91 * 0.7),
        ({"method": "two_model", "tree": "paths:2x2"}, 5, 2, 1 + 0.91 + 0.91 * 0.7),
    ],
)
def test_tokens_of_a_drafts_shape(changes, nodes, depth, tokens):
    assert drafting._tokens_of_shape(workload(**changes), nodes, depth)(0.7) == pytest.approx(tokens)


def test_trees_that_grow_count_as_the_best_of_their_size():
    tokens = drafting._tokens_of_shape(workload(method="two_model", tree="dyspec:4"), 5, 4)
    assert tokens(0.6) == pytest.approx(trees.sequoia(rank_acceptance(0.6, 4), 5, 4)[0])
    recycling = drafting._tokens_of_shape(workload(method="token_recycling"), 8, 3)
    assert 1 < recycling(0.3) < recycling(0.6)


def test_trees_with_prompts_count_by_their_states():
    """Not as one tree that every round has: a round without guesses gives one token."""
    work = make_workload("llama3_8b", "v5e:2x4", head="ppd:num_prompts=1", num_draft_tokens=4)
    # Below the root a prompt; then two candidates, of which the first has one (2 + 1 + 1 tokens).
    tokens = drafting.tokens_of(work)
    share = 1 / (2 - 0.6)  # of the rounds that have a guess: with 0.6 one that had some has one again
    assert tokens(0.6) == pytest.approx(1 + share * (0.6 + 0.24))
    assert tokens(0.8) > tokens(0.6)


def test_auto_is_planned_with_the_widths_of_the_chip():
    """Not with those of the machine that plans."""
    shape = drafting.drafter_shape(make_workload("llama3_8b", "v5e:2x4", method="auto"))
    assert (*shape.traits.widths, shape.num_nodes) == WIDTHS


def test_options_reach_the_drafter():
    work = workload(method="lookahead", options=(("guesses", "2"), ("ngram", "4")))
    assert drafting.drafter_shape(work).num_nodes < drafting.drafter_shape(workload(method="lookahead")).num_nodes
    assert describe(work)["options"] == {"guesses": "2", "ngram": "4"}


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        ({"head": "kangaroo:exit_layer=3"}, 3 / 30),
        ({"head": "hidden_transfer:behind=20"}, 10 / 30),
        ({"head": "eagle3"}, 1.0),
        ({"method": "early_exit"}, 0.25),
        ({"method": "early_exit", "options": {"exit_layer": "6"}}, 6 / 30),
        ({"method": "swift", "options": {"ratio": "0.6"}}, 0.4),
        ({"method": "prompt_lookup"}, 1.0),
    ],
)
def test_how_much_of_the_target_a_draft_runs(changes, share):
    assert drafting.share_of_layers(make_workload("smollm2_135m", "v5e:1x1", **changes)) == pytest.approx(share)
