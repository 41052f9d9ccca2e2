"""Rules that keep the law of the target, one per file."""
