"""A head that is fitted to a few texts serves as many tokens as it drafts, and training says so before it is served."""

import functools

import heads
import jax
import numpy as np
import pytest
import toy

import specjax
from specjax.models.heads.kinds import init_head
from specjax.training.lessons import Text
from specjax.training.loop import train
from specjax.training.recipes import recipe_of
from specjax.training.served import served

NEW, DEPTHS = 24, 3


@functools.cache
def target():
    return toy.tiny_llama(layers=3)


@functools.cache
def texts() -> list[Text]:
    """Four prompts, and what the target writes."""
    prompts = np.random.default_rng(0).integers(1, 60, (4, 6)).tolist()
    result = specjax.decode(target(), None, prompts, key=0, max_new_tokens=NEW)
    return [Text((*prompt, *text), len(prompt)) for prompt, text in zip(prompts, result.to_lists(), strict=True)]


@pytest.mark.parametrize("kind", ["eagle3", "medusa", "dflash"])
def test_fitted_to_four_texts_it_serves_all_that_it_drafts(kind):
    head = init_head(kind, heads.config_of(kind, target()), jax.random.key(1))
    recipe = recipe_of(kind, depths=DEPTHS, learning_rate=5e-3, losses=(("ce", 1.0),), decay=1.0, weighting="decay")
    fitted = train(target(), head, texts(), recipe=recipe, epochs=300, rows=2, length=64)
    said = served(target(), fitted, texts(), depths=DEPTHS, rows=2, length=64)
    drafter = specjax.make_drafter(kind, target(), fitted, num_tokens=DEPTHS)
    prompts = [list(text.tokens[: text.answer]) for text in texts()]
    result = specjax.decode(target(), drafter, prompts, key=0, max_new_tokens=NEW)
    assert [tuple(text) for text in result.to_lists()] == [text.tokens[text.answer :] for text in texts()]
    assert said.passes == int(np.sum(result.stats.target_passes))
    assert said.per_pass > DEPTHS + 0.9
