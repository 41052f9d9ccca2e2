"""Drafters that join or choose among others."""
