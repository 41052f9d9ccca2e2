"""Kernels. Each has a plain-jnp `reference`, and an `implementation=None | name` argument: None works everywhere."""
