"""P-EAGLE: an EAGLE-3 head that drafts all depths in one pass, from a learned state in place of those not there yet.

P-EAGLE: Parallel-Drafting EAGLE with Scalable Training (2026), arXiv 2602.01469. Behind the pairs of the text stand
pairs of a mask token and fc of `mask_hidden`, one a depth, causal; the k-th says draft k + 1:

            position    n-3               n-2           n-1          n
            pair        (f_{n-3}, x_{n-2}) (f_{n-2}, root) (m, mask)   (m, mask)
            says        root              draft 1       draft 2      draft 3
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.arrays.indexing import take_along
from specjax.errors import UsageError
from specjax.models.heads import eagle3
from specjax.models.heads.autoregressive import HeadMemory, autoregressive
from specjax.models.heads.blocks import bind, next_step
from specjax.models.heads.contract import DraftedNodes, Head
from specjax.models.heads.eagle3 import Eagle3, Eagle3Config
from specjax.models.llama import LlamaConfig
from specjax.types import Array, Context


@dataclass(frozen=True)
class PEagleConfig(Eagle3Config):
    """As of EAGLE-3. Published keys: mask_token is `mask_token_id` or `ptd_token_id`, depths `num_depths` or
    `para_depths`; the parameter `mask_hidden` is flat."""

    mask_token: int = 0
    depths: int = 8


class PEagle(Eagle3):
    """An EAGLE-3 head with a learned state."""

    def __init__(self, config: PEagleConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        width = len(config.taps) * config.target_width
        self.mask_hidden = nnx.Param(jax.random.normal(rngs.params(), (width,), config.layer.dtype))


class Scratch(NamedTuple):
    logits: Array  # float32[B, depths, V]


@functools.cache
def p_eagle_head(config: PEagleConfig) -> Head:
    """The functions of a P-EAGLE head. Memory: that of an EAGLE-3 head.

    Raises: UsageError for fewer than two depths.
    """
    if config.depths < 2:
        raise UsageError(
            f"depths must be at least 2, not {config.depths}; a head that drafts one token is an EAGLE-3 head"
        )
    module_of = bind(PEagle, config)

    def start(params, memory: HeadMemory, context: Context, places: int) -> tuple[Scratch, Array]:
        module, batch, more = module_of(params), len(memory.last), config.depths - 1
        tokens = jnp.full((batch, more), config.mask_token, jnp.int32)
        state = module.fused(jnp.broadcast_to(module.mask_hidden[...], (batch, more, len(module.mask_hidden[...]))))
        step = next_step(context, config.layer, memory.cache, more)
        said, _ = module.layers(module.embedded(tokens, context), state, step, memory.cache)
        logits = module.logits(jnp.concatenate([memory.last[:, None], said], 1), context)
        return Scratch(logits), logits[:, 0]

    def follow(params, scratch: Scratch, drafted: DraftedNodes, context: Context) -> tuple[Scratch, Array]:
        return scratch, take_along(scratch.logits, drafted.depth[:, :, None], 1)

    head = autoregressive("p_eagle", PEagle, config)
    return head._replace(start=start, follow=follow, max_depth=config.depths, is_single_pass=True)


def of_target(target: LlamaConfig, *, num_layers: int = 4, embeds: bool = True, **changes) -> PEagleConfig:
    """The shapes that are trained for a target: four layers and an embedding; the mask is its last token."""
    shapes = vars(eagle3.of_target(target, **changes))
    layer = dataclasses.replace(shapes["layer"], num_layers=num_layers)
    return PEagleConfig(**shapes | {"layer": layer, "embeds": embeds}, mask_token=target.vocab_size - 1)
