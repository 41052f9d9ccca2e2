"""Expected tokens of one target pass: several rules compared on the same draft trees.

A decoding run verifies each tree once, so the noise of single verdicts hides the difference between two rules. Here one
rule drives the decoding. At each step every rule verifies the same tree many times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays.modes import jit, with_standard_modes
from specjax.engine.job import Keep
from specjax.engine.packing import Prompts
from specjax.engine.prepare import Settings, prepare
from specjax.engine.run import start, step
from specjax.errors import UsageError
from specjax.numerics.sampling import fold_in, node_keys
from specjax.trees import operations
from specjax.types import Drafter, Target
from specjax.verifiers import Verifier


@with_standard_modes
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
    """Return the tokens that one pass adds, bonus token included, as float64[B, passes] by rule name.

    Each value is a mean over `draws` verdicts on one tree. The verdicts of the first rule determine the text, so its
    mean is its block efficiency. The other rules verify the same trees. Compare rules by their differences per row.

    Raises: UsageError as in `decode`, such as for a rule that does not support the draws of `drafter`.
    """
    for verifier in verifiers:
        if drafter.traits.draws not in verifier.draws:
            raise UsageError(f"verifier {verifier.name} is not valid for drafts drawn {drafter.traits.draws}")
    capacity = passes * (drafter.max_depth + 1)
    settings = Settings(temperature=temperature, verifier=verifiers[0] if temperature else None)
    job = prepare(target, drafter, prompts, settings, key=key, max_new_tokens=capacity)
    parts, state = dataclasses.replace(job.parts, keep=Keep(scored=True)), start(job)
    counts: dict[str, list[np.ndarray]] = {verifier.name: [] for verifier in verifiers}
    for _ in range(passes):
        length = state.length + 0  # a copy, since `step` donates the state
        state, info, _ = step(parts, state)
        for verifier in verifiers:
            count = _judge(verifier, job.keys, length, info.scored, draws=draws if temperature else 1)
            counts[verifier.name].append(np.asarray(count, np.float64))
    return {name: np.stack(columns, 1) for name, columns in counts.items()}


@jit(static_argnames="draws")
def _judge(verifier: Verifier, keys, length, scored, *, draws: int):
    """Return float32[B], the mean number of tokens over `draws` verdicts, one at a time to save memory."""

    def row(xs):
        key, length, scored = jax.tree.map(lambda x: x[None], xs)

        def once(draw):
            deep = node_keys(fold_in(key, draw[None]), length, operations.depths(scored.tree.parents))
            return verifier(deep, scored.tree, scored.logits, scored.hidden).num_nodes[0]

        return jnp.mean(jax.lax.map(once, jnp.arange(draws)).astype(jnp.float32))

    return jax.lax.map(row, (keys, length, scored))
