"""Policies of adaptive depth: each token of a model runs its own subset of the layers.

The methods of `specjax.adaptive` fill three slots. A *plan* chooses before a pass which sublayers a token runs. An
*exit* changes the plan while the pass goes through the layers. A *repair* fills the cache of a layer that a token
skipped, for later tokens.

The sublayers of a token depend on the token, its position and its cached ancestors. They never depend on the batch or
on other tokens of the pass. So a pass over a tree, or over a whole text, gives each token the result of plain decoding.
A drafter for such a model is therefore as lossless as for any other model.

A kind of target takes part with its own loop over its layers, because only that loop knows what its layers cache. Its
`forward` accepts `depth`, a `DepthPass`, and returns `SkippingPending`. The loop calls `start` before the first layer,
`runs` before each layer, `after_layer` after it, and `pending` at the end. A sublayer that a token skips leaves its
stream unchanged. `DepthPolicy.repair` names what it leaves in the cache. The loop of attention models is in
`attention_layers.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from specjax.models import layers as L
from specjax.types import STATIC, Array, PyTree, Sublayers

Repair = Literal["absent", "propagate"]
"""The keys and values of a token in a layer whose attention it skips.

`absent`: it has none, and no token that runs the layer may read them. `propagate`: the layer projects the stream with
which the token exited (Schuster et al. 2022, arXiv 2207.07061). A layer with a recurrent state keeps its state with
`absent`, and advances it by the stream of the exit with `propagate`.
"""


class TokenPositions(NamedTuple):
    """The positions of the tokens of a pass."""

    positions: Array  # int32[B, T]
    prompt_length: Array  # int32[B], tokens of the prompt
    mask: Array | None = None  # bool[B, T, T], ancestors of each token in the pass, and itself; None: outside of a pass

    @property
    def is_generated(self) -> Array:
        """Return bool[B, T], True for tokens after the prompt."""
        return self.positions >= self.prompt_length[:, None]

    @property
    def num_generated(self) -> Array:
        """Return int32[B, T], the number of tokens generated before each one; 0 within the prompt."""
        return jnp.maximum(self.positions - self.prompt_length[:, None], 0)


class LayerStreams(NamedTuple):
    """The residual streams around a layer that was run or skipped."""

    layer: Array | int  # from 0
    before_layer: Array  # [B, T, D], the stream before the layer
    after_attention: Array  # [B, T, D], after its attention
    after_mlp: Array  # [B, T, D], after its MLP
    runs: Sublayers  # bool[B, T] each, the tokens that ran each sublayer
    head: Callable[[Array], Array]  # stream [B, T, D] -> logits float32[B, T, V]


def _empty_state(batch: int, num_layers: int) -> PyTree:
    return ()


def _record_nothing(carry: PyTree) -> PyTree:
    return ()


def _keep_state(state: PyTree, records: PyTree, tokens: TokenPositions, is_committed: Array) -> PyTree:
    return state


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DepthPolicy:
    """A policy of how many layers each token runs, as pure functions. `params` are the only leaves.

    `plan(params, tokens, state, num_layers) -> carry` starts a pass. `runs(carry, layer) -> Sublayers` of bool[B, T]
    each returns the sublayers of a layer that its tokens run. `observe(params, carry, streams) -> carry` reads the
    streams around the layers in `observed_layers(num_layers)`. Prompt tokens must run every sublayer (see
    `TokenPositions.is_generated`), unless no token ever reads the keys and values that they leave out.

    `state` is memory per text besides keys and values, arrays [B, ...]. The default is ().
    `init_state(batch, num_layers) -> state` creates it.
    `record(carry) -> records` returns arrays [B, T, ...] for the tokens of a pass.
    `update_state(state, records, tokens, is_committed[B, T]) -> state` adds those of committed tokens.

    `kept_layers(num_layers)` lists the layers that any token may run, if that is fixed. The other layers are then
    removed.

    `mlp_units(mlp_widths)` returns the numbers of leading hidden units that the MLPs keep for all tokens. Both have one
    number per layer.

    `replace_stream(params, carry, streams) -> stream [B, T, D]` returns the input of the next layer in place of
    `streams.after_mlp`, for methods that substitute a layer.

    `sparse_layers(num_layers)` lists layers without nested token sets. Their tokens see only other tokens that ran
    them. All sparse layers are run by the same tokens. Their caches store only those tokens, and must not be stacked.
    These are the tokens of the prompt, and at most the first of every `sparse_period` tokens after it.

    `longest_prompt` is the largest number of first tokens that count as the prompt. Longer prompts have generated
    tokens at their end, for the policy. The caches of the sparse layers are then as small as that allows.
    """

    plan: Callable[..., PyTree] = field(metadata=STATIC)
    runs: Callable[..., Sublayers] = field(metadata=STATIC)
    observe: Callable[..., PyTree] | None = field(metadata=STATIC, default=None)
    observed_layers: Callable[[int], tuple[int, ...]] = field(
        metadata=STATIC, default=lambda num_layers: tuple(range(num_layers))
    )
    repair: Repair = field(metadata=STATIC, default="absent")
    init_state: Callable[[int, int], PyTree] = field(metadata=STATIC, default=_empty_state)
    record: Callable[[PyTree], PyTree] = field(metadata=STATIC, default=_record_nothing)
    update_state: Callable[..., PyTree] = field(metadata=STATIC, default=_keep_state)
    kept_layers: Callable[[int], tuple[int, ...]] | None = field(metadata=STATIC, default=None)
    mlp_units: Callable[[tuple[int, ...]], tuple[int, ...]] | None = field(metadata=STATIC, default=None)
    replace_stream: Callable[..., Array] | None = field(metadata=STATIC, default=None)
    sparse_layers: Callable[[int], tuple[int, ...]] = field(metadata=STATIC, default=lambda num_layers: ())
    sparse_period: int = field(metadata=STATIC, default=1)
    longest_prompt: int | None = field(metadata=STATIC, default=None)
    check: Callable[[int], None] = field(metadata=STATIC, default=lambda num_layers: None)  # raises UsageError
    width: int | None = field(metadata=STATIC, default=None)  # width of the streams that its parameters fit; None: any
    name: str = field(metadata=STATIC, default="depth")
    params: PyTree = ()

    replace = replace


class SkippingPending(NamedTuple):
    """Pending tokens of a pass through some of the layers."""

    base: PyTree  # pending entries of the base model
    ran: Sublayers  # bool[B, T, layers] each
    records: PyTree  # from `DepthPolicy.record`
    positions: Array  # int32[B, T]


class DepthPass(NamedTuple):
    """A depth policy within one pass of a target of any kind. It reads streams, and no cache."""

    policy: DepthPolicy
    params: PyTree
    tokens: TokenPositions
    state: PyTree  # from `DepthPolicy.init_state`
    head: Callable[[Array], Array]  # stream [B, T, D] -> logits float32[B, T, V]
    sparse_length: Array | None = None  # int32[B], tokens in the caches of the sparse layers

    def start(self, num_layers: int) -> PyTree:
        """Return the carry before the first layer."""
        return self.policy.plan(self.params, self.tokens, self.state, num_layers)

    def runs(self, carry: PyTree, layer: Array | int, layers: Sublayers | None) -> Sublayers:
        """Return the sublayers of a layer that each token runs, bool[B, T], within those that the caller selects.

        layers: the argument `layers` of `Model.forward`, or None.
        """
        runs = self.policy.runs(carry, layer)
        if layers is None:
            return runs
        rows = L.at_layer(layers, layer, axis=1)
        return jax.tree.map(lambda runs, of_row: runs & of_row[:, None], runs, rows)

    def observed(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers whose streams the policy reads."""
        return () if self.policy.observe is None else self.policy.observed_layers(num_layers)

    def after_layer(
        self, carry: PyTree, streams: LayerStreams, is_observed: Array | bool = True
    ) -> tuple[Array, PyTree]:
        """Return the input of the next layer, and the carry. The policy reads the streams if `is_observed`."""
        stream, observe = streams.after_mlp, self.policy.observe
        if self.policy.replace_stream is not None:
            stream = self.policy.replace_stream(self.params, carry, streams)
        if observe is None or is_observed is False:
            return stream, carry
        if is_observed is True:
            return stream, observe(self.params, carry, streams)
        return stream, jax.lax.cond(is_observed, lambda: observe(self.params, carry, streams), lambda: carry)

    def pending(self, base: PyTree, ran: Sublayers, carry: PyTree) -> SkippingPending:
        """Return the pending tokens, from those of the base model and the sublayers bool[B, T, layers] that ran."""
        return SkippingPending(base, ran, self.policy.record(carry), self.tokens.positions)
