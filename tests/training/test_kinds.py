"""Every kind of head can be trained by its own recipe."""

import jax
import numpy as np
import pytest
from tiers import those
from training_runs import head_of, recipe, target, texts

from specjax.errors import UsageError
from specjax.models.heads.kinds import TRAINABLE
from specjax.training.loop.trainer import train
from specjax.training.objectives.recipes import RECIPES


def test_every_kind_has_a_recipe():
    assert set(RECIPES) >= set(TRAINABLE)


@pytest.mark.parametrize("kind", those(("ppd",), TRAINABLE))
def test_three_steps_by_its_own_recipe_move_it(kind):
    head, progress_log = head_of(kind), []
    fitted = train(
        target(),
        head,
        texts()[:2],
        epochs=3,
        rows=2,
        length=32,
        starts_per_row=4,
        chunk=2,
        on_progress=progress_log.append,
    )
    assert len(progress_log) == 3 and all(np.isfinite(progress.loss) for progress in progress_log)
    moved = jax.tree.map(lambda old, new: bool(np.any(old != new)), head.params, fitted.params)
    assert any(jax.tree.leaves(moved))
    if kind == "dspark":
        assert not moved["confidence"]["temperatures"], "they are calibrated, not trained"


def test_a_recipe_asks_for_what_the_head_says():
    for share in ("features", "confidence"):
        with pytest.raises(UsageError, match=f"medusa predicts no {share}, but the recipe has {share}=1.0"):
            train(target(), head_of("medusa"), texts(), recipe=recipe("medusa", **{share: 1.0}), rows=2, length=32)
