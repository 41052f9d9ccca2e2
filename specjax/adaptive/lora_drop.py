"""LoRA-Drop: most layers run only at every k-th token, and low-rank corrections replace them at the other tokens.

LoRA-Drop: Temporal LoRA Decoding for Efficient LLM Inference (2026), arXiv 2601.02569.

Rule: at generated token t with t mod k = 0 all layers run, and the output o_l of each droppable layer l is stored. At
the other tokens a droppable layer returns, with its input h and rank r,
  h_l = o_l + (alpha / r) B_l A_l h.
It runs neither attention nor MLP, and caches no keys and values. Later tokens therefore attend in this layer only to
the prompt and to tokens with t mod k = 0. Layers that are not droppable always run. B is initially zero.
Guarantee: lossy.

Deviations: o_l belongs to the last token that ran the layer, as in the authors' code. In the abstract it belongs to the
previous token. The number of new tokens is not part of a program's shapes, so by default the caches of droppable layers
have room for all tokens. With `longest_prompt` they have room for that many tokens of the prompt and 1 / k of the rest.
If a prompt is longer, its last tokens run the layers that generated tokens run. A pass over several tokens runs each
layer that one of them needs. A pass over a chain of k or more tokens thus runs all layers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.adaptive.fitting import fit
from specjax.arrays.modes import with_standard_modes
from specjax.catalog import REQUIRED, Method, Option
from specjax.errors import UsageError
from specjax.models.skipping.policy import DepthPolicy, LayerStreams, TokenPositions
from specjax.numerics.sampling import threefry
from specjax.numerics.validation import check_integer
from specjax.types import STATIC, Array, Sublayers, Target

EVERY, ALPHA = 4, 16.0
"""The authors' k and alpha."""

