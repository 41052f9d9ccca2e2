"""Continuous batching: requests join and leave the rows of one running batch."""
