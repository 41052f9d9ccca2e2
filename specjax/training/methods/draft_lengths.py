"""Records of decoding with random draft lengths, from which SpecKV's network learns (`controllers.spec_kv`).

SpecKV: Adaptive Speculative Decoding with Compression-Aware Gamma Selection (2026), arXiv 2605.02888.

A draft model drafts one of some lengths g in each step, drawn for each row without regard to the text. Each step of a
row is an example: the statistics of the drafter's distributions in the previous step, g, and the number of accepted
tokens. `fit_spec_kv` trains the network on them.
Guarantee: distribution, as for every controller, for any output of the network.
Deviations: the authors record a run for each length, with features of the same step, which are not available before a
draft. One run with random lengths has one program, and the previous step of any length, as in decoding.

    examples = record_steps(target, draft, prompts, key=0, max_new_tokens=128)
    weights = controllers.fit_spec_kv(*examples, key=jax.random.key(0))
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.api import stream
from specjax.arrays.modes import with_standard_modes
from specjax.controllers.spec_kv import records
from specjax.drafters.model.two_model import two_model
from specjax.errors import UsageError
from specjax.numerics.sampling import threefry
from specjax.numerics.validation import check_integer
from specjax.types import Array, Controller, Target


class LengthExamples(NamedTuple):
    """Steps with drafts, of all rows and draft lengths."""

    features: np.ndarray  # float32[R, 5], of the previous step of the row
    drafted: np.ndarray  # float32[R], drafted tokens
    accepted: np.ndarray  # float32[R], accepted tokens among them


@with_standard_modes
def record_steps(
    target: Target, draft: Target, prompts: Sequence[Sequence[int]], *, key: Array | int, max_new_tokens: int,
    gammas: Sequence[int] = (2, 4, 6, 8), rows: int = 4, code: int = 0, **settings: Any,
) -> LengthExamples:  # fmt: skip
    """Decode all prompts with random draft lengths, and return the steps.

    Args: gammas: draft lengths. rows: prompts that are decoded together. code: compression of the draft model: 0
      float16, 1 int8, 2 nf4. settings: settings of `decode`, such as temperature and eos.

    Raises: UsageError for settings outside their range, and texts without a second step.
    """
    for name, value in (("rows", rows), *(("gammas", gamma) for gamma in gammas)):
        check_integer(name, value)
    if not gammas:
        raise UsageError("gammas must have at least one draft length")
    if code not in (0, 1, 2):
        raise UsageError(f"code must be 0 (float16), 1 (int8) or 2 (nf4), not {code}")
    drafter, key, parts = two_model(draft, max(gammas), keep_logits=True), threefry(key), []
    for start in range(0, len(prompts), rows):
        batch = [list(prompt) for prompt in prompts[start : start + rows]]
        batch += [batch[-1]] * (rows - len(batch))  # one shape, so that one program serves all batches
        steps = stream(
            target, drafter, batch, key=jax.random.fold_in(key, start), max_new_tokens=max_new_tokens,
            controller=random_lengths(tuple(gammas)), **settings,
        )  # fmt: skip
        parts.append(records((step.info for step in steps), code))
    examples = LengthExamples(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
    if not len(examples.drafted):
        raise UsageError("no text has a second step with a draft; give longer texts (max_new_tokens)")
    return examples


@functools.cache
def random_lengths(gammas: tuple[int, ...]) -> Controller:
    """Return a controller whose draft lengths come from a generator per row, which no text affects."""
    lengths = np.asarray(gammas, np.int32)
    return Controller(
        init=lambda batch: jnp.arange(batch, dtype=jnp.uint32) * jnp.uint32(2654435761) + jnp.uint32(1),
        limit=lambda state: jnp.asarray(lengths)[(state >> jnp.uint32(16)) % jnp.uint32(len(gammas))],
        update=lambda state, info: state * jnp.uint32(1664525) + jnp.uint32(1013904223),
        reads_signals=True,
    )
