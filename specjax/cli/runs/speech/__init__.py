"""Runs of `specjax transcribe`."""
