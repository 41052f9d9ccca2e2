"""Rules that do not keep the distribution of the target, one per file; each says how far off it is."""
