"""Drafters that copy tokens from the text or a corpus."""
