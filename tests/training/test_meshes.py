"""A step over a mesh of eight devices is that of one."""

import functools

import jax
import numpy as np
import pytest
from training_runs import head_of, recipe, target, texts

import specjax
from specjax.training.loop.head_init import new_head
from specjax.training.loop.step import train_step
from specjax.training.loop.trainer import train
from specjax.training.measure.acceptance_eval import measure_acceptance


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("data, model", [(4, 2)])
def test_losses_and_parameters_are_those_of_one_device(data, model, optimizer):
    losses = {}

    def run(who, **options):
        run_losses = losses.setdefault(who, [])
        return train(
            (who == "one" and target()) or spread(), head_of("eagle3"), texts(), recipe=recipe(optimizer=optimizer),
            epochs=3, rows=4, length=32, on_progress=lambda progress: run_losses.append(progress.loss), **options,
        )  # fmt: skip

    @functools.cache
    def spread():
        return specjax.shard(target(), specjax.mesh(data=data, model=model))

    alone, num_programs = run("one"), train_step._cache_size()
    many = run("many")
    assert train_step._cache_size() == num_programs + 1, "the second step is the program of the first"
    np.testing.assert_allclose(losses["many"], losses["one"], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), many.params, alone.params)
    shape = {"depths": 3, "rows": 4, "length": 32}
    assert measure_acceptance(spread(), many, texts(), **shape) == measure_acceptance(target(), alone, texts(), **shape)


def test_rows_that_the_mesh_does_not_divide_are_refused():
    spread = specjax.shard(target(), specjax.mesh(data=8))
    with pytest.raises(specjax.UsageError, match='rows=4 cannot be split over the 8 devices of "data"'):
        train(spread, head_of("eagle3"), texts(), rows=4, length=32)


def test_a_head_cannot_begin_with_heads_that_a_mesh_repeats():
    """Two key/value heads over four devices; at random it can."""
    config, spread = head_of("eagle3").head.config, specjax.shard(target(), specjax.mesh(1, 4))
    with pytest.raises(specjax.UsageError, match="the mesh repeats key/value heads of llama"):
        new_head("eagle3", config, spread, jax.random.key(0))
    new_head("eagle3", config, spread, jax.random.key(0), random=True)
    new_head("eagle3", config, specjax.shard(target(), specjax.mesh(2, 2)), jax.random.key(0))
