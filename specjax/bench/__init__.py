"""Timed runs and what is reported of them."""
