"""Tests of the step from totals to seconds."""

from __future__ import annotations

import dataclasses

import pytest

from specjax.costs import roofline
from specjax.costs.chips import CHIPS

CHIP = dataclasses.replace(CHIPS["v5e"], hbm_bandwidth=1e9, peak_flops=1e12, flops_per_cycle=1000, link_bandwidth=1e9)


def test_seconds_of_a_program():
    reduce = roofline.Collective("all-reduce", count=10, bytes=8e6, wire_bytes=14e6, group=8)
    totals = roofline.Totals(2e6, 5e9, 4e6, 100, roofline.Kernel(3, 1e9, 1e6), (reduce,))
    seconds = roofline.estimate(CHIP, totals, must_bytes=3e6)
    ring = 14e6 / 2e9 + 10 * 4 * 1e-6  # both directions, half the ring per collective
    assert seconds.memory == pytest.approx(3e-3) and seconds.compute == pytest.approx(5e-3)
    assert seconds.collectives == pytest.approx(ring)
    assert seconds.roofline == pytest.approx(5e-3 + ring)
    assert seconds.schedule == pytest.approx(2e6 / 1e9 + 1e-3 + ring)
    # Weights kept on the chip are moved once.
    assert roofline.estimate(CHIP, totals, must_bytes=9e6).memory == pytest.approx(4e-3)


@pytest.mark.parametrize(("chip", "peak"), [("v5e", 197e12 / 6), ("h200", 67e12)])
def test_float32_products_have_a_peak_of_their_own(chip, peak):
    totals = roofline.Totals(0, 5e12, 0, 0, roofline.Kernel(0), (), float32_flops=4e12)
    seconds = roofline.estimate(CHIPS[chip], totals, must_bytes=0)
    assert seconds.compute == pytest.approx(1e12 / CHIPS[chip].peak_flops + 4e12 / peak)
    assert seconds.roofline == seconds.compute and (chip == "v5e" or seconds.schedule == seconds.compute)


def test_a_kernel_runs_on_one_core_of_a_megacore():
    """It has half of the peak and of the bandwidth; what XLA makes has both cores."""
    totals = roofline.Totals(2e6, 5e9, 4e6, 100, roofline.Kernel(3, 1e9, 1e6), ())
    one, two = (roofline.estimate(dataclasses.replace(CHIP, cores=n), totals, must_bytes=3e6) for n in (1, 2))
    assert two.schedule - one.schedule == pytest.approx(1e-3)
    assert two.roofline == one.roofline


def test_one_device_has_nothing_to_send():
    assert roofline.collective_seconds(CHIP, roofline.Collective("all-reduce", 3, 1e6, 1e6, group=1)) == 0


def test_a_gpu_waits_for_launches_and_conditions():
    """The time by hand is bytes at the bandwidth that is reached, 100 kernels, 7 conditions, and 14 steps of a ring of
    8."""
    chip = CHIPS["h200"]
    reduce = roofline.Collective("all-reduce", count=10, bytes=8e6, wire_bytes=9e6, group=8)
    gather = roofline.Collective("all-gather", count=1, bytes=0, wire_bytes=0, group=8)
    totals = roofline.Totals(0, 5e9, 4e9, 100, roofline.Kernel(0), (reduce, gather), condition_reads=7)
    seconds = roofline.estimate(chip, totals, must_bytes=3e9)
    links = 9e6 / 450e9 + 10 * (6.6e-6 + 14 * 0.6e-6) + 6.6e-6 + 7 * 0.6e-6
    assert seconds.collectives == pytest.approx(links)
    assert seconds.roofline == pytest.approx(3e9 / 4.8e12 + links)
    assert seconds.schedule == pytest.approx(4e9 / (0.83 * 4.8e12) + 100 * 0.92e-6 + 7 * 15e-6 + links)
    assert roofline.clocks_of(chip)["schedule"] != roofline.clocks_of(CHIP)["schedule"]
