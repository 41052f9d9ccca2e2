"""Training methods with a loop or a loss of their own, one published method per file."""
