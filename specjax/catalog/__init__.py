"""Every method by name."""

from specjax.catalog.methods import METHODS, Method, make_drafter

__all__ = ["METHODS", "Method", "make_drafter"]
