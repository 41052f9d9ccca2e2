"""Timed runs, and the records of their results."""
