"""Slices of chips by name."""

from __future__ import annotations

import os

import pytest

from specjax import UsageError
from specjax.files import cuda_compiler
from specjax.planning.inputs.gpu_targets import target_config
from specjax.planning.inputs.topologies import describe_devices, known_topologies, larger, parse_topology


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("v5e:1x1", 1),
        ("v5e:2x4", 8),
        ("v6e:16x16", 256),
        ("v4:2x2x1", 4),
        ("tpu7x:2x2x1", 8),
        ("v5p:4x4x8", 128),
        ("h200:1", 1),
        ("h100:8", 8),
        ("h200:3", 3),
    ],
)
def test_topologies(name, devices):
    topology = parse_topology(name)
    assert topology.name == name and topology.num_devices == devices


@pytest.mark.parametrize(
    "name",
    [
        "",
        "v5e",
        "v5e:",
        "v5e:2x2x1",
        "v5e:3x3",
        "v5e:0x2",
        "v5e:32x32",
        "v9:2x2",
        "v5p:2x2",
        "v5e:2xx2",
        "h200:9",
        "h200:2x2",
        "h200",
    ],
)
def test_unknown_topologies_are_refused_with_the_known_ones(name):
    with pytest.raises(UsageError, match=r"(?s)--topology.*(2x2|1,2,4,8)"):
        parse_topology(name)


def test_known_topologies_parse():
    assert [parse_topology(name).name for name in known_topologies()] == known_topologies()


def test_larger_slices_end():
    topology, sizes = parse_topology("v5e:1x1"), []
    while (topology := larger(topology)) is not None:
        sizes.append(topology.num_devices)
    assert sizes == [4, 8, 16, 32, 64, 128, 256]


@pytest.mark.parametrize(("name", "extra"), [("v5e:2x2", "tpu-compile"), ("h200:1", "gpu-compile")])
def test_missing_compiler_names_the_extra(monkeypatch, name, extra):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=rf"pip install 'specjax\[{extra}\]'"):
        describe_devices(parse_topology(name))


def test_the_target_of_an_h100_is_that_of_an_h200_with_other_memory():
    texts = [target_config(name).splitlines() for name in ("h200", "h100")]
    changed = {line.split(":")[0].strip() for line, other in zip(*texts, strict=True) if line != other}
    assert changed - {"mem_clock_ghz"} == {  # which jax 0.10 does not accept
        "memory_bandwidth", "l2_cache_size", "device_memory_size", "name", "device_description_str",
        "model_str",
    }  # fmt: skip


def test_the_compiler_loads_without_a_gpu_and_nothing_changes_with_one(monkeypatch):
    monkeypatch.setattr(cuda_compiler, "is_installed", lambda: True)
    for devices, value in ((["/dev/nvidia0"], None), ([], "1")):
        monkeypatch.delenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", raising=False)
        monkeypatch.setattr(cuda_compiler.glob, "glob", lambda pattern, devices=devices: devices)
        cuda_compiler.prepare_environment()
        assert os.environ.get("JAX_SKIP_CUDA_CONSTRAINTS_CHECK") == value
