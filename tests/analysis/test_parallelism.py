"""Measures of parallelism, worked by hand."""

import math

import pytest

from specjax.analysis import aup, global_ar_ness, local_ar_ness, wilson_interval


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


def test_wilson_interval():
    low, high = wilson_interval(50, 100)
    assert (low, high) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    assert wilson_interval(64, 64)[1] == 1 and wilson_interval(64, 64)[0] == pytest.approx(0.9434, abs=1e-4)
