"""S2D: one draft model with several exits, each a smaller model, drafts for targets of several sizes.

Kavehzadeh, Pourreza, Valipour, Zhu, Bai, Ghodsi, Chen, Rezagholizadeh: S2D: Sorted Speculative Decoding For More
Efficient Deployment of Nested LLMs (2024), arXiv 2407.01955.

Rule: the exits of the draft model are l_1 < ... < l_K, at equal distances in depth, and l_K is its last layer. A token
exits at the first l with max softmax(head(norm(h_l))) >= theta, or else at l_K. It is drafted with the distribution q
of its exit.
Training (sorted fine-tuning): the cross entropy at each exit, averaged over the exits.
Guarantee: lossy as a target. With a draft model of `drafters.two_model` the text is that of the target.

Deviations: layers after the exit compute a token's keys and values from the stream at the exit, and no later pass runs
these layers. Tokens of the prompt run all layers. All exits share one threshold.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from specjax.adaptive.exits import leaving, threshold_level
from specjax.adaptive.optimise import descend, one_pass
from specjax.arrays.indexing import take_along
from specjax.arrays.modes import jit, with_standard_modes
from specjax.catalog import Method, Option
from specjax.errors import UsageError
from specjax.models.skipping.policy import DepthPolicy, LayerStreams
from specjax.numerics.validation import check_integer
from specjax.types import Array, Model, PyTree, Target

METHOD = Method(
    name="s2d",
    kind="adaptive",
    guarantee="lossy",
    summary="exits a draft model for each token at the first of several exits that is confident",
    paper="Kavehzadeh et al. 2024, arXiv 2407.01955",
    options=(
        Option("threshold", "float", 0.7, "top probability at which a token exits; above 1: only at the last exit"),
        Option("exits", "int", 3, "number of exits, at equal distances in depth"),
    ),
)


def s2d(threshold: float = 0.7, *, exits: int = 3) -> DepthPolicy:
    """Return the depth policy for `drafters.two_model(specjax.adaptive.skip_layers(draft, s2d()))`.

    `train_sorted` trains such a draft model.

    threshold: theta, an array parameter; above 1 only the last exit is used. exits: K.
    """
    if math.isnan(threshold):
        raise UsageError("threshold must be a number")
    if exits < 2:
        raise UsageError(f"exits must be at least 2, not {exits}")
    return _s2d(exits).replace(params=jnp.float32(threshold))


def exit_layers(exits: int, num_layers: int) -> tuple[int, ...]:
    """Return the number of layers that run up to each exit. The last exit has all of them.

    Raises: UsageError for more exits than layers.
    """
    if not 1 <= exits <= num_layers:
        raise UsageError(f"exits must be from 1 to the {num_layers} layers of the model, not {exits}")
    return tuple(round(num_layers * number / exits) for number in range(1, exits + 1))


@functools.cache
def _s2d(exits: int) -> DepthPolicy:
    def tested(num_layers: int) -> tuple[int, ...]:
        return tuple(count - 1 for count in exit_layers(exits, num_layers)[:-1])

    return leaving("s2d", _likeliest, threshold_level, tested)


def _likeliest(params, layer_streams: LayerStreams) -> Array:
    logits = layer_streams.head(layer_streams.after_mlp)
    return jnp.exp(jnp.max(logits, -1) - jax.nn.logsumexp(logits, -1))


@with_standard_modes
def sorted_loss(model: Model, params: PyTree, tokens: Array, length: Array, exits: tuple[int, ...]) -> Array:
    """Return the mean next-token cross entropy over `exits`, which are numbers of layers.

    tokens: int32[B, T], texts of `length` int32[B] tokens.
    """
    output, _ = one_pass(model, params, tokens, model.init_cache(params, None, len(tokens), 0), exits)
    counts = jnp.arange(tokens.shape[1] - 1) < length[:, None] - 1

    def of_exit(stream: Array) -> Array:
        assert model.head is not None
        log_p = jax.nn.log_softmax(model.head(params, stream[:, :-1]))
        return -jnp.sum(take_along(log_p, tokens[:, 1:, None], 2)[..., 0] * counts) / jnp.sum(counts)

    return sum(map(of_exit, output.taps), jnp.float32(0)) / len(exits)


@with_standard_modes
def train_sorted(
    draft: Target, tokens: Array, length: Array, *, exits: int = 3, steps: int = 100, learning_rate: float = 1e-3
) -> tuple[Target, Array]:
    """Train a draft model at all of its exits, in one batch. Returns the draft model and the loss of each step.

    draft: for example the first layers of a target (`specjax.models.prune_layers`). Raises: UsageError for a model
    without taps.
    """
    able = draft.model.capabilities
    if not able.taps or draft.model.head is None:
        raise UsageError(
            f"exits need Model.head and taps, which {draft.model.name} lacks; give a model of specjax.models"
        )
    check_integer("exits", exits, 2)
    layers = exit_layers(exits, able.num_layers)
    params, losses = _train(draft.model, layers, steps, learning_rate, draft.params, tokens, length)
    return Target(draft.model, params), losses


@jit(static_argnums=(0, 1, 2, 3))
def _train(model: Model, layers: tuple[int, ...], steps: int, learning_rate: float, params, tokens, length):
    loss = lambda params: sorted_loss(model, params, tokens, length, layers)
    return descend(loss, params, steps, learning_rate)
