"""JSON schemas as regular expressions of the texts that satisfy them."""

from specjax.processors.schemas.compiler import FORMATS, to_regex

__all__ = ["FORMATS", "to_regex"]
