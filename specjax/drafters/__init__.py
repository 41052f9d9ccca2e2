"""Drafters, one published method per file. Each factory returns a `Drafter`."""

from specjax.drafters.combined.auto import auto
from specjax.drafters.combined.choice import choice
from specjax.drafters.combined.rasd import rasd
from specjax.drafters.heads.chimera import chimera
from specjax.drafters.heads.clover import clover
from specjax.drafters.heads.dflash import dflash
from specjax.drafters.heads.dflash2 import dflash2
from specjax.drafters.heads.domino import domino
from specjax.drafters.heads.dspark import dspark
from specjax.drafters.heads.eagle import eagle
from specjax.drafters.heads.eagle3 import eagle3
from specjax.drafters.heads.falcon import falcon
from specjax.drafters.heads.hamburger import hamburger
from specjax.drafters.heads.hidden_transfer import hidden_transfer
from specjax.drafters.heads.hydra import hydra
from specjax.drafters.heads.kangaroo import kangaroo
from specjax.drafters.heads.m2r2 import m2r2
from specjax.drafters.heads.medusa import medusa
from specjax.drafters.heads.mlp_speculator import mlp_speculator
from specjax.drafters.heads.p_eagle import p_eagle
from specjax.drafters.heads.ppd import ppd
from specjax.drafters.heads.redrafter import redrafter
from specjax.drafters.layers.dynamic_exit import dynamic_exit
from specjax.drafters.layers.early_exit import early_exit
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
from specjax.drafters.model.two_model import two_model
from specjax.drafters.tables.aded import aded, corpus_table
from specjax.drafters.tables.jacobi import jacobi
from specjax.drafters.tables.lookahead import lookahead
from specjax.drafters.tables.stand import stand
from specjax.drafters.tables.token_recycling import token_recycling
from specjax.engine.autoregressive import autoregressive

__all__ = [
    "aded",
    "auto",
    "autoregressive",
    "chimera",
    "choice",
    "clover",
    "corpus_table",
    "dflash",
    "dflash2",
    "domino",
    "dspark",
    "dynamic_exit",
    "eagle",
    "eagle3",
    "early_exit",
    "easyspec",
    "falcon",
    "hamburger",
    "hidden_transfer",
    "hierarchical",
    "hydra",
    "input_guided",
    "jacobi",
    "kangaroo",
    "lookahead",
    "m2r2",
    "medusa",
    "mlp_speculator",
    "nar_block",
    "p_eagle",
    "ppd",
    "prompt_lookup",
    "rapid",
    "rasd",
    "redrafter",
    "rest",
    "stand",
    "suffix",
    "superposed",
    "swift",
    "thinned",
    "token_recycling",
    "two_model",
]
