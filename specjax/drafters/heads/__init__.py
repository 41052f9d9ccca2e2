"""Drafters that are learned heads, and what they share with the loop: `learned`."""
