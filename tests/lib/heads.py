"""Tiny heads with random weights, of every kind."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp

from specjax import Target
from specjax.models.heads.chimera import ChimeraConfig
from specjax.models.heads.clover import CloverConfig
from specjax.models.heads.contract import DraftHead
from specjax.models.heads.eagle import EagleConfig
from specjax.models.heads.eagle3 import Eagle3Config
from specjax.models.heads.hydra import HydraConfig
from specjax.models.heads.kangaroo import KangarooConfig
from specjax.models.heads.kinds import KINDS, init_head
from specjax.models.heads.medusa import MedusaConfig
from specjax.models.heads.mlp_speculator import MlpSpeculatorConfig
from specjax.models.heads.redrafter import ReDrafterConfig
from specjax.models.llama import LlamaConfig


def width_of(target: Target) -> int:
    return jax.eval_shape(target.model.embed, target.params, jnp.zeros((1, 1), jnp.int32)).shape[-1]


def layer_of(target: Target, **changes) -> LlamaConfig:
    """One tiny decoder layer as wide as the target."""
    width = width_of(target)
    shapes = {"num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "mlp_width": 2 * width} | changes
    return LlamaConfig(vocab_size=target.model.vocab_size, width=width, **shapes)


def config_of(kind: str, target: Target):
    """Small enough for any test."""
    width, vocab, layers = width_of(target), target.model.vocab_size, target.model.capabilities.num_layers
    if kind == "eagle":
        return EagleConfig(layer_of(target))
    if kind == "eagle3":
        layer = replace(layer_of(target, num_layers=2), vocab_size=vocab - 1)
        return Eagle3Config(layer, (0, 1, layers), width, vocab, norm_taps="each")
    if kind == "medusa":
        return MedusaConfig(width, vocab, num_heads=3)
    if kind == "hydra":
        return HydraConfig(width, vocab, num_heads=3, num_blocks=2, layer=layer_of(target))
    if kind == "mlp_speculator":
        return MlpSpeculatorConfig(width, 16, vocab, num_heads=3, scaled=True)
    if kind == "redrafter":
        return ReDrafterConfig(width, 2 * width, vocab, num_blocks=1)
    if kind == "clover":
        return CloverConfig(layer_of(target, num_heads=1, num_layers=2), (layers,), embeds=False)
    if kind == "chimera":
        return ChimeraConfig(layer_of(target), vocab, num_heads=3)
    if kind == "kangaroo":
        return KangarooConfig(layer_of(target), exit_layer=1)
    raise AssertionError(f"no tiny head of {kind}")


@functools.cache
def _tiny(kind: str, config, seed: int) -> DraftHead:
    # Compiled: a hundred small draws one by one take longer.
    return DraftHead(
        KINDS[kind].head(config), jax.jit(lambda key: init_head(kind, config, key).params)(jax.random.key(seed))
    )


def tiny_head(kind: str, target: Target, seed: int = 3) -> DraftHead:
    """A head with random parameters."""
    return _tiny(kind, config_of(kind, target), seed)
