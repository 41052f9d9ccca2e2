"""Families with multi-head latent attention."""
