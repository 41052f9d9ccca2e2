"""The published figures of chips."""

from __future__ import annotations

import re

import pytest

from specjax.costs.chips import CHIPS, GIB, MIB


def test_clocks_are_those_of_the_chips():
    """Peak over the work of a cycle: 1.05 and 1.75 GHz are published of v4 and v5p, 1.5 of v5e."""
    clocks = {name: round(chip.clock / 1e9, 2) for name, chip in CHIPS.items()}
    assert clocks == {"v4": 1.05, "v5e": 1.5, "v5p": 1.75, "v6e": 1.75, "tpu7x": 2.2}


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_every_figure_is_what_its_source_says(chip):
    """Of a chip, of which tpu7x has two devices; `hbm_bytes`, VMEM and links are those of a device already."""
    figures = {
        "hbm_bytes": (r"available HBM ([\d.]+)G", GIB, chip.hbm_bytes),
        "hbm_bandwidth": (r"(\d+) GBps", 1e9, chip.hbm_bandwidth * chip.devices_per_chip),
        "peak_flops": (r"(\d+) (?:TFLOPs|teraflops)", 1e12, chip.peak_flops * chip.devices_per_chip),
        "link_bandwidth": (r"(\d+) GBps both ways", 1e9 / (4 * chip.dimensions), chip.link_bandwidth),
        "vmem_bytes": (r"(\d+) MiB", MIB, chip.vmem_bytes),
    }
    assert chip.sources.keys() == {*figures, "flops_per_cycle", "cores"}
    assert all(re.search(r"docs.cloud|scaling-book|tpu_info.py|libtpu", text) for text in chip.sources.values())
    if chip.name == "v4":  # its page gives the sums over 4096 chips only, of which each sends 6 links' worth
        figures["link_bandwidth"] = (r": ([\d.e]+) one way", 1, chip.link_bandwidth)
        assert 4096 * 6 * chip.link_bandwidth == pytest.approx(1.1e15, rel=0.01)
    for name, (pattern, unit, value) in figures.items():
        said = re.search(pattern, chip.sources[name])
        assert said is not None, name
        assert value == pytest.approx(float(said[1]) * unit, rel=1e-3), name
