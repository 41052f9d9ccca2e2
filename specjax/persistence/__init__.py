"""Persistence: compiled programs, fingerprints, checkpoints, and resumed runs."""

from specjax.persistence.checkpoint import Checkpoints, restore, save

__all__ = ["Checkpoints", "restore", "save"]
