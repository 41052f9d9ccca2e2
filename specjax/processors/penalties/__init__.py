"""Penalties for tokens that the text already contains."""
