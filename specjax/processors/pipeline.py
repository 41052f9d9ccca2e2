"""Application of several processors in order: their states for a text, and the processed logits of the target."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from specjax.numerics.validation import check_same, name_of
from specjax.trees.operations import chain
from specjax.types import Array, Processor, PyTree, TokenTree

Processors = tuple[Processor, ...]
States = tuple[PyTree, ...]


def init_states(processors: Processors, tokens: Array, length: Array, vocab_size: int) -> States:
    """Return the state of each processor after the prompts, the first `length` int32[B] of `tokens` int32[B, L]."""

    def init_state(processor: Processor) -> PyTree:
        per_row = lambda x: jnp.broadcast_to(x, (len(length), *jnp.shape(x)[1:]))
        settings = jax.tree.map(per_row, processor.settings)
        return processor.init(processor.params, settings, tokens, length, vocab_size)

    return tuple(init_state(processor) for processor in processors)


def process(processors: Processors, states: States, tree: TokenTree, ancestors: Array, logits: Array) -> Array:
    """Return the processed logits float32[B, N, V] of a tree, equal to those of plain decoding after each path."""
    for processor, state in zip(processors, states, strict=True):
        changed = processor.process(processor.params, state, tree, ancestors, logits)
        check_same(f"the processor {name_of(processor.process)}", logits, changed)
        logits = changed
    return logits


def process_root(processors: Processors, states: States, root: Array, logits: Array) -> Array:
    """Return the processed logits float32[B, V] that follow the committed text, with last token `root` int32[B, 1]."""
    valid = jnp.ones((len(root), 1), bool)
    return process(processors, states, chain(root, valid), valid[:, None], logits[:, None])[:, 0]


def update_states(processors: Processors, states: States, tokens: Array, count: Array) -> States:
    """Return the states after the first `count` int32[B] of `tokens` int32[B, N] were committed."""
    updated = tuple(p.update(p.params, state, tokens, count) for p, state in zip(processors, states, strict=True))
    check_same("the processors' update", states, updated)
    return updated


def process_text(processors: Processors, prompt: Sequence[int], new: Sequence[int], logits: Array) -> Array:
    """Return the processed logits float32[V] that follow a prompt and new tokens in plain decoding."""
    as_batch = lambda ids: (jnp.asarray(ids, jnp.int32)[None], jnp.array([len(ids)]))
    states = init_states(processors, *as_batch(prompt), len(logits))
    states = update_states(processors, states, *as_batch(new)) if new else states
    return process_root(processors, states, jnp.asarray([[[*prompt, *new][-1]]], jnp.int32), logits[None])[0]
