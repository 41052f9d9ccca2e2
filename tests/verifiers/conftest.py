"""Shared by the modules of the lossy rules."""

import jax
import pytest


@pytest.fixture(scope="module")
def quick_compilation():
    """The programs are small: compiling them is all the time that these tests take."""
    setting = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", setting)
