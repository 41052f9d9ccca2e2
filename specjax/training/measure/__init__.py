"""Measurement of trained drafters, scaling laws, and plots."""
