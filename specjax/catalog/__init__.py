"""Every method by name: what it promises, what it needs, what it can be told."""

from specjax.catalog.adaptive import parse_depth
from specjax.catalog.method import Kind, Method, Need
from specjax.catalog.methods import METHODS, find_drafter, make_drafter, of_kind
from specjax.catalog.options import REQUIRED, Option
from specjax.catalog.rules import OF_FILES, PARAMETERS, SAMPLING, parse_rule

__all__ = [
    "METHODS",
    "OF_FILES",
    "PARAMETERS",
    "REQUIRED",
    "SAMPLING",
    "Kind",
    "Method",
    "Need",
    "Option",
    "find_drafter",
    "make_drafter",
    "of_kind",
    "parse_depth",
    "parse_rule",
]
