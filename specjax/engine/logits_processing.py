"""The processors of a job, one after another: what they know of a text, and what they make of the target's logits."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from specjax.engine import contract_checks
from specjax.trees.operations import chain
from specjax.types import Array, Processor, PyTree, TokenTree

Processors = tuple[Processor, ...]
States = tuple[PyTree, ...]


def begin(processors: Processors, tokens: Array, length: Array, vocab_size: int) -> States:
    """After the prompts, the first `length` int32[B] of `tokens` int32[B, L]."""

    def of(processor: Processor) -> PyTree:
        by_row = lambda x: jnp.broadcast_to(x, (len(length), *jnp.shape(x)[1:]))
        settings = jax.tree.map(by_row, processor.settings)
        return processor.init(processor.params, settings, tokens, length, vocab_size)

    return tuple(of(processor) for processor in processors)


def processed(processors: Processors, states: States, tree: TokenTree, above: Array, logits: Array) -> Array:
    """The logits float32[B, N, V] of the nodes of a tree, as plain decoding has them after the path to each."""
    for processor, state in zip(processors, states, strict=True):
        new = processor.process(processor.params, state, tree, above, logits)
        contract_checks.check_same(f"the processor {contract_checks.name_of(processor.process)}", logits, new)
        logits = new
    return logits


def of_text(processors: Processors, states: States, root: Array, logits: Array) -> Array:
    """The logits float32[B, V] behind the text that the states know, whose last token is `root` int32[B, 1]."""
    alone = jnp.ones((len(root), 1), bool)
    return processed(processors, states, chain(root, alone), alone[:, None], logits[:, None])[:, 0]


def updated(processors: Processors, states: States, tokens: Array, count: Array) -> States:
    """With the first `count` int32[B] of `tokens` int32[B, N] committed."""
    new = tuple(p.update(p.params, state, tokens, count) for p, state in zip(processors, states, strict=True))
    contract_checks.check_same("the processors' update", states, new)
    return new


def after(processors: Processors, prompt: Sequence[int], new: Sequence[int], logits: Array) -> Array:
    """The target's logits float32[V] after a prompt and new tokens, processed: what plain decoding draws from."""
    one = lambda ids: (jnp.asarray(ids, jnp.int32)[None], jnp.array([len(ids)]))
    states = begin(processors, *one(prompt), len(logits))
    states = updated(processors, states, *one(new)) if new else states
    return of_text(processors, states, jnp.asarray([[[*prompt, *new][-1]]], jnp.int32), logits[None])[0]
