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


@pytest.fixture(scope="module", autouse=True)
def release_programs():
    """Forget compiled programs after each file: thousands of them exhaust the memory maps of a process."""
    import jax  # after the flags are set

    yield
    jax.clear_caches()
    gc.collect()
