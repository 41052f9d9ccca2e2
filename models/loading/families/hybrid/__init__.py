"""Families of hybrid decoders, one module each."""
