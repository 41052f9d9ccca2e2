"""Search for the best static tree shape from measured acceptance rates."""
