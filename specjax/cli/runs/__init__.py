"""Runs behind the commands."""
