"""The time that a call spends on compiling, and the rest."""

import itertools
import threading
import time

import jax
import jax.numpy as jnp
import pytest

from specjax.bench.compilation import PREFIX, Stopwatch

NUMBERS = itertools.count()


def compile_slowly():
    """Trace and compile a new function for 0.1 s or more, and run it."""
    number = next(NUMBERS)

    @jax.jit
    def function(x):
        time.sleep(0.1)
        return x + number

    function(jnp.ones(3)).block_until_ready()


def test_a_call_that_compiles_and_computes():
    start = time.perf_counter()
    with Stopwatch() as watch:
        compile_slowly()
        time.sleep(0.2)
    total = time.perf_counter() - start
    assert watch.compile_seconds > 0.1 and 0.2 < watch.seconds <= total - watch.compile_seconds


def test_what_is_compiled_outside_does_not_count():
    compile_slowly()
    with Stopwatch() as watch:
        time.sleep(0.01)
    compile_slowly()
    assert watch.compile_seconds == 0 and watch.seconds > 0.01


@pytest.mark.parametrize("is_own", [True, False])
def test_threads_that_start_within_compile_for_the_call(is_own):
    begin = threading.Event()
    thread = threading.Thread(target=lambda: begin.wait() and compile_slowly())
    if not is_own:
        thread.start()
    with Stopwatch() as watch:
        if is_own:
            thread.start()
        begin.set()
        thread.join()
    assert (watch.compile_seconds > 0.1) == is_own and watch.seconds > (0 if is_own else 0.1)


def test_a_clock_that_is_set_makes_no_time_negative():
    with Stopwatch() as watch:
        watch._record(PREFIX + "backend_compile_duration", 0.0, 3600.0)
        watch._record(PREFIX + "backend_compile_duration", 3600.0, 0.0)
        time.sleep(0.01)
    assert watch.seconds > 0.01
