"""Drafters, one published method per file. Each factory returns a `Drafter`."""

from specjax.drafters.aded import aded, corpus_table
from specjax.drafters.autoregressive import autoregressive
from specjax.drafters.hierarchical import hierarchical
from specjax.drafters.jacobi import jacobi
from specjax.drafters.lookahead import lookahead
from specjax.drafters.prompt_lookup import prompt_lookup
from specjax.drafters.stand import stand
from specjax.drafters.token_recycling import token_recycling
from specjax.drafters.two_model import two_model

__all__ = [
    "aded",
    "autoregressive",
    "corpus_table",
    "hierarchical",
    "jacobi",
    "lookahead",
    "prompt_lookup",
    "stand",
    "token_recycling",
    "two_model",
]
