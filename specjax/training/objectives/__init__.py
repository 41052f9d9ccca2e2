"""Training objectives and losses."""
