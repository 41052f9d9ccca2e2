"""Eight fake devices on CPU, exact float32, and quick compilation: the tests compile far more than they compute."""

import gc
import os

import pytest

FLAGS = (
    "--xla_force_host_platform_device_count=8",
    # A third of the compile time (two tree builders: 162 s with LLVM's optimisations, 51 s without).
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *FLAGS))


MAPS = 30_000  # half of what Linux gives a process by default; every compiled program takes some


@pytest.fixture(autouse=True)
def release_programs(request):
    """Forget compiled programs after each file, and within one that has many: out of memory maps, a process aborts."""
    import jax  # after the flags are set

    yield
    following = getattr(request.node, "nextitem", None)
    if memory_maps() > MAPS or following is None or following.path != request.path:
        jax.clear_caches()
        gc.collect()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Tests that share programs stay in one process: those of a file or, in the conformance suite, of a method."""
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        method = params.get("name", "") if item.path.stem == "test_methods" else ""
        item.add_marker(pytest.mark.xdist_group(f"{item.path.stem}:{method}"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    item.nextitem = nextitem


def memory_maps() -> int:
    """Of this process; 0 where the system does not say."""
    try:
        with open("/proc/self/maps") as maps:
            return sum(1 for _ in maps)
    except OSError:
        return 0
