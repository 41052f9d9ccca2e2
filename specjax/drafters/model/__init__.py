"""Drafters that ask a second model."""
