"""Tokens of one target pass, expected over a rule's own draws: rules compared on the same drafted trees.

A decoding run judges each tree once, so a difference of two rules drowns in the luck of single verdicts. Here one rule
drives the decoding, and at each of its steps every rule judges the same tree many times.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax.controllers import fixed
from specjax.engine.run import Prompts, prepare
from specjax.engine.step import speculative
from specjax.errors import UsageError
from specjax.sampling import fold_in, node_keys
from specjax.trees import operations
from specjax.types import Drafter, Target
from specjax.verifiers import Verifier


def expected_tokens(
    verifiers: Sequence[Verifier],
    target: Target,
    drafter: Drafter,
    prompts: Prompts,
    *,
    key: jax.Array,
    passes: int = 8,
    draws: int = 8,
    temperature: float = 1.0,
) -> dict[str, np.ndarray]:
    """Tokens that one pass adds, the bonus token included, by the rules' names: float64[B, passes].

    The mean over `draws` verdicts on one tree. The first rule's verdicts decide where the next tree is drafted, so its
    mean is its block efficiency; the others stand on the same places. Compare rules by the differences of rows.

    Raises: UsageError as `decode` does, such as for a rule that is not valid for how `drafter` draws.
    """
    for verifier in verifiers:
        if drafter.draws not in verifier.draws:
            raise UsageError(f"verifier {verifier.name} is not valid for drafts drawn {drafter.draws}")
    room = passes * (drafter.max_depth + 1)
    inputs, tokens, length, keys, _ = prepare(
        target, drafter, prompts, key=key, max_new_tokens=room, temperature=temperature,
        verifier=verifiers[0] if temperature else None,
    )  # fmt: skip
    inputs = dataclasses.replace(inputs, keep_scored=True)
    state = _start(inputs, tokens, length, keys, length + room)
    found: dict[str, list[np.ndarray]] = {verifier.name: [] for verifier in verifiers}
    for _ in range(passes):
        state, length, scored = _step(inputs, state)
        for verifier in verifiers:
            count = _judge(verifier, keys, length, scored, draws=draws if temperature else 1)
            found[verifier.name].append(np.asarray(count, np.float64))
    return {name: np.stack(columns, 1) for name, columns in found.items()}


@jax.jit
def _start(inputs, tokens, length, keys, stop):
    return speculative(fixed()).init(inputs, tokens, length, keys, stop)


@functools.partial(jax.jit, donate_argnames="state")
def _step(inputs, state):
    """The state after a step, the length before it, and what was judged."""
    after, info = speculative(fixed()).step(inputs, state)
    return after, state.length, info.scored


@functools.partial(jax.jit, static_argnames="draws")
def _judge(verifier: Verifier, keys, length, scored, *, draws: int):
    """float32[B]: mean number of tokens over `draws` verdicts of each row. One verdict at a time, for the memory."""

    def row(xs):
        key, length, scored = jax.tree.map(lambda x: x[None], xs)

        def once(draw):
            deep = node_keys(fold_in(key, draw[None]), length, operations.depths(scored.tree.parents))
            return verifier(deep, scored.tree, scored.logits, scored.hidden).num_nodes[0]

        return jnp.mean(jax.lax.map(once, jnp.arange(draws)).astype(jnp.float32))

    return jax.lax.map(row, (keys, length, scored))
