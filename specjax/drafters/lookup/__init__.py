"""Drafters that copy from the text or a corpus."""
