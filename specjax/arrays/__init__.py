"""Array helpers: batch axes, indexing, 64-bit mode, and branches inside compiled programs."""
