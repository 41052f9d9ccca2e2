"""Kernels, each with a plain-jnp `reference` and an argument `implementation`: None runs everywhere, or a name."""
