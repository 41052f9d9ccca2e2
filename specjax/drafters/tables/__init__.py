"""Drafters that store results of earlier target passes in tables."""
