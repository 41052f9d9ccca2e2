"""Rules that do not keep the law of the target, one per file; each says how far off it is."""
