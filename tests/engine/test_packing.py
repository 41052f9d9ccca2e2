"""Vectors that a pass reads below the nodes of a tree: they see what is above them, and nothing sees them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import scripted, tiny_llama

from specjax import UsageError, decode
from specjax.drafters import prompt_lookup
from specjax.engine import run as engine
from specjax.engine.job import Keep
from specjax.engine.prepare import Settings, prepare
from specjax.engine.target_pass import judge_at
from specjax.trees import operations
from specjax.types import Hooks, SoftPrompts

PROMPTS = [[1, 2, 3, 1, 2], [5, 9]]


def test_prompts_change_no_node_and_none_is_accepted():
    """Each is the embedding of the very token that the target says next: as a node it would be accepted."""
    job = prepare(tiny_llama(layers=1), prompt_lookup(2), PROMPTS, Settings(), key=0, max_new_tokens=8)
    parts, state = dataclasses.replace(job.parts, keep=Keep(scored=True)), engine.start(job)
    target = parts.target

    @jax.jit
    def judged(parts, state):
        rows = jnp.arange(len(PROMPTS))
        root = state.tokens[rows, state.length - 1][:, None]
        tree = operations.chain(jnp.concatenate([root, jnp.full((2, 2), 7)], 1), jnp.ones((2, 3), bool))
        judge = lambda tree, observe, prompt: judge_at(parts, state, tree, observe, prompt, state.cache, 3)
        plain = judge(tree, lambda *arguments: (), None)
        best = jnp.argmax(plain.diagnostics.scored.logits, -1)  # [B, 3]
        # Below node 0 the token after the root and, below that, another one; below node 1 the one after it.
        tokens = jnp.stack([best[:, 0], best[:, 1], best[:, 1]], 1)
        parents = jnp.broadcast_to(jnp.array([0, 3, 1]), tokens.shape)
        prompts = SoftPrompts(target.model.embed(target.params, tokens), parents, jnp.ones_like(tokens, bool))
        beside = judge(tree, lambda tree, verdict, output: output.logits, lambda part: prompts)
        # The same as nodes of the tree.
        both = lambda x, y: jnp.concatenate([x, y], 1)
        mask = operations.ancestor_mask(both(tree.parents, parents))
        where = {"positions": state.length[:, None] - 2 + jnp.sum(mask, 2), "mask": mask}
        as_nodes, _ = target.model.forward(target.params, both(tree.tokens, tokens), state.cache, **where)
        return plain, beside, as_nodes.logits

    plain, beside, as_nodes = judged(parts, state)
    np.testing.assert_allclose(beside.diagnostics.scored.logits, plain.diagnostics.scored.logits, atol=1e-4)
    np.testing.assert_allclose(beside.observed, as_nodes, atol=1e-4)
    for one, other in zip(plain.verdict, beside.verdict, strict=True):
        np.testing.assert_array_equal(one, other)
    assert plain.verdict.num_nodes.tolist() == [1, 1]  # as nodes, two of these would have been accepted


def test_a_model_that_reads_tokens_alone_is_refused():
    prompted = prompt_lookup(2).replace(hooks=Hooks(soft_prompts=lambda *arguments: None))
    with pytest.raises(
        UsageError, match="the drafter's soft prompts are vectors, but the model scripted reads only tokens"
    ):
        decode(scripted([[1] * 64], 4), prompted, [[1]], key=0, max_new_tokens=2)
