"""Compression of the prompts of `specjax generate`."""
