"""Compression of prompts and caches.

In a compressed prompt a model selected the tokens that the target reads. A compressed cache has keys and values in a
few bits. Both change what the target reads, so every method here is lossy. Decoding from there is as exact as its
method.
"""

from specjax.compression.gear import gear
from specjax.compression.parsing import Compression, parse_compression
from specjax.compression.specpc import specpc

__all__ = ["Compression", "gear", "parse_compression", "specpc"]
