"""Planner reports as records, tables and JSON."""
