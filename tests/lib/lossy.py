"""The lossy rules' cores, compiled once, and how far a rule takes the text from the target."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
from exact import block_distribution, patterns, without_replacement
from rules import module
from toy import DATA, DRAFT_ROWS, TARGET_ROWS, joint_distribution, template

from specjax.trees import operations

GOLDEN = json.loads((DATA / "verification_relaxed_rules.json").read_text())
P5, Q5 = np.array(GOLDEN["lantern"]["p"]), np.array(GOLDEN["lantern"]["q"])
NEAREST = np.array([GOLDEN["lantern"]["neighbours_nearest_first"][str(x)] for x in range(5)])
INF = float("inf")


def jitted(name, core="core", static=()):
    return jax.jit(getattr(module(name), core), static_argnames=static)


standard_core, rsd_core = jitted("standard"), jitted("recursive_rejection")
typical_core, judge_core = jitted("typical"), jitted("judge")
rollback_core = jitted("bild", static=("sample", "keep_argmax"))
top_beta_core, rapid_core = jitted("top_beta"), jitted("rapid", static=("residual", "sample"))
grouped_core, static_core = jitted("grouped", static=("size",)), jitted("grouped", "core_static")
lantern_jit, surrogate, longest_run = (
    jitted("lantern"),
    jitted("lantern", "surrogate"),
    jitted("typical", "longest_run"),
)


def fall_back(tree, stop_below):
    """BiLD's fallback on a finished draft: without what was drafted where the largest q is under `stop_below`."""
    sure = jnp.max(jax.nn.log_softmax(tree.logits, -1), -1) >= jnp.log(stop_below)  # bool[B, N]
    below_sure = jnp.take_along_axis(sure, jnp.maximum(tree.parents, 0), 1) | (tree.parents < 0)
    is_sure = jnp.all(~operations.ancestor_mask(tree.parents) | below_sure[:, None], -1)
    return tree._replace(valid=tree.valid & is_sure)


def lantern_core(u, tree, logits, neighbours, delta=0.0, share=0.0, offset=0):
    return lantern_jit(u, tree, logits, jnp.asarray(neighbours), delta, share, offset)


def with_head(scores, threshold):
    """The judge's core, with one score in log-odds per token id."""
    scores = jnp.asarray(scores, jnp.float32)
    return lambda u, tree, logits: judge_core(
        u, tree, logits, jax.nn.one_hot(tree.tokens, len(scores)), scores, jnp.zeros(()), jnp.asarray(threshold)
    )


def one_step(core, p, q):
    """(acceptance of each drafted token, distribution of the emitted token) for one drafted token."""
    target, rows = (np.tile(np.array(x, np.float32), (len(p), 1)) for x in (p, q))
    drafts, weights = without_replacement(rows, 0, template((1,)))
    probability, _ = patterns(core, drafts, jnp.log(jnp.asarray(target))[drafts.tokens])
    joint, _ = block_distribution(core, drafts, weights, target, 1)
    return probability[:, 1], joint.sum(1)


def tv(distribution, target):
    return 0.5 * np.abs(distribution - target).sum()


def output_tv(core, values, branching=(1, 1)):
    """Per value of a rule's parameter: total variation between emitted and target's text, and tokens per pass.

    `core(value, u, tree, logits)` is compiled once, with the values as a batch axis.
    """
    drafts, weights = without_replacement(DRAFT_ROWS, 0, template(branching))
    values = jnp.asarray(values, jnp.float32)
    stacked = jax.tree.map(lambda x: jnp.tile(x, (len(values), *(1,) * (x.ndim - 1))), drafts)

    def batched(u, tree, logits):
        split = lambda x: x.reshape(len(values), -1, *x.shape[1:])
        end = jax.vmap(core)(values, *jax.tree.map(split, (u, tree, logits)))
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), end)

    probability, end = patterns(batched, stacked, jnp.log(jnp.asarray(TARGET_ROWS))[stacked.tokens])
    rows = []
    for i in range(len(values)):
        part = slice(i * len(weights), (i + 1) * len(weights))
        part_of = lambda *_, part=part: (probability[part], jax.tree.map(lambda x: x[part], end))
        joint, accepted = block_distribution(None, drafts, weights, TARGET_ROWS, len(branching), part_of)
        np.testing.assert_allclose(joint.sum(), 1, atol=1e-6)
        distance = tv(joint, joint_distribution(TARGET_ROWS, 0, len(branching) + 1))
        rows.append((distance, (accepted * (1 + np.arange(len(accepted)))).sum()))
    return np.array(rows).T


def random_chains(seed=0, batch=512, n=5, vocab=6):
    rng = np.random.default_rng(seed)
    p, q = rng.normal(size=(2, batch, n, vocab)).astype(np.float32) * 1.5
    noise = rng.gumbel(size=(batch, n, vocab))
    tokens = np.concatenate([np.zeros((batch, 1)), (q + noise).argmax(-1)[:, :-1]], 1).astype(np.int32)
    valid = np.arange(n) <= rng.integers(0, n, (batch, 1))
    u = rng.uniform(size=(batch, n)).astype(np.float32)
    return jnp.asarray(u), operations.chain(jnp.asarray(tokens), jnp.asarray(valid), jnp.asarray(q)), jnp.asarray(p)


NEIGHBOURS3 = jnp.array([[1, 2], [0, 2], [1, 0]])
NEIGHBOURS6 = jnp.array([[j for j in np.argsort(np.abs(np.arange(6) - i), kind="stable") if j != i] for i in range(6)])
