"""Hidden Transfer: states of tokens that are not there yet, made in the middle of the target's stack.

Wu et al.: Parallel Decoding via Hidden Transfer for Lossless Large Language Model Acceleration (2024),
arXiv 2404.12022. h~_{n-2+i} = W_i h_{n-2}, where h is the target's stream behind layer l_i of the last token that it
has read. From there on h~ stands at position n-2+i in the target's own layers, and sees the text before the root, the
states of nearer tokens that there are, and itself; what norm and head say of it is draft i:

    position      n-2       n-1        n         n+1
    layer l     h_{n-2}   W_1 h      W_2 h     W_3 h     (h = h_{n-2})
    says          root     draft 1   draft 2   draft 3
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx

from specjax.arrays.indexing import take_along
from specjax.errors import UsageError
from specjax.models import layers as L
from specjax.models.heads.blocks import bind, newest, target_of
from specjax.models.heads.contract import DraftedNodes, Head, FeaturePairs, Stretches
from specjax.models.llama import LlamaConfig
from specjax.types import Array, Context, Stream, Sublayers


@dataclass(frozen=True)
class HiddenTransferConfig:
    """Shapes of a set of transfers. No checkpoints are published."""

    width: int
    behind: tuple[int, ...]  # l_i: the layer of the target behind which each draft's state is made
    dtype: str = "float32"

    @property
    def taps(self) -> tuple[int, ...]:
        return tuple(sorted(set(self.behind)))


class HiddenTransfer(nnx.Module):
    """The matrices. New ones leave the state as it is."""

    def __init__(self, config: HiddenTransferConfig, *, rngs: nnx.Rngs):
        c = config
        self.transfers = nnx.List([L.Linear(c.width, c.width, dtype=c.dtype, rngs=rngs) for _ in c.behind])
        for transfer in self.transfers:
            transfer.weight[...] = jnp.eye(c.width, dtype=c.dtype)


class Scratch(NamedTuple):
    logits: Array  # float32[B, K, V], by depth


@functools.cache
def hidden_transfer_head(config: HiddenTransferConfig) -> Head:
    """The functions of a set of transfers. Memory: the last streams [B, F].

    Raises (`init_memory`): UsageError for a target that cannot run a part of its layers on given states, or has not as many.
    """
    module_of, furthest = bind(HiddenTransfer, config), max(config.behind)

    def init_memory(params, context: Context, batch: int, capacity: int) -> Array:
        model = target_of(context).model
        able = model.capabilities
        if not (able.layer_skipping and able.streams) or furthest > able.num_layers:
            can = "a part" if able.layer_skipping and able.streams else "no part"
            raise UsageError(
                f"the head drafts with the layers of its target above layer {furthest}, but the model {model.name} can "
                f"run {can} of its {able.num_layers} on states that are given; give it the target that it was trained "
                "for"
            )
        return jnp.zeros((batch, len(config.taps) * config.width), config.dtype)

    def stretches(num_layers: int) -> Stretches:
        return tuple(pairwise((*config.taps, num_layers)))

    def read(params, last: Array, pairs: FeaturePairs, context: Context) -> Array:
        return newest(pairs.features, pairs.count, last)

    def start(params, last: Array, context: Context, places: int) -> tuple[Scratch, Array]:
        target, transfers = target_of(context), module_of(params).transfers
        assert target.model.head is not None
        streams = dict(zip(config.taps, jnp.split(last, len(config.taps), -1), strict=True))
        states: dict[int, Array] = {}  # [B, D], by draft
        for layer, above in stretches(target.model.capabilities.num_layers):
            h = streams[layer]
            states |= {i: transfers[i](h) for i, behind in enumerate(config.behind) if behind == layer}
            there = sorted(states)
            x = through(context, jnp.stack([states[i] for i in there], 1), there, layer, above)
            states = {i: x[:, j] for j, i in enumerate(there)}
        logits = target.model.head(target.params, x)
        return Scratch(logits), logits[:, 0]

    def through(context: Context, x: Array, there: list[int], first: int, last: int) -> Array:
        """The states [B, T, D] of these drafts behind layer `last` of the target, from behind layer `first`."""
        if first == last:
            return x
        target, (batch, size, _) = target_of(context), x.shape
        layer = jnp.arange(target.model.capabilities.num_layers)
        runs = jnp.broadcast_to((first <= layer) & (layer < last), (batch, len(layer)))
        positions = context.length[:, None] - 1 + jnp.array(there, jnp.int32)
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((size, size), bool)), (batch, size, size))
        output, _ = target.model.forward(
            target.params, Stream(x), context.cache, positions=positions, mask=mask, layers=Sublayers(runs, runs),
            taps=(last,),
        )  # fmt: skip
        return output.taps[0]

    def follow(params, scratch: Scratch, drafted: DraftedNodes, context: Context) -> tuple[Scratch, Array]:
        return scratch, take_along(scratch.logits, drafted.depth[:, :, None], 1)

    return Head(
        init_memory=init_memory,
        read=read,
        start=start,
        follow=follow,
        kind="hidden_transfer",
        config=config,
        taps=config.taps,
        max_depth=len(config.behind),
        is_single_pass=True,
        target_layers=lambda num_layers: tuple((first, last) for first, last in stretches(num_layers) if first < last),
    )


def of_target(target: LlamaConfig, *, num_heads: int = 3, behind: int | None = None, **changes) -> HiddenTransferConfig:
    """Transfers for a target: all behind one layer, by default three quarters of its way up.

    Raises: UsageError for a layer that the target has not.
    """
    layer = 3 * target.num_layers // 4 if behind is None else behind
    if not 0 <= layer <= target.num_layers:
        raise UsageError(f"behind must be from 0 to {target.num_layers}, the target's layers, not {layer}")
    return HiddenTransferConfig(target.width, (layer,) * num_heads, **{"dtype": target.dtype} | changes)
