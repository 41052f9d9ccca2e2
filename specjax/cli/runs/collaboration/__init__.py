"""Runs of `specjax generate` for texts that several models or samples write: checks, words, and the run itself."""
