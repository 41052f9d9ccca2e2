"""Recipes: the depths that a head of each kind is trained on."""

import functools

import pytest
import toy
from training_runs import head_of, target, texts

from specjax.errors import UsageError
from specjax.models.heads.kinds import KINDS, TRAINABLE, abstract_head
from specjax.training.loop.trainer import train
from specjax.training.objectives.recipes import RECIPES, recipe_of
from specjax.training.objectives.trainables import build_head_objective


@functools.cache
def config():
    return toy.tiny_llama(layers=3).model.config


def depths_of(kind: str, **changes) -> tuple[int, int | None]:
    """Return the trained depths of a new head, and its limit."""
    head = abstract_head(kind, KINDS[kind].of_target(config(), **changes)).head
    return build_head_objective(head).depths(recipe_of(kind)), head.max_depth


@pytest.mark.parametrize("kind", TRAINABLE)
def test_a_new_head_is_trained_on_all_tokens_that_it_drafts(kind):
    depths, limit = depths_of(kind)
    assert depths == limit or limit is None
    assert RECIPES[kind].depths is None, "a fixed number would leave a larger head untrained"


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("dflash", {}, 15), ("jetspec", {}, 15), ("dflash2", {}, 15), ("domino", {}, 16), ("dspark", {}, 7),
        ("dflash", {"block_size": 32}, 31),
        ("medusa", {"num_heads": 6}, 6), ("hydra", {"num_heads": 6}, 6), ("chimera", {"num_heads": 5}, 5),
        ("hidden_transfer", {"num_heads": 6}, 6), ("ppd", {"num_prompts": 7}, 7),
        ("mlp_speculator", {"num_heads": 5}, 5),
        ("p_eagle", {"depths": 12}, 12), ("hamburger", {"segment": 6}, 5), ("clover", {"num_heads": 9}, 9),
        ("falcon", {"block_size": 6}, 12), ("eagle3", {}, 7), ("kangaroo", {}, 1),
    ],
)  # fmt: skip
def test_depths_follow_from_the_shape_of_the_head(kind, changes, expected):
    assert depths_of(kind, **changes)[0] == expected


def test_more_depths_than_the_head_drafts_are_refused():
    with pytest.raises(UsageError, match=r"depths=9 is more than the [0-9]+ tokens that medusa drafts; lower it"):
        train(target(), head_of("medusa"), texts(), recipe=recipe_of("medusa", depths=9), rows=2, length=64)
