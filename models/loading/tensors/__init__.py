"""Stored tensors: formats on disk and assembly into parameters."""
