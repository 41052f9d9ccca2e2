"""ParallelBench's tasks: their answers, and how often independent draws are right."""

import math

import numpy as np
import pytest
from tiers import exhaustive
from toy_tasks import parallel_bench as bench
from toy_tasks import parallel_bench_grid as grid

import specjax
from specjax.diffusion import methods


@pytest.mark.parametrize("name", bench.TASKS_BY_NAME)
def test_a_right_answer_is_right_and_a_changed_one_is_wrong(name):
    task, rng = bench.TASKS_BY_NAME[name], np.random.default_rng(0)
    for draw in (task.draw, lambda rng: bench.training_item(rng, name)):
        for _ in range(20):
            item = draw(rng)
            assert task.is_right(item.prompt, item.answer)
            assert bench.answer_of(bench.pad_answer(item.answer)) == item.answer
            assert len(item.answer) + (len(item.answer) % bench.BLOCK > 0) == task.columns
            assert not task.is_right(item.prompt, (*item.answer[:-1], bench.NOTHING))
            assert not task.is_right(item.prompt, item.answer[:-1])
    assert len(bench.SQUARES) == 576 and len(bench.SUDOKUS) == 288


def test_what_independent_draws_from_the_right_marginals_give():
    assert [round(bench.shuffle_together(n), 4) for n in (3, 4, 5, 6)] == [0.224, 0.0919, 0.0381, 0.0154]
    assert bench.TASKS_BY_NAME["replace"].together == pytest.approx(0.4019, abs=1e-4)
    rng = np.random.default_rng(0)
    draws = [tuple(rng.choice([0, 1, 1, 1, 1, 1]) for _ in range(6)) for _ in range(4000)]  # 0: gives way
    assert np.mean([sum(x == 0 for x in draw) == 1 for draw in draws]) == pytest.approx(0.4019, abs=0.025)


LEVELS = {
    "copy": (1, 1, 1, 1),
    "reverse": (1, 1, 1, 1),
    "shuffle": (0.2240, 0.0919, 0.0381, 0.0154),
    "insert": (0.1875, 0.1229, 0.0823, 0.0560),
    "remove": (0.8889, 0.7500, 0.6144, 0.4938),
    "replace": (0.4444, 0.4219, 0.4096, 0.4019),
}
"""What one pass reaches that draws all columns from exact marginals, for lists of 3 to 6 names."""


@pytest.mark.parametrize("task", LEVELS)
def test_levels_of_the_grid(task):
    assert [round(grid.together(grid.GRID[task](n)), 4) for n in grid.SIZES] == pytest.approx(LEVELS[task])


@pytest.mark.parametrize("task", ["insert", exhaustive("shuffle"), exhaustive("remove")])
def test_an_exact_model_is_right_one_by_one_and_at_its_level_all_at_once(task):
    answers = grid.GRID[task](4)
    denoiser, count, size = grid.exact(answers), 1500, len(answers[0])
    right = {}
    for steps in (None, 1):
        way = methods.llada(denoiser, block=None, steps=steps)
        options = {"key": 3, "max_new_tokens": size, "temperature": 1.0}
        texts = specjax.denoise(denoiser, way, [[bench.NOTHING]] * count, **options).to_lists()
        right[steps] = np.mean([tuple(text) in set(answers) for text in texts])
    level = grid.together(answers)
    assert right[None] == 1.0
    assert abs(right[1] - level) < 3.5 * math.sqrt(level * (1 - level) / count)


def test_a_threshold_decides_together_only_what_is_determined():
    """The last two names of a shuffle may be decided together: once one of them is decided the other one is sure."""
    answers = grid.GRID["shuffle"](4)
    denoiser = grid.exact(answers)
    way = methods.fast_dllm(denoiser, block=None, tau=0.9)
    result = specjax.denoise(denoiser, way, [[bench.NOTHING]] * 64, key=1, max_new_tokens=4, temperature=1.0)
    assert all(tuple(text) in set(answers) for text in result.to_lists())
    assert set(np.asarray(result.stats.target_passes).tolist()) <= {3, 4}
