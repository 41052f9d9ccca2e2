"""Encoder-decoder models: an encoder reads a source once, and a decoder attends to it while it writes the text."""
