"""The published figures of chips."""

from __future__ import annotations

import re

import pytest

from specjax.costs.chips import CHIPS
from specjax.files.sizes import GIB, MIB
from specjax.planning.inputs.gpu_targets import target_config


def test_clocks_are_those_of_the_chips():
    """Peak over the work of a cycle: 1.05 and 1.75 GHz are published of v4 and v5p, 1.5 of v5e, 1.83 of GPUs."""
    clocks = {name: round(chip.clock / 1e9, 2) for name, chip in CHIPS.items()}
    assert clocks == {"v4": 1.05, "v5e": 1.5, "v5p": 1.75, "v6e": 1.75, "tpu7x": 2.2, "h200": 1.83, "h100": 1.83}


TPUS = [chip for chip in CHIPS.values() if chip.platform == "tpu"]
GPUS = [chip for chip in CHIPS.values() if chip.platform == "gpu"]


@pytest.mark.parametrize("chip", GPUS, ids=lambda chip: chip.name)
def test_every_figure_of_a_gpu_is_what_its_source_says(chip):
    """The compiler's own description of the device has most of them, and data sheets the rest."""
    described = lambda field: float(re.search(rf"(?m)^ *{field}: ([\d.]+)", target_config(chip.name))[1])
    assert chip.hbm_bytes == described("device_memory_size")
    assert chip.hbm_bandwidth == pytest.approx(described("memory_bandwidth"), rel=4e-3)
    assert chip.vmem_bytes == described("shared_memory_per_block_optin")
    units = re.search(r"(\d+) cores of (\d+) units with (\d+) products", chip.sources["flops_per_cycle"])
    assert chip.flops_per_cycle == 2 * int(units[1]) * int(units[2]) * int(units[3]) and int(units[1]) == described(
        "core_count"
    )
    figure = lambda name, pattern: float(re.search(pattern, chip.sources[name])[1].replace(",", ""))
    assert chip.peak_flops == figure("peak_flops", r"([\d,]+) TFLOPS") * 1e12 / 2
    assert chip.float32_flops == figure("float32_units", r"(\d+) TFLOPS \(FP32") * 1e12
    assert 2 * 18 * chip.link_bandwidth == figure("link_bandwidth", r"(\d+) GB/s both ways") * 1e9
    assert (chip.start_seconds, chip.hop_seconds) == pytest.approx(
        (figure("latency", r"([\d.]+) us") * 1e-6, figure("latency", r"and ([\d.]+) us per step") * 1e-6)
    )
    measured = chip.sources["launches"]
    small, kernels = re.search(r"([\d.]+) ms for (\d+) small kernels", measured).groups()
    waited, reads = re.search(r"([\d.]+) ms for (?:the )?(\d+) condition reads", measured).groups()
    assert chip.launches.kernel_seconds == pytest.approx(float(small) / float(kernels) * 1e-3, rel=0.01)
    assert chip.launches.read_seconds == pytest.approx(float(waited) / float(reads) * 1e-3, rel=0.03)
    assert all(re.search(r"nvidia.com|openxla|NCCL|measured|config|132 cores", text) for text in chip.sources.values())


@pytest.mark.parametrize("chip", TPUS, ids=lambda chip: chip.name)
def test_every_figure_is_what_its_source_says(chip):
    """Each figure is that of its source. Sources are per chip, and tpu7x has two devices per chip; `hbm_bytes`, VMEM
    and links are per device already."""
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
        quote = re.search(pattern, chip.sources[name])
        assert quote is not None, name
        assert value == pytest.approx(float(quote[1]) * unit, rel=1e-3), name
