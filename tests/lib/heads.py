"""Tiny heads with random weights, of every kind."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from specjax import Target
from specjax.models.heads import blocks
from specjax.models.heads.contract import DraftHead
from specjax.models.heads.eagle import Eagle, EagleConfig, eagle_head
from specjax.models.heads.eagle3 import Eagle3, Eagle3Config, eagle3_head
from specjax.models.heads.medusa import Medusa, MedusaConfig, medusa_head
from specjax.models.llama import LlamaConfig


def width_of(target: Target) -> int:
    return jax.eval_shape(target.model.embed, target.params, jnp.zeros((1, 1), jnp.int32)).shape[-1]


def layer_of(target: Target, **changes) -> LlamaConfig:
    """One tiny decoder layer as wide as the target."""
    width = width_of(target)
    shapes = {"num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "mlp_width": 2 * width} | changes
    return LlamaConfig(vocab_size=target.model.vocab_size, width=width, **shapes)


def config_of(kind: str, target: Target):
    """(module, config, functions) of a kind, small enough for any test."""
    width, vocab, layers = width_of(target), target.model.vocab_size, target.model.capabilities.num_layers
    if kind == "eagle":
        return Eagle, EagleConfig(layer_of(target)), eagle_head
    if kind == "eagle3":
        layer = layer_of(target, num_layers=2)
        layer = layer.__class__(**{**vars(layer), "vocab_size": vocab - 1})
        return Eagle3, Eagle3Config(layer, (0, 1, layers), width, vocab, norm_taps="each"), eagle3_head
    if kind == "medusa":
        return Medusa, MedusaConfig(width, vocab, num_heads=3), medusa_head
    raise AssertionError(f"no tiny head of {kind}")


@functools.cache
def _tiny_params(module, config, seed: int):
    return jax.jit(functools.partial(blocks.init_params, module, config))(jax.random.key(seed))


def tiny_head(kind: str, target: Target, seed: int = 3) -> DraftHead:
    """A head with random parameters."""
    module, config, functions = config_of(kind, target)
    return DraftHead(functions(config), _tiny_params(module, config, seed))
