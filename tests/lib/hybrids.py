"""Tiny hybrid targets with every kind of mixer, and a broken one."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from specjax.models import init_params, make_model
from specjax.models.hybrid.config import GatedDeltaSizes, HybridConfig, LayerKind, Mamba2Sizes
from specjax.types import Model, Target

KINDS = LayerKind("gated_delta"), LayerKind("short_convolution"), LayerKind("attention_and_mamba2")


@functools.cache
def tiny_hybrid(vocab: int = 64, seed: int = 0, value_heads: int = 4, **changes) -> Target:
    """Return a random model of three layers with all mixers and clear argmax gaps."""
    config = HybridConfig(**{
        "vocab_size": vocab, "width": 32, "num_layers": len(KINDS), "num_heads": 2, "num_kv_heads": 1, "head_dim": 16,
        "mlp_width": 48, "kinds": KINDS, "gated_delta": GatedDeltaSizes(value_heads // 2 or 1, value_heads, 8, 8),
        "mamba2": Mamba2Sizes(4, 8, 2, 8), "convolution_kernel": 3, "max_positions": 512, "tied": False,
    } | changes)  # fmt: skip
    params = init_params(config, jax.random.key(seed))
    params["head"]["weight"] = params["head"]["weight"] * 6.0
    for layer in params["layers"].values():  # slow decays, so that tokens that were read long ago still matter
        if "decay" in layer.get("recurrent", {}):
            layer["recurrent"]["decay"]["rate"] = layer["recurrent"]["decay"]["rate"] * 0.01
    return Target(make_model(config), params)


def commits_rejected(target: Target, nodes: int) -> Target:
    """Return a mutant whose recurrent layers also read the last of `nodes` nodes of a tree when they commit a path."""
    return Target(_mutant(target.model, nodes), target.params)


@functools.cache
def _mutant(model: Model, nodes: int) -> Model:
    def commit(cache, pending, path, num_nodes):
        committed = model.commit(cache, pending, path, num_nodes)
        if pending.positions.shape[1] != nodes:
            return committed
        longer = jnp.pad(path, ((0, 0), (0, 1)))
        rows = jnp.arange(len(path))
        longer = longer.at[rows, num_nodes].set(nodes - 1)
        more = model.commit(cache, pending, longer, jnp.where(num_nodes > 0, num_nodes + 1, 0))
        return committed._replace(recurrent=more.recurrent)

    return model._replace(commit=commit)
