"""Drafters, one published method per file. Each factory returns a `Drafter`."""

from specjax.drafters.aded import aded, corpus_table
from specjax.drafters.auto import auto
from specjax.drafters.autoregressive import autoregressive
from specjax.drafters.choice import choice
from specjax.drafters.dynamic_exit import dynamic_exit
from specjax.drafters.early_exit import early_exit
from specjax.drafters.easyspec import easyspec
from specjax.drafters.hierarchical import hierarchical
from specjax.drafters.input_guided import input_guided
from specjax.drafters.jacobi import jacobi
from specjax.drafters.lookahead import lookahead
from specjax.drafters.nar_block import nar_block
from specjax.drafters.prompt_lookup import prompt_lookup
from specjax.drafters.rapid import rapid
from specjax.drafters.rasd import rasd
from specjax.drafters.rest import rest
from specjax.drafters.stand import stand
from specjax.drafters.suffix import suffix
from specjax.drafters.superposed import superposed
from specjax.drafters.swift import swift
from specjax.drafters.token_recycling import token_recycling
from specjax.drafters.two_model import two_model

__all__ = [
    "aded",
    "auto",
    "autoregressive",
    "choice",
    "corpus_table",
    "dynamic_exit",
    "early_exit",
    "easyspec",
    "hierarchical",
    "input_guided",
    "jacobi",
    "lookahead",
    "nar_block",
    "prompt_lookup",
    "rapid",
    "rasd",
    "rest",
    "stand",
    "suffix",
    "superposed",
    "swift",
    "token_recycling",
    "two_model",
]
