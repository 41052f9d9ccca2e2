"""Tokens per target pass of a rule on trees, by decoding: real models, or a distribution per last token."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.analysis.rules.optimal import check_distributions
from specjax.api import decode
from specjax.bench.records import acceptance_by_depth
from specjax.drafters import two_model
from specjax.engine.packing import Prompts
from specjax.engine.results import DecodeResult
from specjax.errors import UsageError
from specjax.trees import Builder
from specjax.types import Array, Model, Output, Target
from specjax.verifiers import Verifier


class BlockEfficiency(NamedTuple):
    """Tokens emitted per target pass, the bonus token included."""

    mean: float  # all tokens over all passes
    standard_error: float | None  # over rows; None: one row
    per_row: np.ndarray  # float64[B]
    by_depth: list[float | None]  # `depth_curve` of the run


def block_efficiency(
    verifier: Verifier | None,
    tree: Builder,
    target: Target | np.ndarray,
    draft: Target | np.ndarray,
    prompts: Prompts | None = None,
    *,
    key: Array,
    max_new_tokens: int = 128,
    rows: int = 64,
    temperature: float = 1.0,
    **options,
) -> BlockEfficiency:
    """Decode with `two_model(draft, tree=tree)` and `verifier`, and count. A Monte Carlo mean.

    Args:
      verifier: None: the exact rule for how the tree is drawn.
      target, draft: models with their parameters; or distributions float[V] of every token, or float[V, V], whose row
        is chosen by the last token.
      prompts: as `decode` takes them; for distributions by default `rows` prompts that are token 0.
      max_new_tokens: per row. The last pass of a row is cut there, which lowers the mean by less than depth / passes.
      options: of `decode`, such as top_k, eos or sampling="coupled" (then without a verifier).

    Raises: UsageError as `decode` does, such as for a rule that is not valid for these drafts, and for one model and
      one distribution.
    """
    if isinstance(target, Target) and isinstance(draft, Target):
        models = target, draft
        if prompts is None:
            raise UsageError("prompts is missing; models need some")
    elif isinstance(target, Target) or isinstance(draft, Target):
        raise UsageError("target and draft must both be models or both be distributions")
    else:
        p, q = check_distributions(target, draft)
        models = last_token_model(p), last_token_model(q)
    result = decode(
        models[0], two_model(models[1], tree=tree), [[0]] * rows if prompts is None else prompts, key=key,
        max_new_tokens=max_new_tokens, temperature=temperature, verifier=verifier, **options,
    )  # fmt: skip
    return efficiency_of(result)


def efficiency_of(result: DecodeResult) -> BlockEfficiency:
    """The block efficiency that a run of `decode` had."""
    tokens = np.asarray(result.lengths, np.float64)
    passes = np.maximum(np.asarray(result.stats.target_passes, np.float64), 1)
    mean, count = tokens.sum() / passes.sum(), len(tokens)
    error = None
    if count > 1:  # of a ratio of sums
        error = float(np.sqrt(np.sum((tokens - mean * passes) ** 2) / (count * (count - 1))) / passes.mean())
    return BlockEfficiency(float(mean), error, tokens / passes, depth_curve([result]))


def depth_curve(results: Sequence[DecodeResult]) -> list[float | None]:
    """Per depth from 1, over all rows of all results: of the rounds that drafted so deep, the fraction accepted there.

    None where nothing was drafted.
    """
    stats = [jax.device_get(result.stats) for result in results]
    return acceptance_by_depth(jax.tree.map(lambda *fields: np.concatenate(fields), *stats))


def last_token_model(rows: np.ndarray) -> Target:
    """A model whose next token has distribution rows[last token], float[V, V], or always the same, float[V]."""
    rows = np.asarray(rows, np.float32)
    if rows.ndim == 1:
        rows = np.broadcast_to(rows, (len(rows), len(rows)))
    if rows.ndim != 2 or rows.shape[0] != rows.shape[1]:
        raise UsageError(f"distributions must be [V] or [V, V], not {rows.shape}")
    return Target(_last_token_functions(len(rows)), jnp.asarray(rows))


@functools.cache
def _last_token_functions(vocab: int) -> Model:
    def forward(params, tokens, cache, *, positions, mask, taps=(), earlier=None):
        return Output(jnp.log(params[tokens]), jnp.zeros((*tokens.shape, 1))), ()

    return Model(
        init_cache=lambda params, inputs, batch, capacity: (),
        forward=forward,
        commit=lambda cache, pending, path, num_nodes: (),
        rewind=lambda cache, length: (),
        vocab_size=vocab,
        max_positions=1 << 20,
        name="last-token distributions",
    )
