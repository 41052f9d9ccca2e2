"""Drafters that keep what the target computed in passing."""
