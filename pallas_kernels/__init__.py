"""Pallas kernels, each with a jnp `reference` and an argument `implementation`. The default, None, runs anywhere."""
