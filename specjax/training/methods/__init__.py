"""Training methods with their own loop or loss, one published method per file."""
