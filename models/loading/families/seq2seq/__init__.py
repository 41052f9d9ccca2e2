"""Encoder-decoder families."""
