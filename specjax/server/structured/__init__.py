"""Texts of a given form: JSON schemas, regular expressions and calls of tools."""
