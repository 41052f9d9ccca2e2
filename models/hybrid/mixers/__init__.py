"""Mixers of recurrent layers."""
