"""Hidden Transfer: the target's own upper layers draft, from states that are predicted in the middle of its stack.

Wu, Liu, Gong, Wang, Li, Wang, Cai, Zhao: Parallel Decoding via Hidden Transfer for Lossless Large Language Model
Acceleration (2024), arXiv 2404.12022.

Rule: h~_{n-2+i} = W_i h_{n-2}, where h is the target's stream after layer l_i at the last token that it has read. The
remaining layers of the target process h~ at position n-2+i. It attends to the text before the root, to the predicted
states of nearer positions, and to itself. The target's norm and output layer turn it into draft i:

    position      n-2       n-1        n         n+1
    layer l     h_{n-2}   W_1 h      W_2 h     W_3 h     (h = h_{n-2})
    predicts      root     draft 1   draft 2   draft 3

At one depth all nodes have the same distribution.
Guarantee: distribution (a tree of most likely tokens is a point mass; a sampled one is verified with its q).
Deviations: the authors carry the states of all candidates through the target pass, and keep those of the last accepted
one. Here only these are computed, at the start of the next draft, with equal results. That is one pass of the target's
upper layers over one state per draft, instead of as many additional slots for every node.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import pairwise

import jax.numpy as jnp
from flax import nnx

from specjax.catalog import Method, shared
from specjax.errors import UsageError
from specjax.models import layers as L
from specjax.models.heads.blocks import bind, draft_depths, get_target, last_entry
from specjax.models.heads.contract import FeaturePairs, Head, HeadKind, Stretches
from specjax.models.llama import LlamaConfig
from specjax.models.requirements import check_partial_passes
from specjax.types import Array, Context, Stream, Sublayers

METHOD = Method(
    name="hidden_transfer",
    summary="drafts in one pass of the target's upper layers over predicted hidden states of later positions",
    paper="Wu et al. 2024, arXiv 2404.12022",
    options=shared.head_options(),
    cpu_options={"num_tokens": 3},
    **shared.HEAD,
)


@dataclass(frozen=True)
class HiddenTransferConfig:
    """Shapes of the transfer matrices. No checkpoints are published."""

    width: int
    behind: tuple[int, ...]  # l_i: for each draft, the layer of the target after which its state is predicted
    dtype: str = "float32"

    @property
    def taps(self) -> tuple[int, ...]:
        return tuple(sorted(set(self.behind)))


class HiddenTransfer(nnx.Module):
    """The transfer matrices. A new matrix is the identity."""

    def __init__(self, config: HiddenTransferConfig, *, rngs: nnx.Rngs):
        c = config
        self.transfers = nnx.List([L.Linear(c.width, c.width, dtype=c.dtype, rngs=rngs) for _ in c.behind])
        for transfer in self.transfers:
            transfer.weight[...] = jnp.eye(c.width, dtype=c.dtype)


@functools.cache
def hidden_transfer_head(config: HiddenTransferConfig) -> Head:
    """Return the functions of the transfers. Their memory stores the last streams [B, F].

    `init_memory` raises a UsageError for a target that cannot run some of its layers on given states, or has too few.
    """
    module_of, last_layer = bind(HiddenTransfer, config), max(config.behind)

    def init_memory(params, context: Context, batch: int, capacity: int) -> Array:
        model = get_target(context).model
        num_layers = check_partial_passes(model, "hidden_transfer")
        can_run = model.capabilities.streams
        if not can_run or last_layer > num_layers:
            raise UsageError(
                f"the head drafts with the layers after layer {last_layer} of its target, but the model {model.name} "
                f"{f'has {num_layers} layers' if can_run else 'cannot run its layers on given states'}; use the "
                "target that it was trained for"
            )
        return jnp.zeros((batch, len(config.taps) * config.width), config.dtype)

    def stretches(num_layers: int) -> Stretches:
        return tuple(pairwise((*config.taps, num_layers)))

    def read(params, last: Array, pairs: FeaturePairs, context: Context) -> Array:
        return last_entry(pairs.features, pairs.count, last)

    def outputs_of(params, last: Array, context: Context) -> Array:
        target, transfers = get_target(context), module_of(params).transfers
        assert target.model.head is not None
        streams = dict(zip(config.taps, jnp.split(last, len(config.taps), -1), strict=True))
        states: dict[int, Array] = {}  # [B, D], by draft
        for layer, stop in stretches(target.model.capabilities.num_layers):
            h = streams[layer]
            states |= {i: transfers[i](h) for i, behind in enumerate(config.behind) if behind == layer}
            drafts = sorted(states)
            x = run_layers(context, jnp.stack([states[i] for i in drafts], 1), drafts, layer, stop)
            states = {i: x[:, j] for j, i in enumerate(drafts)}
        return x

    def logits(params, outputs: Array, context: Context) -> Array:
        target = get_target(context)
        assert target.model.head is not None
        return target.model.head(target.params, outputs)

    def run_layers(context: Context, x: Array, drafts: list[int], first: int, last: int) -> Array:
        """Run the states [B, T, D] of these drafts through the layers of the target after `first`, up to `last`."""
        if first == last:
            return x
        target, (batch, size, _) = get_target(context), x.shape
        layer = jnp.arange(target.model.capabilities.num_layers)
        runs = jnp.broadcast_to((first <= layer) & (layer < last), (batch, len(layer)))
        positions = context.length[:, None] - 1 + jnp.array(drafts, jnp.int32)
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((size, size), bool)), (batch, size, size))
        output, _ = target.model.forward(
            target.params, Stream(x), context.cache, positions=positions, mask=mask, layers=Sublayers(runs, runs),
            taps=(last,),
        )  # fmt: skip
        return output.taps[0]

    return Head(
        init_memory=init_memory,
        read=read,
        kind="hidden_transfer",
        config=config,
        taps=config.taps,
        max_depth=len(config.behind),
        is_single_pass=True,
        **draft_depths(outputs_of, logits),
        target_layers=lambda num_layers: tuple((first, last) for first, last in stretches(num_layers) if first < last),
    )


def of_target(target: LlamaConfig, *, num_heads: int = 3, behind: int | None = None, **changes) -> HiddenTransferConfig:
    """Return the shapes for a target: all states are predicted after one layer, by default at three quarters.

    Raises: UsageError for a layer that the target lacks.
    """
    layer = 3 * target.num_layers // 4 if behind is None else behind
    if not 0 <= layer <= target.num_layers:
        raise UsageError(f"behind must be from 0 to {target.num_layers}, the target's layers, not {layer}")
    return HiddenTransferConfig(target.width, (layer,) * num_heads, **{"dtype": target.dtype} | changes)


KIND = HeadKind(METHOD, HiddenTransfer, hidden_transfer_head, of_target, ("num_heads", "behind"))
