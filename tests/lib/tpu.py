"""Devices of TPUs that are not here, to compile for."""

from __future__ import annotations

import functools
import importlib.util

import pytest


@functools.cache
def devices(topology: str = "v5e:2x2") -> tuple:
    """The devices of a slice such as "v5e:2x2"; skips the test, by the compiler's name, where libtpu is missing."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed (pip install 'specjax[tpu-compile]')")
    from specjax.planning.inputs import topologies

    return tuple(topologies.describe_devices(topologies.parse_topology(topology)))
