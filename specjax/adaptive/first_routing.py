"""FiRST: trained routers read the prompt and select the layers that the whole answer runs.

Jain, Bhat, Bhatia, Yadav, Bhattacharyya et al.: FiRST: Finetuning Router-Selective Transformers for Input-Adaptive
Latency Reduction (2024), arXiv 2410.12513.

Rule: the router of layer l computes r = sigmoid(w_l . h_l + b_l) for each token of the prompt. The answer skips layer l
if the mean of r over the prompt is below 1/2. The prompt runs all layers.
Training: first the routers alone (`train_routers`), then low-rank changes of the model with frozen routers
(`train_lora`).
Guarantee: lossy.

Deviations: the mean excludes the last token of the prompt, which the first decoding pass reads. After a prompt of one
token the answer runs all layers. Each row selects its own layers, and a batch skips only the layers that all of its
rows skip. Routers start with a positive bias, so that all layers run at first.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.adaptive.fitting import fit, surprise
from specjax.adaptive.optimise import descend, one_pass
from specjax.arrays.modes import jit, with_standard_modes
from specjax.catalog import REQUIRED, Method, Option
from specjax.errors import UsageError
from specjax.models.skipping.policy import DepthPolicy, LayerStreams, TokenPositions
from specjax.models.variants.low_rank import LoraWeights, apply_lora, init_lora
from specjax.models.variants.skipping_model import skip_layers
from specjax.numerics.validation import check_range
from specjax.types import Array, Model, Sublayers, Target

METHOD = Method(
    name="first",
    kind="adaptive",
    guarantee="lossy",
    summary="selects the layers of the whole answer with trained routers that read the prompt",
    paper="Jain et al. 2024, arXiv 2410.12513",
    options=(Option("routers", "routers", REQUIRED, "file of trained routers"),),
)


class Routers(NamedTuple):
    """Linear routers, one for each layer."""

    weight: Array  # float32[layers, D]
    bias: Array  # float32[layers]


class GateSums(NamedTuple):
    """Sums of the router outputs over a prompt."""

    total: Array  # float32[B, layers]
    tokens: Array  # int32[B], number of tokens in the sums


class _Routed(NamedTuple):
    runs: Array  # bool[B, T, layers], the layers that each token runs
    gates: Array  # float32[B, T, layers], router outputs


def first(routers: Routers) -> DepthPolicy:
    """Return the depth policy for `specjax.adaptive.skip_layers(target, first(routers))`.

    Args: routers: from `train_routers` or `read_routers`.
    """
    if routers.weight.ndim != 2 or routers.bias.shape != routers.weight.shape[:1]:
        raise UsageError(
            f"routers must be weight [layers, width] and bias [layers], not {routers.weight.shape} and "
            f"{routers.bias.shape}"
        )
    return _first(len(routers.bias)).replace(params=routers, width=routers.weight.shape[1])


@functools.cache
def _first(layers: int) -> DepthPolicy:
    def check(num_layers: int) -> None:
        if num_layers != layers:
            raise UsageError(
                f"the routers fit {layers} layers, but the model has {num_layers}; train them for this model"
            )

    return DepthPolicy(
        plan=_plan,
        runs=_runs,
        observe=_observe,
        init_state=_init_state,
        record=_record_gates,
        update_state=_accumulate,
        check=check,
        name="first",
    )


def _init_state(batch: int, num_layers: int) -> GateSums:
    return GateSums(jnp.zeros((batch, num_layers)), jnp.zeros((batch,), jnp.int32))


def _plan(params: Routers, places: TokenPositions, sums: GateSums, num_layers: int) -> _Routed:
    selected = (sums.total >= 0.5 * sums.tokens[:, None])[:, None]
    runs = selected | ~places.is_generated[..., None]
    return _Routed(runs, jnp.zeros(runs.shape, jnp.float32))


def _runs(carry: _Routed, layer) -> Sublayers:
    layer_runs = carry.runs[..., layer]
    return Sublayers(layer_runs, layer_runs)


def gate(routers: Routers, layer, stream: Array) -> Array:
    """Return float32[B, T]: r of layer `layer` for the stream [B, T, D] before it."""
    return jax.nn.sigmoid(stream.astype(jnp.float32) @ routers.weight[layer] + routers.bias[layer])


def _observe(params: Routers, carry: _Routed, streams: LayerStreams) -> _Routed:
    return carry._replace(
        gates=carry.gates.at[..., streams.layer].set(gate(params, streams.layer, streams.before_layer))
    )


def _record_gates(carry: _Routed) -> Array:
    return carry.gates


def _accumulate(sums: GateSums, gates: Array, places: TokenPositions, taken: Array) -> GateSums:
    counts = taken & (places.positions < places.prompt_length[:, None] - 1)
    return GateSums(
        sums.total + jnp.sum(gates * counts[..., None], 1), sums.tokens + jnp.sum(counts, 1, dtype=jnp.int32)
    )


@with_standard_modes
def train_routers(
    target: Target,
    tokens: Array,
    prompt: Array,
    length: Array,
    *,
    weight: float = 0.01,
    bias: float = 2.0,
    steps: int = 100,
    learning_rate: float = 1e-2,
) -> Routers:
    """Train routers for a frozen target, on texts as in `fit`.

    All layers run, and layer l returns h_{l+1} = r f_l(h_l) + (1 - r) h_l. The loss is the cross entropy of the answers
    plus `weight` times the mean of r. bias: initial bias of all routers. Their weights start at zero.
    """
    check_range("weight", weight, lambda x: (x >= 0) & (x < np.inf), "a number of at least 0")
    layers, width = target.model.capabilities.num_layers, target.model.config.width
    blank = Routers(jnp.zeros((layers, width)), jnp.full((layers,), bias))
    soft = _soft(layers).replace(params=blank)
    return fit(
        target, soft, tokens, prompt, length, steps=steps, learning_rate=learning_rate, penalty=_mean_gate(weight)
    )[0].params


@functools.cache
def _mean_gate(weight: float):
    return lambda gates: weight * jnp.mean(gates)


@functools.cache
def _soft(layers: int) -> DepthPolicy:
    """Return a policy in which all layers run, scaled by their router outputs."""

    def plan(params: Routers, places: TokenPositions, state, num_layers: int) -> _Routed:
        shape = (*places.positions.shape, num_layers)
        return _Routed(jnp.ones(shape, bool), jnp.zeros(shape))

    def become(params: Routers, carry: _Routed, streams: LayerStreams) -> Array:
        r = gate(params, streams.layer, streams.before_layer)[..., None]
        return (r * streams.after_mlp + (1 - r) * streams.before_layer).astype(streams.after_mlp.dtype)

    return DepthPolicy(
        plan=plan, runs=_runs, observe=_observe, record=_record_gates, replace_stream=become, name="first_trained"
    )


@with_standard_modes
def train_lora(
    target: Target,
    routers: Routers,
    tokens: Array,
    prompt: Array,
    length: Array,
    *,
    rank: int = 8,
    alpha: float = 16.0,
    key: Array | int = 0,
    steps: int = 100,
    learning_rate: float = 1e-3,
) -> tuple[Target, Array]:
    """Train the second stage: low-rank changes of the query and value projections, with frozen routers.

    In each step the routers read the streams of the changed model, as in decoding. Texts are as in `fit`. Returns the
    changed target for `skip_layers(target, first(routers))`, and the loss of each step.
    """
    model = skip_layers(target, first(routers)).model
    key = jax.random.key(key) if isinstance(key, int) else key
    blank = init_lora(target, key, rank)
    changes, losses = _train_lora(
        model, target.model, alpha, steps, learning_rate, target.params, routers, blank, tokens, prompt, length
    )
    return apply_lora(target, changes, alpha), losses


@jit(static_argnums=(0, 1, 2, 3, 4))
def _train_lora(
    model: Model, full_model: Model, alpha: float, steps: int, learning_rate: float, base, routers, changes, tokens,
    prompt,
    length,
):  # fmt: skip
    def loss(changes: LoraWeights) -> Array:
        both = {"base": apply_lora(Target(full_model, base), changes, alpha).params, "depth": routers}
        memory = model.start_cache(both, None, prompt, 0)
        # The first pass computes the router outputs of the prompt, which select the layers of the second.
        _, pending = one_pass(model, jax.lax.stop_gradient(both), tokens, memory)
        place = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        sums = _accumulate(memory.state, pending.records, TokenPositions(place, prompt), place < prompt[:, None])
        return surprise(model, both, tokens, prompt, length, memory._replace(state=sums))[0]

    return descend(loss, changes, steps, learning_rate)
