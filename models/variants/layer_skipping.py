"""Models of which every token runs its own part: adaptive depth, and the loop over layers that it is.

Three slots, as the methods of `specjax.adaptive` fill them. A *plan* says before a pass which sublayers a token runs;
an *exit* changes that while the token goes up; a *repair* is what later tokens find in the cache of a layer that a
token did not run.

What a token runs depends on itself, its place in the text and what the cache says of its ancestors, never on the batch
or on the tokens beside it. So a pass over a tree, or over a whole text at once, does for each token what plain decoding
does for it, and whatever drafts for such a model is as lossless as for any other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models import cache as kv
from specjax.models import layers as L
from specjax.types import STATIC, Array, PyTree, Sublayers

Repair = Literal["absent", "propagate"]
"""Of the keys and values of a token in a layer whose attention it does not run. `absent`: there are none, and no token
that runs the layer may look for them. `propagate`: the layer's own projections of the stream that the token left with
(Schuster et al. 2022, arXiv 2207.07061)."""


class Places(NamedTuple):
    """Where the tokens of a pass stand."""

    positions: Array  # int32[B, T]
    prompt: Array  # int32[B], tokens of the prompt
    mask: Array | None = None  # bool[B, T, T], the ancestors of each among them, and itself; of a pass

    @property
    def generated(self) -> Array:
        """bool[B, T]: of the tokens behind the prompt."""
        return self.positions >= self.prompt[:, None]

    @property
    def nth(self) -> Array:
        """int32[B, T]: how many tokens were generated before; 0 within the prompt."""
        return jnp.maximum(self.positions - self.prompt[:, None], 0)


class Seen(NamedTuple):
    """A layer that was run, or left out."""

    layer: Array | int  # from 0
    before: Array  # [B, T, D], the stream before it
    between: Array  # behind its attention
    after: Array  # behind its MLP
    runs: Sublayers  # bool[B, T] each, which tokens ran what of it
    head: Callable[[Array], Array]  # stream [B, T, D] -> logits float32[B, T, V]


def _nothing(batch: int, num_layers: int) -> PyTree:
    return ()


def _notes_nothing(carry: PyTree) -> PyTree:
    return ()


def _keeps(own: PyTree, noted: PyTree, places: Places, taken: Array) -> PyTree:
    return own


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Depth:
    """How deep each token goes, as pure functions; `params` are the only leaves.

    `plan(params, places, own, num_layers) -> carry` is what a pass begins with, `runs(carry, layer) -> Sublayers` of
    bool[B, T] each what of a layer its tokens run, and `see(params, carry, seen) -> carry` looks at the streams around
    a layer, of those that `sees(num_layers)` names. Tokens of the prompt must run everything (`Places.generated`),
    unless nothing is ever read of what they leave out.

    What is known of a text beyond its keys and values is `own`, arrays [B, ...]: `start(batch, num_layers) -> own`;
    `note(carry) -> noted`, arrays [B, T, ...] of the tokens of a pass; `learn(own, noted, places, taken[B, T]) -> own`
    of those that were committed. Default: ().

    `keeps(num_layers)` names the layers that some token may run, if that is known at once: the others need no memory.

    `narrow(mlp_width)` says how many hidden units each MLP has, its first ones, for all tokens alike.

    `become(params, carry, seen) -> stream [B, T, D]` is what goes on to the next layer in place of `seen.after`, for
    methods that put something in the place of a layer.

    `sparse(num_layers)` names layers that nested sets do not hold for: what runs them sees only the tokens that ran
    them, which all of these layers have in common. Their caches have only those, and must not be stacked.
    """

    plan: Callable[..., PyTree] = field(metadata=STATIC)
    runs: Callable[..., Sublayers] = field(metadata=STATIC)
    see: Callable[..., PyTree] | None = field(metadata=STATIC, default=None)
    sees: Callable[[int], tuple[int, ...]] = field(metadata=STATIC, default=lambda num_layers: tuple(range(num_layers)))
    repair: Repair = field(metadata=STATIC, default="absent")
    start: Callable[[int, int], PyTree] = field(metadata=STATIC, default=_nothing)
    note: Callable[[PyTree], PyTree] = field(metadata=STATIC, default=_notes_nothing)
    learn: Callable[..., PyTree] = field(metadata=STATIC, default=_keeps)
    keeps: Callable[[int], tuple[int, ...]] | None = field(metadata=STATIC, default=None)
    narrow: Callable[[int], int] | None = field(metadata=STATIC, default=None)
    become: Callable[..., Array] | None = field(metadata=STATIC, default=None)
    sparse: Callable[[int], tuple[int, ...]] = field(metadata=STATIC, default=lambda num_layers: ())
    check: Callable[[int], None] = field(metadata=STATIC, default=lambda num_layers: None)  # raises UsageError
    width: int | None = field(metadata=STATIC, default=None)  # of the streams that its parameters read; None: any
    name: str = field(metadata=STATIC, default="depth")
    params: PyTree = ()

    replace = replace


class Thinned(NamedTuple):
    """What is pending of a pass through a part of the layers."""

    base: kv.Pending
    ran: Sublayers  # bool[B, T, layers] each
    noted: PyTree


class Through(NamedTuple):
    """The loop over layers, in place of `layers.run_layers`."""

    depth: Depth
    params: PyTree
    places: Places
    own: PyTree
    head: Callable[[Array], Array]
    few: Array | None = None  # int32[B], tokens in the caches of the sparse layers

    def __call__(
        self, layers, x: Array, step: L.Step, cache: kv.KVCache, reach: L.Reach
    ) -> tuple[list | Array, Thinned]:
        """The streams, as `run_layers` gives them, and what is pending."""
        run = self._unrolled if isinstance(layers, nnx.List) else self._scanned
        return run(layers, x, step, cache, reach)

    def _unrolled(self, layers, x, step, cache, reach):
        earlier = L.keys_and_values(step.earlier)
        carry = self.depth.plan(self.params, self.places, self.own, len(layers))
        watched, sparse = self._watched(len(layers)), self.depth.sparse(len(layers))
        among_few = self._among_few(carry, sparse, step) if sparse else step
        stream, new, ran = [x], [], []
        for i, block in enumerate(layers):
            prefix = L.Prefix(cache.k[i], cache.v[i], earlier=tuple(part[i] for part in earlier))
            inputs = L.LayerInputs(among_few if i in sparse else step, prefix, reach.of(i))
            runs = self._runs(carry, i, step)
            seen, pending = _layer(L.Weights(*nnx.split(block)), i, x, inputs, runs, self.depth.repair, self.head)
            x = self._onward(carry, seen)
            if i in watched:
                carry = self._look(carry, seen)
            stream.append(x)
            new.append(pending)
            ran.append(runs)
        k, v = zip(*new, strict=True)
        return stream, self._pending(k, v, step, x, jax.tree.map(lambda *runs: jnp.stack(runs, -1), *ran), carry)

    def _scanned(self, layers, x, step, cache, reach):
        graphdef, state = nnx.split(layers)
        earlier, count = L.keys_and_values(step.earlier), len(cache.k)
        carry = self.depth.plan(self.params, self.places, self.own, count)
        watched = self._watched(count)

        def body(carried, layer):
            x, carry = carried
            prefix = L.Prefix(cache.k, cache.v, layer, L.at_layer(earlier, layer))
            inputs = L.LayerInputs(step, prefix, reach.of(layer))
            runs = self._runs(carry, layer, step)
            weights = L.Weights(graphdef, state, layer)
            seen, new = _layer(weights, layer, x, inputs, runs, self.depth.repair, self.head)
            x = self._onward(carry, seen)
            if len(watched) == count:
                carry = self._look(carry, seen)
            elif watched:
                here = jnp.any(layer == jnp.asarray(watched))
                carry = jax.lax.cond(here, lambda: self._look(carry, seen), lambda: carry)
            return (x, carry), (x, new, runs)

        first = x[None]
        (x, carry), (stream, (k, v), ran) = jax.lax.scan(body, (x, carry), jnp.arange(count))
        ran = jax.tree.map(lambda runs: jnp.moveaxis(runs, 0, -1), ran)
        return jnp.concatenate([first, stream[:-1], x[None]]), self._pending(k, v, step, x, ran, carry)

    def _watched(self, num_layers: int) -> tuple[int, ...]:
        """The layers whose streams somebody looks at."""
        return () if self.depth.see is None else self.depth.sees(num_layers)

    def _runs(self, carry: PyTree, layer: Array | int, step: L.Step) -> Sublayers:
        runs = self.depth.runs(carry, layer)
        if step.layers is None:
            return runs
        rows = L.at_layer(step.layers, layer, axis=1)
        return jax.tree.map(lambda runs, of_row: runs & of_row[:, None], runs, rows)

    def _look(self, carry: PyTree, seen: Seen) -> PyTree:
        return carry if self.depth.see is None else self.depth.see(self.params, carry, seen)

    def _onward(self, carry: PyTree, seen: Seen) -> Array:
        return seen.after if self.depth.become is None else self.depth.become(self.params, carry, seen)

    def _among_few(self, carry: PyTree, sparse: tuple[int, ...], step: L.Step) -> L.Step:
        """The pass as the sparse layers see it: of the other tokens only those that run them."""
        ran = self._runs(carry, sparse[0], step).attention
        itself = jnp.eye(ran.shape[1], dtype=bool)  # a token that is left out sees something, so that it is a number
        return step.replace(mask=step.mask & (ran[:, None, :] | itself), length=self.few)

    def _pending(self, k, v, step: L.Step, x: Array, ran: Sublayers, carry: PyTree) -> Thinned:
        return Thinned(kv.Pending(k, v, step.positions, kv.after(x)), ran, self.depth.note(carry))


def _layer(weights: L.Weights, layer, x: Array, inputs: L.LayerInputs, runs: Sublayers, repair: Repair, head):
    """One layer, of which the tokens run what `runs` says: what is to be seen of it, and (k, v).

    A sublayer that no token of the batch runs costs nothing, but for the keys and values that are propagated.
    """
    between, new = _attend(weights.graphdef, repair, weights.state, weights.layer, x, inputs, runs.attention)
    after = _feed(weights.graphdef, weights.state, weights.layer, between, inputs.step, runs.mlp)
    return Seen(layer, x, between, after, runs, head), new


# Under `jit`, so that equal layers share one trace, as in `layers.run_layers`.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _attend(graphdef, repair: Repair, state, layer, x: Array, inputs: L.LayerInputs, tokens: Array):
    block = lambda: L.Weights(graphdef, state, layer).block()
    left = (lambda x: block().keys(x, inputs)) if repair == "propagate" else None
    return L.run_if(tokens, lambda x: block().attend(x, inputs), x, left)


@functools.partial(jax.jit, static_argnums=0)
def _feed(graphdef, state, layer, x: Array, step: L.Step, tokens: Array) -> Array:
    return L.run_if(tokens, lambda x: (L.Weights(graphdef, state, layer).block().feed(x, step), ()), x)[0]
