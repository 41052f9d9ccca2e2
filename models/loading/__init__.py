"""Loaders: checkpoints of the world into specjax parameters."""
