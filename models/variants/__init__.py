"""Models that run part of a base model: fewer layers, low-rank weights, or pruned units."""
