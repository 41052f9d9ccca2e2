"""Measurement of a trained drafter, scaling laws, and plots."""
