"""Eight fake devices on CPU, exact float32, and quick compilation: the tests compile far more than they compute.

With `JAX_PLATFORMS=cuda,cpu` the tests run on one GPU. Those that need more devices, or what a GPU does not have, are
skipped there, and the reason names it.
"""

import gc
import itertools
import os
import re

import hypothesis
import pytest
from quick_compile import flags, share_contexts
from tiers import is_repeated

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Where each operation is from need not be known (two files: 64 s of CPU time with it, 57 without).
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
if os.environ["JAX_PLATFORMS"] != "cpu":  # oracles multiply float32 numbers outside of the library's programs
    os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
DEVICES = int(os.environ.get("SPECJAX_TEST_DEVICES", "8"))
# The quick flags are for CPUs. They leave out passes such as "gemv-rewriter", which gives products on GPUs the
# dimensions that XLA's kernels need.
quick = os.environ["JAX_PLATFORMS"] == "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags(devices=DEVICES, quick=quick)}"
share_contexts()  # imports JAX, which reads the variables above


# The same examples in every run; HYPOTHESIS_PROFILE=default looks for new ones.
hypothesis.settings.register_profile("repeatable", derandomize=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

# Tracing makes many objects and few cycles: the fixture below collects them with the programs (three folders: 88 s of
# CPU time with the collector running, 74 s without).
gc.disable()

MISSING = re.compile(
    r"needs \d+ devices, but there are \d+"  # `specjax.mesh`
    r"|Number of devices \d+ must be [^\n]*"  # `jax.make_mesh`
    r"|devices\(\)\[[^\n]*(?=\n(.*\n)*E +IndexError)"
    r"|same_bits was not shown to hold on the backend \"\w+\""
)
"""Errors of tests that need fake devices, or a backend with `same_bits`."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Skip a test that failed because this machine has fewer devices than the fake ones, or another backend."""
    report = yield
    if report.failed and call.excinfo is not None:
        import jax

        cause = MISSING.search(report.longreprtext)
        if cause and (jax.device_count() < 8 or jax.default_backend() != "cpu"):
            path, line, _ = item.location
            report.outcome, report.longrepr = "skipped", (path, line, f"Skipped: {cause.group()}")
    return report


LOOK = 16  # every so many tests; looking takes 5 ms once there are many (of the verifiers' tests 4 % of the time)
MAPS = 16_000  # a quarter of what Linux gives a process by default, and some 4 GB; every compiled program takes some
TESTS = itertools.count(1)


@pytest.fixture(autouse=True)
def release_programs():
    """Forget compiled programs once there are many: out of memory maps, a process aborts. Files share the others."""
    import jax  # after the flags are set

    yield
    if next(TESTS) % LOOK == 0 and memory_maps() > MAPS:
        jax.clear_caches()
        gc.collect()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Before the tests of other tiers are left out."""
    for item in items:
        if is_repeated(item.nodeid):
            item.add_marker(pytest.mark.exhaustive)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Tests that share programs stay in one process: those of a file or, in the conformance suite, of a method."""
    from xdist.scheduler import LoadFileScheduling

    class BySharedPrograms(LoadFileScheduling):
        def _split_scope(self, nodeid):
            method = re.search(r"test_methods\.py::.*\[([a-z_]+)", nodeid)
            return nodeid.split("::")[0] + (method.group(1) if method else "")

    return BySharedPrograms(config, log) if config.getoption("dist") == "loadfile" else None


def memory_maps() -> int:
    """Return the number of memory maps of this process, or 0 where the system has no list of them."""
    try:
        with open("/proc/self/maps") as maps:
            return sum(1 for _ in maps)
    except OSError:
        return 0
