"""The module here compresses the prompts of `specjax generate`."""
