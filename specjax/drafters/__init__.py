"""Drafters, one published method per file. Each factory returns a `Drafter`."""

from specjax.drafters.combined.auto import auto
from specjax.drafters.combined.choice import choice
from specjax.drafters.combined.rasd import rasd
from specjax.drafters.heads.head_drafter import head_drafter
from specjax.drafters.heads.ppd import ppd
from specjax.drafters.layers.dynamic_exit import dynamic_exit
from specjax.drafters.layers.early_exit import early_exit
from specjax.drafters.layers.sparse_cache import sparse_cache
from specjax.drafters.layers.superposed import superposed
from specjax.drafters.layers.swift import swift
from specjax.drafters.layers.thinned import thinned
from specjax.drafters.lookup.input_guided import input_guided
from specjax.drafters.lookup.prompt_lookup import prompt_lookup
from specjax.drafters.lookup.rest import rest
from specjax.drafters.lookup.suffix import suffix
from specjax.drafters.model.easyspec import easyspec
from specjax.drafters.model.hierarchical import hierarchical
from specjax.drafters.model.nar_block import nar_block
from specjax.drafters.model.rapid import rapid
from specjax.drafters.model.stree import stree
from specjax.drafters.model.triforce import triforce
from specjax.drafters.model.two_model import two_model
from specjax.drafters.tables.aded import aded, corpus_table
from specjax.drafters.tables.jacobi import jacobi
from specjax.drafters.tables.lookahead import lookahead
from specjax.drafters.tables.stand import stand
from specjax.drafters.tables.token_recycling import token_recycling
from specjax.trees.autoregressive import autoregressive

__all__ = [
    "aded",
    "auto",
    "autoregressive",
    "choice",
    "corpus_table",
    "dynamic_exit",
    "early_exit",
    "easyspec",
    "head_drafter",
    "hierarchical",
    "input_guided",
    "jacobi",
    "lookahead",
    "nar_block",
    "ppd",
    "prompt_lookup",
    "rapid",
    "rasd",
    "rest",
    "sparse_cache",
    "stand",
    "stree",
    "suffix",
    "superposed",
    "swift",
    "thinned",
    "token_recycling",
    "triforce",
    "two_model",
]
