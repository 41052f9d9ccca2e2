"""Rules that keep the distribution of the target, one per file."""
