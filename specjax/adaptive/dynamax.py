"""DYNAMAX: a token exits the model where a small classifier predicts that its output will no longer change.

Nogales, Gambella, Roveri: DYNAMAX: Dynamic computing for Transformers and Mamba based architectures (2025),
arXiv 2504.20922. With linear probes it is the classifier of CALM (Schuster et al. 2022, arXiv 2207.07061).

Rule: after every `every`-th layer a probe computes sigmoid(w_l . h_l / |h_l| sqrt(D) + b_l) from the stream h_l. The
token exits where this is at least lambda. The remaining layers compute its keys and values from the stream at the exit.
Training: cross entropy with the model frozen. The label of h_l is 1 if head(norm(h_l)) predicts the token that the full
model predicts.
Guarantee: lossy.

Deviations: we follow the paper in outline, and the details are our own. The probes are linear, on streams that are
normalised to equal length. State-space layers are not covered, because no model family of specjax has them.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from specjax.adaptive.exits import every_so_many, leaving, threshold_level
from specjax.adaptive.optimise import descend, one_pass
from specjax.arrays.modes import jit, with_standard_modes
from specjax.catalog import REQUIRED, Method, Option, shared
from specjax.errors import UsageError
from specjax.models.skipping.policy import DepthPolicy, LayerStreams, TokenPositions
from specjax.types import Array, Model, Target

METHOD = Method(
    name="dynamax",
    kind="adaptive",
    guarantee="lossy",
    summary="exits the model for each token where a trained probe predicts that the output will not change",
    paper="Nogales et al. 2025, arXiv 2504.20922",
    options=(
        Option("probes", "probes", REQUIRED, "file of trained probes"),
        Option("threshold", "float", 0.9, "probability at which a token exits; above 1: never"),
        shared.EVERY,
    ),
)


class Probes(NamedTuple):
    """Linear classifiers, one per layer of the model. Those of layers that are not tested are zero."""

    weight: Array  # float32[layers, D]
    bias: Array  # float32[layers]


def dynamax(probes: Probes, threshold: float = 0.9, *, every: int = 4) -> DepthPolicy:
    """Return the depth policy for `specjax.adaptive.skip_layers(target, dynamax(probes))`.

    Args:
      probes: from `train_probes` or `read_probes`.
      threshold: lambda, an array parameter; above 1 no token exits. every: layers between two tests.
    """
    if math.isnan(threshold):
        raise UsageError("threshold must be a number")
    if probes.weight.ndim != 2 or probes.bias.shape != probes.weight.shape[:1]:
        raise UsageError(
            f"probes must be weight [layers, width] and bias [layers], not {probes.weight.shape} and "
            f"{probes.bias.shape}"
        )
    _check_trained(probes, every)
    return _dynamax(every, len(probes.bias)).replace(
        params=(probes, jnp.float32(threshold)), width=probes.weight.shape[1]
    )


def _check_trained(probes: Probes, every: int) -> None:
    """Raise a UsageError if a tested layer has no trained probe. Traced probes pass."""
    if isinstance(probes.weight, jax.core.Tracer) or not 1 <= every < len(probes.bias):
        return
    trained = np.any(np.asarray(probes.weight), 1).nonzero()[0].tolist()
    missing = sorted(set(every_so_many(every)(len(probes.bias))) - set(trained))
    if trained and missing:
        raise UsageError(
            f"every={every} tests layer {missing[0]}, but the probes are of the layers {', '.join(map(str, trained))}; "
            "give the value of their training"
        )


@functools.cache
def _dynamax(every: int, layers: int) -> DepthPolicy:
    depth = leaving("dynamax", _confidence, _level, every_so_many(every))

    def check(num_layers: int) -> None:
        if num_layers != layers:
            raise UsageError(
                f"the probes fit {layers} layers, but the model has {num_layers}; train them for this model"
            )
        depth.check(num_layers)

    return depth.replace(check=check)


def _confidence(params, layer_streams: LayerStreams) -> Array:
    return jax.nn.sigmoid(judged(params[0], layer_streams.layer, layer_streams.after_mlp))


def _level(params, places: TokenPositions) -> Array:
    return threshold_level(params[1], places)


def judged(probes: Probes, layer: Array | int, stream: Array) -> Array:
    """Return float32[B, T]: the logit of the probe of `layer` for the stream [B, T, D] after it."""
    x = stream.astype(jnp.float32)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    return x @ probes.weight[layer] + probes.bias[layer]


@with_standard_modes
def train_probes(
    target: Target, tokens: Array, length: Array, *, every: int = 4, steps: int = 200, learning_rate: float = 0.01
) -> Probes:
    """Train probes for a frozen target, on texts `tokens` int32[B, T] of `length` int32[B] tokens.

    The target runs once over all texts. The streams of the tested layers must fit into memory.
    """
    model = target.model
    if model.head is None or not model.capabilities.taps:
        raise UsageError(f"probes need Model.head and taps, which {model.name} lacks; give a model of specjax.models")
    layers = every_so_many(every)(model.capabilities.num_layers)
    return _train(model, layers, steps, learning_rate, target.params, tokens, length)


@jit(static_argnums=(0, 1, 2, 3))
def _train(model: Model, layers: tuple[int, ...], steps: int, learning_rate: float, params, tokens, length) -> Probes:
    streams, agrees = lessons(model, layers, params, tokens)
    counts = jnp.arange(tokens.shape[1]) < length[:, None]
    blank = Probes(
        jnp.zeros((model.capabilities.num_layers, streams[0].shape[-1])), jnp.zeros((model.capabilities.num_layers,))
    )

    def loss(probes: Probes) -> Array:
        each = [
            optax.sigmoid_binary_cross_entropy(judged(probes, layer, stream), label)
            for layer, stream, label in zip(layers, streams, agrees, strict=True)
        ]
        return jnp.sum(jnp.stack(each) * counts) / jnp.sum(counts)

    return descend(loss, blank, steps, learning_rate)[0]


def lessons(model: Model, layers: tuple[int, ...], params, tokens: Array) -> tuple[list[Array], list[Array]]:
    """Return the streams [B, T, D] after `layers`, and their labels float32[B, T].

    A label is 1 where the head predicts the full model's token from the stream.
    """
    cache = model.init_cache(params, None, len(tokens), 0)
    output, _ = one_pass(model, params, tokens, cache, tuple(layer + 1 for layer in layers))
    assert model.head is not None
    own_tokens = jnp.argmax(output.logits, -1)
    agrees = [(jnp.argmax(model.head(params, stream), -1) == own_tokens).astype(jnp.float32) for stream in output.taps]
    return list(output.taps), agrees
