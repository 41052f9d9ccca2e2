"""Drafters that run a part of the target's own layers."""
