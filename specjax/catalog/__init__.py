"""The catalogue of methods: guarantee, paper, inputs and options of each. It imports no JAX."""

from specjax.catalog import shared
from specjax.catalog.method import Guarantee, Kind, Method, Need, TypicalAcceptance
from specjax.catalog.methods import METHODS, find_drafter, of_kind
from specjax.catalog.options import REQUIRED, Option
from specjax.catalog.rules import OF_FILES, PARAMETERS, PRESETS, SAMPLING

__all__ = [
    "METHODS",
    "OF_FILES",
    "PARAMETERS",
    "PRESETS",
    "REQUIRED",
    "SAMPLING",
    "Guarantee",
    "Kind",
    "Method",
    "Need",
    "Option",
    "TypicalAcceptance",
    "find_drafter",
    "of_kind",
    "shared",
]
