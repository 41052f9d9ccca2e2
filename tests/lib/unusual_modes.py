"""The modes of JAX that research code sets and that change how programs are traced."""

import contextlib

import jax


@contextlib.contextmanager
def unusual_modes():
    """64-bit types, no promotion of dtypes, and none of ranks."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield
