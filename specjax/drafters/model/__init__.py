"""Drafters that run a second model."""
