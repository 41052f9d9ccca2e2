"""The memory of heads after decoding steps, and heads that predict their target exactly."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from heads import layer_of
from toy import markov, tiny_llama

from specjax.engine import run as engine
from specjax.engine.prepare import prepare
from specjax.models.heads import blocks
from specjax.models.heads.contract import DraftHead, FeaturePairs
from specjax.models.heads.eagle import Eagle, EagleConfig, eagle_head
from specjax.models.heads.mtp import MtpConfig, MtpModule, mtp_head
from specjax.types import Context

PROMPTS = [[1, 2, 3, 1, 2, 3, 1], [5], list(range(30)), [7, 7, 7]]


def run_rounds(drafter, settings, rounds=6, new=24, longest=1):
    """Run steps and return (job, state). Some step must accept more than `longest` tokens."""
    job = prepare(tiny_llama(), drafter, PROMPTS, settings, key=jax.random.key(1), max_new_tokens=new)
    state = engine.start(job)
    lengths = [np.array(state.length)]
    for _ in range(rounds):
        state, _, _ = engine.step(job.parts, state)
        lengths.append(np.array(state.length))
    accepted = np.diff(lengths, axis=0)
    assert accepted.max() > longest, "no draft was accepted: the test shows nothing"
    return job, state


def read_at_once(head, job, state):
    """Return the memory of a head that reads the whole text at once, with the features of one target pass."""
    target, tokens = job.parts.target, state.tokens
    context = Context(tokens, state.length, target=target)
    batch, size = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(size), tokens.shape)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((size, size), bool)), (batch, size, size))
    taps = {"taps": head.head.taps} if head.head.taps else {}
    cache = target.model.init_cache(target.params, None, batch, size)
    output, _ = target.model.forward(target.params, tokens, cache, positions=positions, mask=mask, **taps)
    memory = head.head.init_memory(head.params, context, batch, 2 * size)
    pairs = FeaturePairs(head.head.features_of(output), jnp.roll(tokens, -1, 1), state.length - 1)
    return head.head.read(head.params, memory, pairs, context)


def differs(head, job, state, select=lambda draft: draft) -> float:
    """Return the largest difference between the memory after decoding and that of the whole text.

    select: returns the head's state from the drafter's state.
    """
    drafter = job.parts.drafter
    context = Context(state.tokens, state.length, cache=state.cache, target=job.parts.target)
    propose = jax.jit(drafter.propose)  # one program, not one per operation
    _, draft = propose(drafter.params, None, state.draft, context, jnp.zeros_like(state.length))
    draft = select(draft)
    np.testing.assert_array_equal(draft.num_read, state.length - 1)
    ours, full = draft.memory, read_at_once(head, job, state)

    def apart(axis, one, other):
        worst = 0.0
        for b, length in enumerate(np.asarray(draft.num_read)):
            a, c = (np.take(np.asarray(x, np.float32), b, axis) for x in (one, other))
            if a.ndim == 3:  # [K, S, h] of a cache: what lies beyond the text is never read
                a, c = a[:, :length], c[:, :length]
            worst = max(worst, float(np.abs(a - c).max()))
        return worst

    return max(jax.tree.leaves(jax.tree.map(apart, head.head.axes(ours), ours, full)))


def permutation(vocab=7, shift=3):
    """Return a target with a fixed next token for each token, and the map of its logits from token to token."""
    rows = np.full((vocab, vocab), 1e-6, np.float32)
    following = (np.arange(vocab) + shift) % vocab
    rows[np.arange(vocab), following] = 1.0
    move = np.zeros((vocab, vocab), np.float32)
    move[following, np.arange(vocab)] = 1.0
    return markov(rows), move


def knowing(target, token, feature) -> DraftHead:
    """Return an EAGLE head with layers that add zero: its output is token @ E x_{t+1} + feature @ f_t."""
    config = EagleConfig(layer_of(target))
    return DraftHead(eagle_head(config), _without_layers(Eagle, config, token, feature))


def knowing_module(target, token, feature, **flags) -> DraftHead:
    """Return a module for multi-token prediction like `knowing`, but with both inputs and the output normed."""
    config = MtpConfig(layer_of(target), target.model.vocab_size, target.model.capabilities.num_layers, **flags)
    parts = (feature, token) if config.hidden_first else (token, feature)
    return DraftHead(mtp_head(config), _without_layers(MtpModule, config, *parts))


def _without_layers(module, config, *parts) -> dict:
    params = jax.tree.map(np.asarray, blocks.init_params(module, config, jax.random.key(0)))
    layer = params["stack"][0]
    layer["attention"]["o"]["weight"], layer["mlp"]["down"]["weight"] = (
        np.zeros_like(layer[part][last]["weight"]) for part, last in (("attention", "o"), ("mlp", "down"))
    )
    params["fc"]["weight"] = np.concatenate(parts, 1)
    return params
