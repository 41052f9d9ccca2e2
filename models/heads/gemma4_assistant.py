"""Gemma 4 assistants: layers that only have queries, and read the keys and values in the target's cache.

Google: Gemma 4 (2026), the models gemma-4-*-it-assistant; `Gemma4AssistantForCausalLM` of transformers 5.24.

Rule: x = W_in [E x_t; h], y = norm(layers(x)), h' = W_out y. h is the target's hidden state before the root, and h' is
that of a drafted token. E is the target's scaled embedding. Local layers read the last local layer of the target with
keys of its own, and global layers the last global one. Every query has the position of the root, whatever its depth,
and reads committed tokens only. With centroids c, only the tokens of the clusters with the largest c y get logits.
Guarantee: distribution (a tree of most likely tokens is a point mass; a sampled one is verified with its q).
Deviations: tokens outside of the chosen clusters get -inf, where transformers gives them the least logit minus 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.catalog import Method, shared
from specjax.errors import UsageError
from specjax.models import layers as L
from specjax.models.heads.blocks import Ids, embed, get_target
from specjax.models.heads.contract import Head, HeadKind
from specjax.models.heads.recurrent import recurrent
from specjax.models.heads.target_keys import no_keys
from specjax.models.hybrid.block import HybridBlock, HybridInputs
from specjax.models.hybrid.config import HybridConfig
from specjax.models.hybrid.memory import layer_cache
from specjax.models.requirements import check_shared_keys
from specjax.types import Array, Context

METHOD = Method(
    name="gemma4_assistant",
    summary="drafts with the assistant of a Gemma 4 target, which reads the keys and values of the target",
    paper="Google 2026, Gemma 4",
    options=shared.head_options(length=4),
    cpu_options={"num_tokens": 3},
    wide_tree="top:4x2x1",
    **shared.HEAD,
)
NAME = METHOD.name

EXTRA_REACH = 2
"""Tokens that local layers see beyond the window of the config: transformers counts W + 1 tokens before the root."""


@dataclass(frozen=True)
class AssistantConfig:
    """Shapes of an assistant. Raises: UsageError for clusters that do not divide the vocabulary."""

    decoder: HybridConfig  # its layers, its vocabulary and its width D
    target_width: int  # Db
    centroids: int = 0  # number of clusters of the vocabulary, of equal size; 0: all tokens get logits
    chosen: int = 32  # clusters whose tokens get logits
    layer: None = None  # it stores nothing of the text

    def __post_init__(self):
        size = self.decoder.vocab_size
        if self.centroids and size % self.centroids:
            raise UsageError(f"an assistant has {self.centroids} centroids, which must divide its {size} tokens")
        if self.centroids and not 1 <= self.chosen <= self.centroids:
            raise UsageError(f"an assistant chooses {self.chosen} clusters, which must be from 1 to {self.centroids}")

    @property
    def dtype(self) -> str:
        return self.decoder.dtype

    @property
    def output_width(self) -> int:
        return self.target_width

    @property
    def taps(self) -> tuple[int, ...]:
        return ()


class Clusters(nnx.Module):
    """The clusters of a vocabulary."""

    def __init__(self, config: AssistantConfig, *, rngs: nnx.Rngs):
        c = config.decoder
        self.chosen = config.chosen
        self.centroids = L.Linear(c.width, config.centroids, dtype=c.dtype, rngs=rngs)
        self.order = Ids(jnp.arange(c.vocab_size, dtype=jnp.int32))  # int32[V], the tokens of each cluster in a row

    def logits(self, y: Array, table: Array) -> Array:
        """Return logits float32[B, F, V] of states y [B, F, D] with the output layer [V, D]."""
        clusters = self.order[...].reshape(self.centroids.weight.shape[0], -1)
        best = jax.lax.top_k(self.centroids(y), self.chosen)[1]
        tokens = clusters[best].reshape(*y.shape[:2], -1)  # int32[B, F, n]
        values = jnp.einsum("bfnd,bfd->bfn", table[tokens], y, preferred_element_type=jnp.float32)
        empty = jnp.full((*y.shape[:2], len(table)), -jnp.inf, jnp.float32)
        return jnp.put_along_axis(empty, tokens, values, -1, inplace=False)


class Gemma4Assistant(nnx.Module):
    """A `specjax.models.heads.recurrent.RecurrentModule`. Its state is y [B, F, D]."""

    def __init__(self, config: AssistantConfig, *, rngs: nnx.Rngs):
        self.config, c = config, config.decoder
        self.input = L.Linear(2 * config.target_width, c.width, dtype=c.dtype, rngs=rngs)
        self.output = L.Linear(c.width, config.target_width, dtype=c.dtype, rngs=rngs)
        block = lambda i: HybridBlock(c.of_layer(i), c.kinds[i]._replace(keys_of=-1), rngs)
        self.stack = nnx.List([block(i) for i in range(c.num_layers)])
        self.norm = L.RMSNorm(c.width, c.norm_eps, dtype=c.dtype)
        self.head = L.Embedding(c.vocab_size, c.width, dtype=c.dtype, rngs=rngs)
        self.clusters = Clusters(config, rngs=rngs) if config.centroids else None

    def at_root(self, outputs: Array, tokens: Array, context: Context) -> Array:
        return self._states(outputs, tokens, context)

    def below(self, state: Array, tokens: Array, depth: Array, context: Context) -> Array:
        return self._states(self.output(state), tokens, context)

    def _states(self, hidden: Array, tokens: Array, context: Context) -> Array:
        """Return y [B, F, D] for tokens [B, F] and the hidden states [B, F, Db] before them."""
        model, c = get_target(context).model, self.config.decoder
        local, full = check_shared_keys(model, NAME)
        embedded = embed(None, tokens, context).astype(c.dtype)
        x = self.input(jnp.concatenate([embedded, hidden.astype(c.dtype)], -1))
        positions = jnp.broadcast_to(context.length[:, None] - 1, tokens.shape)
        mask = jnp.zeros((*tokens.shape, tokens.shape[1]), bool)
        step = L.PassInputs(positions, positions, mask, context.cache.length, None)
        for i, block in enumerate(self.stack):
            cache = layer_cache(model.config, context.cache, full if "window" in dict(c.kinds[i].changes) else local)
            keys = no_keys(cache, *tokens.shape)
            settings = c.of_layer(i).attention_settings(positions)
            if settings.window is not None:
                settings = settings._replace(window=settings.window + EXTRA_REACH)
            x, _ = block(x, HybridInputs(step, None, attention=cache, settings=settings, keys=keys))
        return self.norm(x)

    def logits(self, outputs: Array, state: Array, depth: Array | int, context: Context) -> Array:
        if self.clusters is None:
            return self.head.logits(state)
        return self.clusters.logits(state, self.head.weight[...])


def assistant_head(config: AssistantConfig) -> Head:
    """Return the functions of an assistant. Its memory stores the last hidden state of the target.

    A draft raises a UsageError for a target without `Capabilities.shared_keys`.
    """
    return recurrent(NAME, Gemma4Assistant, config)


def of_target(target: Any, **changes) -> NoReturn:
    """Refuse to make shapes for a target. Raises: UsageError, as specjax trains no assistants."""
    raise UsageError(f"specjax makes no {NAME} for {target.name}; use a published assistant with --draft")


KIND = HeadKind(METHOD, Gemma4Assistant, assistant_head, of_target, trains=False)
