"""Training objectives, losses and recipes."""
