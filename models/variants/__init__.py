"""Models that run part of a base model: fewer layers, low-rank weight updates, or pruned units."""
