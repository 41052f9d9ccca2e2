"""The programs that JAX compiles within a context."""

import contextlib
import threading

import jax.monitoring


@contextlib.contextmanager
def compiled_programs():
    """Yield a list that gets the name of each program that this thread compiles.

    Threads of earlier tests may still compile theirs, such as that of an engine that is asked to stop.
    """
    programs, caller = [], threading.get_ident()

    def listen(event, duration, **more):
        if "backend_compile" in event and threading.get_ident() == caller:
            programs.append(str(more.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield programs
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
