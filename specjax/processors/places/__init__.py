"""Processors that restrict tokens by their place in the answer, or by their place in an image."""
