"""Drafters, one published method per file. Each factory returns a `Drafter`."""

from specjax.drafters.autoregressive import autoregressive
from specjax.drafters.dynamic_exit import dynamic_exit
from specjax.drafters.early_exit import early_exit
from specjax.drafters.hierarchical import hierarchical
from specjax.drafters.jacobi import jacobi
from specjax.drafters.prompt_lookup import prompt_lookup
from specjax.drafters.superposed import superposed
from specjax.drafters.swift import swift
from specjax.drafters.token_recycling import token_recycling
from specjax.drafters.two_model import two_model

__all__ = [
    "autoregressive",
    "dynamic_exit",
    "early_exit",
    "hierarchical",
    "jacobi",
    "prompt_lookup",
    "superposed",
    "swift",
    "token_recycling",
    "two_model",
]
