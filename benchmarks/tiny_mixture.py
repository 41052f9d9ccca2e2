"""A tiny mixture of experts in the form of GLM-4.5 with its own module, trained on generated stories.

    python benchmarks/tiny_mixture.py --out tests/data/mixture --run build/tiny_mixture

Four of 16 experts read each token, beside a shared MLP, in three of the four layers. The module for multi-token
prediction has experts too. Texts and tokenizer are those of `tiny_hybrid`. `--twin FOLDER` also trains a dense model
whose MLPs have the size of the parameters that read a token, and prints both losses.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file
from tiny_hybrid import LENGTH, VOCABULARY, on_progress, texts, tokenizer

import specjax
from specjax.files.atomic import write_tensors
from specjax.models import LlamaConfig, init_params, make_model
from specjax.models.experts.routing import Routing
from specjax.models.experts.sizes import MixtureSizes
from specjax.models.heads.contract import DraftHead
from specjax.models.heads.mtp import MtpConfig, of_target
from specjax.models.storage import num_bytes
from specjax.numerics import log_probs  # noqa: F401
from specjax.training import new_head, recipe_of, train

EXPERTS, CHOSEN, HIDDEN = 16, 4, 32  # HIDDEN: units of an expert and of the shared MLP
SIZES = MixtureSizes(
    EXPERTS, HIDDEN, Routing(CHOSEN, "sigmoid", normalized=True, epsilon=1e-20, group_score="two_best"),
    shared_width=HIDDEN, correction=True, dense_layers=(0,),
)  # fmt: skip


def config(experts: bool = True) -> LlamaConfig:
    """Return the shapes. Without experts, the MLPs have the size of the experts that read a token."""
    return LlamaConfig(
        vocab_size=VOCABULARY, width=64, num_layers=4, num_heads=2, num_kv_heads=1, head_dim=32,
        mlp_width=(CHOSEN + 1) * HIDDEN, rotary_dim=16, norm_eps=1e-6, rope_base=10_000.0, max_positions=2048,
        tied=True, experts=SIZES if experts else None, name="tiny-mixture" if experts else "tiny-dense",
    )  # fmt: skip


def module_config() -> MtpConfig:
    """Return the shapes of the module, whose layer has experts."""
    of_dense = of_target(config())
    return dataclasses.replace(
        of_dense, layer=dataclasses.replace(of_dense.layer, experts=SIZES._replace(dense_layers=()))
    )


