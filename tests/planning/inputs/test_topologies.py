"""Slices of chips by name."""

from __future__ import annotations

import pytest

from specjax import UsageError
from specjax.planning.inputs.topologies import describe_devices, known_topologies, larger, parse_topology


@pytest.mark.parametrize(
    ("name", "devices"),
    [("v5e:1x1", 1), ("v5e:2x4", 8), ("v6e:16x16", 256), ("v4:2x2x1", 4), ("tpu7x:2x2x1", 8), ("v5p:4x4x8", 128)],
)
def test_topologies(name, devices):
    topology = parse_topology(name)
    assert topology.name == name and topology.num_devices == devices


@pytest.mark.parametrize(
    "name", ["", "v5e", "v5e:", "v5e:2x2x1", "v5e:3x3", "v5e:0x2", "v5e:32x32", "v9:2x2", "v5p:2x2", "v5e:2xx2"]
)
def test_unknown_topologies_are_refused_with_the_known_ones(name):
    with pytest.raises(UsageError, match=r"(?s)--topology.*2x2"):
        parse_topology(name)


def test_known_topologies_parse():
    assert [parse_topology(name).name for name in known_topologies()] == known_topologies()


def test_larger_slices_end():
    topology, seen = parse_topology("v5e:1x1"), []
    while (topology := larger(topology)) is not None:
        seen.append(topology.num_devices)
    assert seen == [4, 8, 16, 32, 64, 128, 256]


def test_missing_compiler_names_the_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'specjax\[tpu-compile\]'"):
        describe_devices(parse_topology("v5e:2x2"))
