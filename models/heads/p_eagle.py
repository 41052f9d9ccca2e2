"""P-EAGLE: an EAGLE-3 head that drafts all depths in one pass, with a learned state for the features that are unknown.

P-EAGLE: Parallel-Drafting EAGLE with Scalable Training (2026), arXiv 2602.01469.

Rule: the pairs of the text are followed by pairs of a mask token and m = fc(`mask_hidden`), one per depth, with causal
attention. The k-th of them predicts draft k + 1:

            position    n-3                n-2             n-1         n
            pair        (f_{n-3}, x_{n-2}) (f_{n-2}, root) (m, mask)   (m, mask)
            predicts    root               draft 1         draft 2     draft 3

At one depth all nodes have the same distribution.
Guarantee: distribution. q of a chain is softmax(logits), warped like the target's; a tree of most likely tokens is a
point mass. Tokens outside of the head's vocabulary are never drafted.
Deviations: as in `eagle`. All trained depths are computed, however many are drafted.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.catalog import Method, shared
from specjax.errors import UsageError
from specjax.models.heads import eagle3
from specjax.models.heads.autoregressive import HeadMemory, autoregressive
from specjax.models.heads.blocks import bind, causal_inputs, draft_depths
from specjax.models.heads.contract import Head, HeadKind
from specjax.models.heads.eagle3 import Eagle3, Eagle3Config
from specjax.models.llama import LlamaConfig
from specjax.types import Array, Context

METHOD = Method(
    name="p_eagle",
    summary="drafts all tokens in one pass of an EAGLE-3 head that reads mask tokens in place of drafted ones",
    paper="arXiv 2602.01469 (2026)",
    options=shared.head_options(),
    cpu_options={"num_tokens": 7},
    takes=frozenset({"costs"}),
    **shared.HEAD,
)


@dataclass(frozen=True)
class PEagleConfig(Eagle3Config):
    """Shapes and flags of a P-EAGLE head: those of EAGLE-3, the mask and the number of depths."""

    mask_token: int = 0
    depths: int = 8


class PEagle(Eagle3):
    """An EAGLE-3 head with a learned state for unknown features."""

    def __init__(self, config: PEagleConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        width = len(config.taps) * config.target_width
        self.mask_hidden = nnx.Param(jax.random.normal(rngs.params(), (width,), config.layer.dtype))


@functools.cache
def p_eagle_head(config: PEagleConfig) -> Head:
    """Return the functions of a P-EAGLE head. Its memory is that of an EAGLE-3 head.

    Raises: UsageError for fewer than two depths, or a mask outside of the vocabulary.
    """
    if not 0 <= config.mask_token < config.vocab_size:
        raise UsageError(f"mask_token must be below the vocabulary size, {config.vocab_size}, not {config.mask_token}")
    if config.depths < 2:
        raise UsageError(
            f"depths must be at least 2, not {config.depths}; a head that drafts one token is an EAGLE-3 head"
        )
    module_of = bind(PEagle, config)

    def outputs_of(params, memory: HeadMemory, context: Context) -> Array:
        module, batch, num_masks = module_of(params), len(memory.last), config.depths - 1
        tokens = jnp.full((batch, num_masks), config.mask_token, jnp.int32)
        state = module.fused(
            jnp.broadcast_to(module.mask_hidden[...], (batch, num_masks, len(module.mask_hidden[...])))
        )
        step = causal_inputs(context, config.layer, memory.cache, num_masks)
        outputs, _ = module.layers(module.embedded(tokens, context), state, step, memory.cache)
        return jnp.concatenate([memory.last[:, None], outputs], 1)

    def logits(params, outputs: Array, context: Context) -> Array:
        return module_of(params).logits(outputs, context)

    head = autoregressive("p_eagle", PEagle, config)
    return head._replace(**draft_depths(outputs_of, logits), max_depth=config.depths, is_single_pass=True)


def of_target(
    target: LlamaConfig, *, num_layers: int = 4, embeds: bool = True, depths: int = 8, **changes
) -> PEagleConfig:
    """Return the shapes that are trained for a target: four layers and an embedding. The mask is the last token id."""
    shapes = vars(eagle3.of_target(target, num_layers=num_layers, embeds=embeds, **changes))
    return PEagleConfig(**shapes, mask_token=target.vocab_size - 1, depths=depths)


KIND = HeadKind(
    METHOD,
    PEagle,
    p_eagle_head,
    of_target,
    ("num_layers", "draft_vocab_size", "mlp_width", "head_rank", "depths"),
    taps=True,
    flags=eagle3.FLAGS,
    choices=eagle3.CHOICES,
)
