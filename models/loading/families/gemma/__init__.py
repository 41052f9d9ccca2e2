"""The Gemma families."""
