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

from specjax.engine.job import Keep
from specjax.engine.packing import Prompts
from specjax.engine.prepare import Settings, prepare
from specjax.engine.run import start, step
from specjax.errors import UsageError
from specjax.numerics.sampling import fold_in, node_keys
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
        if drafter.traits.draws not in verifier.draws:
            raise UsageError(f"verifier {verifier.name} is not valid for drafts drawn {drafter.traits.draws}")
    room = passes * (drafter.max_depth + 1)
    settings = Settings(temperature=temperature, verifier=verifiers[0] if temperature else None)
    job = prepare(target, drafter, prompts, settings, key=key, max_new_tokens=room)
    parts, state = dataclasses.replace(job.parts, keep=Keep(scored=True)), start(job)
    result: dict[str, list[np.ndarray]] = {verifier.name: [] for verifier in verifiers}
    for _ in range(passes):
        length = state.length + 0  # the state is given away
        state, info, _ = step(parts, state)
        for verifier in verifiers:
            count = _judge(verifier, job.keys, length, info.scored, draws=draws if temperature else 1)
            result[verifier.name].append(np.asarray(count, np.float64))
    return {name: np.stack(columns, 1) for name, columns in result.items()}


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
