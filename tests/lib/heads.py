"""Tiny heads of every kind with random weights."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from specjax import Target
from specjax.models.heads.chimera import ChimeraConfig
from specjax.models.heads.clover import CloverConfig
from specjax.models.heads.contract import DraftHead
from specjax.models.heads.dflash import DFlashConfig
from specjax.models.heads.eagle import EagleConfig
from specjax.models.heads.eagle3 import Eagle3Config
from specjax.models.heads.falcon import FalconConfig
from specjax.models.heads.flash import FlashConfig
from specjax.models.heads.hamburger import HamburgerConfig
from specjax.models.heads.hidden_transfer import HiddenTransferConfig
from specjax.models.heads.hydra import HydraConfig
from specjax.models.heads.kangaroo import KangarooConfig
from specjax.models.heads.kinds import abstract_head, init_head
from specjax.models.heads.longspec import LongSpecConfig
from specjax.models.heads.m2r2 import M2R2Config
from specjax.models.heads.medusa import MedusaConfig
from specjax.models.heads.mlp_speculator import MlpSpeculatorConfig
from specjax.models.heads.msd import MsdConfig
from specjax.models.heads.mtp import MtpConfig
from specjax.models.heads.p_eagle import PEagleConfig
from specjax.models.heads.ppd import PpdConfig
from specjax.models.heads.redrafter import ReDrafterConfig
from specjax.models.heads.specvlm import SpecVlmConfig
from specjax.models.llama import LlamaConfig

OF_OTHER_TARGETS = frozenset({"gemma4_assistant"})
"""Methods of heads that draft for none of the tiny targets here, as they read the keys of Gemma 4."""


def width_of(target: Target) -> int:
    return jax.eval_shape(target.model.embed, target.params, jnp.zeros((1, 1), jnp.int32)).shape[-1]


def layer_of(target: Target, **changes) -> LlamaConfig:
    """Return the shape of one tiny decoder layer, as wide as the target."""
    width = width_of(target)
    shapes = {"num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "mlp_width": 2 * width} | changes
    return LlamaConfig(vocab_size=target.model.vocab_size, width=width, **shapes)


BLOCK_DRAFTERS = {
    "dflash": {},
    "jetspec": {"causal": "all"},
    "dflash2": {"conv_taps": 2, "conv_group": 1, "selector_rank": 4, "candidates": 3},
    "domino": {"from_anchor": True, "prefix_rank": 4, "prefix_state": 5},
    "dspark": {"from_anchor": True, "markov": "rnn", "markov_rank": 4, "confidence": "markov"},
}


def config_of(kind: str, target: Target):
    """Return a config that is small enough for any test."""
    width, vocab, layers = width_of(target), target.model.vocab_size, target.model.capabilities.num_layers
    if kind == "eagle":
        return EagleConfig(layer_of(target))
    if kind == "eagle3":
        layer = replace(layer_of(target, num_layers=2), vocab_size=vocab - 1)
        return Eagle3Config(layer, (0, 1, layers), width, vocab, norm_taps="each")
    if kind == "medusa":
        return MedusaConfig(width, vocab, num_heads=3)
    if kind == "p_eagle":
        return PEagleConfig(layer_of(target), (0, 1, layers), width, vocab, own_head=False, mask_token=2, depths=3)
    if kind in BLOCK_DRAFTERS:
        layer = replace(layer_of(target, num_layers=2), qk_norm=True)
        return DFlashConfig(layer, (1, layers), width, vocab, 4, vocab - 1, windows=(None, 3), **BLOCK_DRAFTERS[kind])
    if kind == "hydra":
        return HydraConfig(width, vocab, num_heads=3, num_blocks=2, layer=layer_of(target))
    if kind == "mlp_speculator":
        return MlpSpeculatorConfig(width, 16, vocab, num_heads=3, scaled=True)
    if kind == "mtp":
        return MtpConfig(layer_of(target), vocab, layers)
    if kind == "redrafter":
        return ReDrafterConfig(width, 2 * width, vocab, num_blocks=1)
    if kind == "clover":
        return CloverConfig(layer_of(target, num_heads=1, num_layers=2), (layers,), embeds=False)
    if kind == "chimera":
        return ChimeraConfig(layer_of(target), vocab, num_heads=3)
    if kind == "falcon":
        return FalconConfig(layer_of(target), carries=True)
    if kind == "hidden_transfer":
        return HiddenTransferConfig(width, (1, layers, 1))
    if kind == "m2r2":
        return M2R2Config(width, exit_layer=1, rank=2, router_width=4)
    if kind == "hamburger":
        return HamburgerConfig(layer_of(target, num_layers=2), (1, layers), merge_heads=2)
    if kind == "ppd":
        return PpdConfig(width, num_prompts=3, copies=2)
    if kind == "kangaroo":
        return KangarooConfig(layer_of(target), exit_layer=1)
    if kind == "msd":
        return MsdConfig(layer_of(target), vocab_size=vocab)
    if kind == "flash":
        return FlashConfig(layer_of(target), block_size=3, queries=2)
    if kind == "specvlm":
        return SpecVlmConfig(layer_of(target), vocab_size=vocab, queries=2)
    if kind == "longspec":  # its attention is that of the target
        c = target.model.config
        shape = {"num_heads": c.num_heads, "num_kv_heads": c.num_kv_heads, "head_dim": c.head_dim}
        return LongSpecConfig(layer_of(target, **shape), window=5)
    raise AssertionError(f"no tiny head of {kind}")


@functools.cache
def _tiny(kind: str, config, seed: int) -> DraftHead:
    """Return a head with random parameters, including those that start at zero.

    They are drawn one by one and by NumPy, so kinds share the small programs. One program for four kinds took 8.5 s
    of CPU time to compile; this takes 1.1.
    """
    head, rng = init_head(kind, config, jax.random.key(seed)), np.random.default_rng(seed)
    more = lambda x: x + 0.2 * rng.normal(size=x.shape).astype(x.dtype)
    is_trained = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
    return head.replace(params=jax.tree.map(lambda x: more(x) if is_trained(x) else x, head.params))


def tiny_head(kind: str, target: Target, seed: int = 3) -> DraftHead:
    """Return a head with random parameters."""
    return _tiny(kind, config_of(kind, target), seed)


def separate_modules(target: Target, seed: int = 3, **changes) -> DraftHead:
    """Return three modules for multi-token prediction with random parameters."""
    return _tiny("mtp", replace(config_of("mtp", target), layer=layer_of(target, num_layers=3), **changes), seed)


def numbered_head(kind: str, target: Target, **changes) -> DraftHead:
    """Return a head with arbitrary numbers for file tests. Random ones would compile a program per kind."""
    config = replace(config_of(kind, target), **changes)
    head, rng = abstract_head(kind, config), np.random.default_rng(0)

    def numbers(x):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return np.minimum(np.arange(x.size), config.layer.vocab_size).astype(x.dtype)  # a map of the first ids
        return jnp.asarray(rng.normal(size=x.shape), x.dtype)

    return head.replace(params=jax.tree.map(numbers, head.params))
