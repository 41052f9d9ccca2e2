"""Choice of a draft tree from the cost of a pass and the acceptance rates."""
