"""MatFormer: the first hidden units of every MLP form a smaller model, which drafts for the full one.

Devvrit, Kudugunta, Kusupati, Dettmers, Chen, Dhillon, Tsvetkov, Hajishirzi, Kakade, Farhadi, Jain: MatFormer: Nested
Transformer for Elastic Inference (2023), arXiv 2310.07707.

Rule: an MLP of granularity m is W_d[:, :m] (act(W_g[:m] x) * (W_u[:m] x)). Attention, norms and embeddings are shared.
Mix'n'Match: layers may have different granularities, which no training combined. Here n shares are the granularities of
n parts of the depth, of equal length. Shares that grow with the depth are the usual choice.
Training: the cross entropy on the same tokens at each granularity, averaged over the granularities.
Guarantee: lossy as a target. With a drafter (`drafters.thinned`) the text is that of the full model. Drafts read the
full model's keys and values, and the target pass writes its own for the tokens that it accepts.

Deviations: draft and target share a cache, which is our own choice. Layers of different granularities are unrolled,
even if those of the target are stacked.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax.numpy as jnp

from specjax.adaptive.optimise import descend
from specjax.adaptive.s2d import sorted_loss
from specjax.arrays.modes import jit, with_standard_modes
from specjax.catalog import Method, Option
from specjax.errors import UsageError
from specjax.models import narrow_mlps
from specjax.models.skipping.policy import DepthPolicy, TokenPositions
from specjax.models.variants.pruning import mlp_widths
from specjax.types import Array, Model, PyTree, Sublayers, Target

METHOD = Method(
    name="matformer",
    kind="adaptive",
    guarantee="lossy",
    summary="runs a nested smaller model: the first hidden units of every MLP",
    paper="Devvrit et al. 2023, arXiv 2310.07707",
    options=(
        Option(
            "share", "floats", 0.25, "fraction of the hidden units, or one per part of the depth, first layers first"
        ),
    ),
)


def matformer(share: float | Sequence[float] = 0.25) -> DepthPolicy:
    """Return the depth policy for `drafters.thinned(target, matformer())`, or `specjax.adaptive.skip_layers`.

    share: m divided by the width of the MLPs. Several shares are for parts of the depth of equal length, the first
      layers first; with as many shares as layers, each layer has its own (Mix'n'Match).
    """
    shares = (share,) if isinstance(share, int | float) else tuple(share)
    if not shares:
        raise UsageError("share must be a number or several, not an empty list")
    for number in shares:
        if not 0 < number <= 1:
            raise UsageError(f"share must be above 0 and at most 1, not {number}")
    return _matformer(tuple(map(float, shares)))


def units(share: float, mlp_width: int) -> int:
    """Return m, the number of hidden units that run, at least 1."""
    return max(1, round(share * mlp_width))


def units_of_layers(shares: tuple[float, ...], mlp_widths: tuple[int, ...]) -> tuple[int, ...]:
    """Return m of each layer, for MLPs of these widths."""
    num_layers = len(mlp_widths)
    return tuple(
        units(shares[layer * len(shares) // num_layers], mlp_width) for layer, mlp_width in enumerate(mlp_widths)
    )


@functools.cache
def _matformer(shares: tuple[float, ...]) -> DepthPolicy:
    def check(num_layers: int) -> None:
        if len(shares) > num_layers:
            raise UsageError(f"share has {len(shares)} numbers, more than the {num_layers} layers of the model")

    def plan(params, places: TokenPositions, state, num_layers: int) -> Array:
        return jnp.ones(places.positions.shape, bool)

    return DepthPolicy(
        plan=plan, runs=lambda every, layer: Sublayers(every, every),
        mlp_units=functools.partial(units_of_layers, shares), check=check, name="matformer",
    )  # fmt: skip


@with_standard_modes
def nested_loss(target: Target, tokens: Array, length: Array, shares: tuple[float, ...]) -> Array:
    """Return the mean over `shares` of the next-token cross entropy.

    tokens: int32[B, T], texts of `length` int32[B] tokens.
    """
    layers, widths = (target.model.capabilities.num_layers,), mlp_widths(target)

    def of_part(share: float) -> Array:
        part = narrow_mlps(target, units_of_layers((share,), widths))
        return sorted_loss(part.model, part.params, tokens, length, layers)

    return jnp.mean(jnp.stack([of_part(share) for share in shares]))


@with_standard_modes
def train_nested(
    target: Target, tokens: Array, length: Array, *, shares: tuple[float, ...] = (0.125, 0.25, 0.5, 1.0),
    steps: int = 100, learning_rate: float = 1e-3,
) -> tuple[Target, Array]:  # fmt: skip
    """Train a target at all granularities, in one batch. Returns the target and the loss of each step.

    shares: the granularities, as parts of the MLPs' widths.
    """
    if not shares or not all(0 < share <= 1 for share in shares):
        raise UsageError(f"shares must be above 0 and at most 1, one or more, not {list(shares)}")
    params, losses = _train(target.model, shares, steps, learning_rate, target.params, tokens, length)
    return Target(target.model, params), losses


@jit(static_argnums=(0, 1, 2, 3))
def _train(model: Model, shares, steps: int, learning_rate: float, params: PyTree, tokens, length):
    loss = lambda params: nested_loss(Target(model, params), tokens, length, shares)
    return descend(loss, params, steps, learning_rate)
