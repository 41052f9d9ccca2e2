"""Rules that change the distribution of the target, one per file. Each states its measured distance."""
