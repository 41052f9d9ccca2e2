"""Compression of prompts and caches.

A model selects the tokens of the prompt that the target reads, or that its cache keeps. A compressed cache may also
have keys and values in a few bits. All change what the target reads, so every method here is lossy. Decoding from
there is as exact as its method.
"""

from specjax.compression.gear import gear
from specjax.compression.parsing import Compression, parse_compression
from specjax.compression.speckv import speckv
from specjax.compression.specpc import specpc

__all__ = ["Compression", "gear", "parse_compression", "speckv", "specpc"]
