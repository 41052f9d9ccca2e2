"""Comparison of acceptance rules on given distributions."""