METHOD = Method(
    name="lora_drop",
    kind="adaptive",
    guarantee="lossy",
    summary="runs most layers for every k-th token only, and replaces them by low-rank corrections in between",
    paper="2026, arXiv 2601.02569",
    options=(
        Option("corrections", "corrections", REQUIRED, "file of trained corrections"),
        Option("every", "int", None, "k: all layers run at every k-th token; default: as in training, else 4"),
        Option(
            "alpha",
            "float",
            None,
            "scale of the corrections, which is divided by their rank; default: as in training, else 16",
        ),
        Option(
            "longest_prompt",
            "int",
            None,
            "tokens of the prompt that run all layers; the fewer, the smaller the caches; default: all",
        ),
    ),
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Corrections:
    """Low-rank corrections of the droppable layers. Other layers have entries too, which are not used."""

    down: Array  # float32[layers, r, D], A
    up: Array  # float32[layers, D, r], B
    every: int | None = field(metadata=STATIC, default=None)  # k of the training; None: unknown
    alpha: float | None = field(metadata=STATIC, default=None)  # alpha of the training; None: unknown

    replace = replace


class _Drop(NamedTuple):
    refreshes: Array  # bool[B, T], True for tokens that run all layers
    same: Array  # bool[B, T, T], True at the token of this pass, if any, that computes the o_l of each token
    stored: Array  # [B, droppable, D], o_l of the last refresh before this pass
    streams: Array  # [B, T, droppable, D], layer outputs at the tokens of this pass


def lora_drop(
    corrections: Corrections, *, every: int | None = None, alpha: float | None = None,
    longest_prompt: int | None = None,
) -> DepthPolicy:  # fmt: skip
    """Return the depth policy for `specjax.adaptive.skip_layers(target, lora_drop(corrections))`.

    Args:
      corrections: from `blank_corrections`, trained by `train_corrections`. Their shape sets r.
      every: k. alpha: as in the rule above. None: the values of the training, or 4 and 16. The parameters of the
        policy record both.
      longest_prompt: largest number of tokens of the prompt that run all layers; None: all of them. The caches of
        droppable layers have room for these and for every k-th token of the rest of the text. For prompts of at most
        this length the text does not depend on it.
    """
    every = (EVERY if corrections.every is None else corrections.every) if every is None else every
    alpha = (ALPHA if corrections.alpha is None else corrections.alpha) if alpha is None else alpha
    for name, value in (("every", every), ("longest_prompt", longest_prompt)):
        if value is not None and value < 1:
            raise UsageError(f"{name} must be at least 1, not {value}")
    layers, rank, width = corrections.down.shape
    if corrections.up.shape != (layers, width, rank):
        raise UsageError(
            f"corrections must be down [layers, r, width] and up [layers, width, r], not "
            f"{corrections.down.shape} and {corrections.up.shape}"
        )
    depth = _lora_drop(every, float(alpha), layers, width, corrections.down.dtype.name)
    params = corrections.replace(every=every, alpha=float(alpha))
    return depth.replace(params=params, longest_prompt=longest_prompt)


@with_standard_modes
def blank_corrections(target: Target, key: Array, rank: int = 8) -> Corrections:
    """Return untrained corrections: A is random and B is zero, so dropped layers repeat their last output."""
    check_integer("rank", rank)
    layers, width = target.model.capabilities.num_layers, target.model.config.width
    down = jax.random.normal(key, (layers, rank, width), jnp.float32) * width**-0.5
    return Corrections(down, jnp.zeros((layers, width, rank), jnp.float32))


@with_standard_modes
def train_corrections(
    target: Target, tokens: Array, prompt: Array, length: Array, *, key: Array | int, rank: int = 8,
    every: int = EVERY, alpha: float = ALPHA, steps: int = 100, learning_rate: float = 1e-3,
) -> tuple[Corrections, Array]:  # fmt: skip
    """Train corrections on the tokens after the prompts of some texts, with a frozen target.

    Args: tokens: int32[B, T], texts of `length` int32[B] tokens that begin with prompts of `prompt` int32[B] tokens, in
      one batch. rank: r. every: k. alpha: as in the rule.

    Returns: (the corrections, which record `every` and `alpha`, float32[steps] losses).

    Raises: UsageError for settings out of range.
    """
    depth = lora_drop(blank_corrections(target, threefry(key), rank), every=every, alpha=alpha)
    fitted, losses = fit(target, depth, tokens, prompt, length, steps=steps, learning_rate=learning_rate)
    return fitted.params, losses


def droppable(num_layers: int) -> tuple[int, ...]:
    """Return the layers that can be dropped: three of every four."""
    return tuple(layer for layer in range(num_layers) if layer % 4)


@functools.cache
def _lora_drop(every: int, alpha: float, layers: int, width: int, dtype: str) -> DepthPolicy:
    which = droppable(layers)

    def check(num_layers: int) -> None:
        if num_layers != layers:
            raise UsageError(
                f"the corrections fit {layers} layers, but the model has {num_layers}; train them for this model"
            )

    def refreshing(places: TokenPositions) -> Array:
        return ~places.is_generated | (places.num_generated % every == 0)

    def start(batch: int, num_layers: int) -> Array:
        return jnp.zeros((batch, len(which), width), dtype)

    def plan(params: Corrections, places: TokenPositions, stored: Array, num_layers: int) -> _Drop:
        refresh_position = places.positions - jnp.where(places.is_generated, places.num_generated % every, 0)
        assert places.mask is not None
        same = places.mask & (places.positions[:, None, :] == refresh_position[:, :, None])
        refreshes = refreshing(places)
        return _Drop(refreshes, same, stored, jnp.zeros((*refreshes.shape, len(which), width), dtype))

    def runs(carry: _Drop, layer: int) -> Sublayers:
        layer_runs = carry.refreshes if layer in which else jnp.ones_like(carry.refreshes)
        return Sublayers(layer_runs, layer_runs)

    def become(params: Corrections, carry: _Drop, layer_streams: LayerStreams) -> Array:
        if layer_streams.layer not in which:
            return layer_streams.after_mlp
        output = layer_streams.after_mlp.astype(jnp.float32)
        stored = carry.stored[:, which.index(layer_streams.layer)].astype(jnp.float32)[:, None]
        pass_output = jnp.einsum("bij,bjd->bid", carry.same.astype(jnp.float32), output)
        anchor = jnp.where(jnp.any(carry.same, 2)[..., None], pass_output, stored)
        down, up = params.down[layer_streams.layer], params.up[layer_streams.layer]
        correction = alpha / down.shape[0] * (layer_streams.before_layer.astype(jnp.float32) @ down.T) @ up.T
        return jnp.where(
            carry.refreshes[..., None],
            layer_streams.after_mlp,
            (anchor + correction).astype(layer_streams.after_mlp.dtype),
        )

    def see(params: Corrections, carry: _Drop, layer_streams: LayerStreams) -> _Drop:
        place = which.index(layer_streams.layer)
        return carry._replace(streams=carry.streams.at[:, :, place].set(layer_streams.after_mlp.astype(dtype)))

    def learn(stored: Array, streams: Array, places: TokenPositions, taken: Array) -> Array:
        order = jnp.where(taken & refreshing(places), jnp.arange(taken.shape[1]), -1)
        last = jnp.argmax(order, 1)
        newest = jnp.take_along_axis(streams, last[:, None, None, None], 1)[:, 0]
        return jnp.where((jnp.max(order, 1) >= 0)[:, None, None], newest, stored)

    return DepthPolicy(
        plan=plan, runs=runs, replace_stream=become, observe=see, observed_layers=lambda num_layers: which,
        init_state=start, record=lambda carry: carry.streams, update_state=learn, sparse_layers=droppable,
        sparse_period=every, check=check, width=width, name="lora_drop",
    )  # fmt: skip
