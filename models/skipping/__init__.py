"""Layers that tokens skip: depth policies, and the layer loop that runs them for attention models."""
