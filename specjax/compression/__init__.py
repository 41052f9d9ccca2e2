"""Compression of prompts: a model selects the tokens that a target reads in place of the complete prompt.

A compressed prompt is another prompt, so every method here is lossy. Decoding of the compressed prompt is as exact as
its method.
"""

from specjax.compression.parsing import Compression, parse_compression
from specjax.compression.specpc import specpc

__all__ = ["Compression", "parse_compression", "specpc"]
