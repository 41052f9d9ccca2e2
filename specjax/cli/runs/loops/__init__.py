"""Runs of methods with decoding loops of their own: checks of flags, texts, and any-order models."""
