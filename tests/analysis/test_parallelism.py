"""Measures of parallelism, worked by hand, and the tasks."""

import math

import numpy as np
import pytest

from specjax.analysis import parallel_bench as bench
from specjax.analysis.parallelism import aup, global_ar_ness, local_ar_ness, wilson


def test_ar_ness():
    assert local_ar_ness([0, 1, 2, 3]) == global_ar_ness([0, 1, 2, 3]) == 1
    assert local_ar_ness([3, 2, 1, 0]) == 0 and global_ar_ness([3, 2, 1, 0]) == 0.25
    assert local_ar_ness([0, 2, 3, 1]) == pytest.approx(1 / 3)  # order 0, 3, 1, 2
    assert global_ar_ness([0, 2, 3, 1]) == 0.75 and global_ar_ness([0, 2, 3, 1], 3) == 1
    assert local_ar_ness([0, 0, 0]) == 0 and global_ar_ness([0, 0, 0]) == pytest.approx(1 / 3)
    assert local_ar_ness([0, 1, 2, 3], 2) == 1 and math.isnan(local_ar_ness([0]))


def test_area_under_accuracy():
    assert aup([(1, 80), (3, 80)]) == pytest.approx(240)
    assert aup([(3, 70), (1, 80)]) == 80, "more than five points below do not count"
    weight = math.exp(-3 * (1 - 76 / 80))
    assert aup([(1, 80), (2, 76)]) == pytest.approx(80 + (76 * weight + 80) / 2)
    assert aup([(1, 0), (2, 0)]) == 0


def test_wilson():
    low, high = wilson(50, 100)
    assert (low, high) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    assert wilson(64, 64)[1] == 1 and wilson(64, 64)[0] == pytest.approx(0.9434, abs=1e-4)


@pytest.mark.parametrize("name", bench.TASKS_BY_NAME)
def test_a_right_answer_is_right_and_a_changed_one_is_wrong(name):
    task, rng = bench.TASKS_BY_NAME[name], np.random.default_rng(0)
    for draw in (task.draw, lambda rng: bench.lesson_item(rng, name)):
        for _ in range(20):
            item = draw(rng)
            assert task.is_right(item.prompt, item.answer)
            assert bench.answer_of(task, bench.filled(item.answer)) == item.answer
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
