"""Tokens per target pass of an acceptance rule on trees, measured by decoding with models or given distributions."""

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
    standard_error: float | None  # over rows; None for one row
    per_row: np.ndarray  # float64[B]
    by_depth: list[float | None]  # acceptance rate by depth, see `depth_curve`


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
    """Decode with `two_model(draft, tree=tree)` and `verifier`, and return the mean number of tokens per pass.

    Args:
      verifier: acceptance rule. None: the exact rule for the way in which the tree is drawn.
      target, draft: models with their parameters, or distributions. float[V] is the distribution of every token;
        float[V, V] has a distribution per last token.
      prompts: as in `decode`. Default for distributions: `rows` prompts of token 0.
      max_new_tokens: per row. It truncates the last pass of a row, which lowers the mean by less than depth / passes.
      options: options of `decode`, such as top_k, eos or sampling="coupled" (then without a verifier).

    Raises: UsageError as in `decode`, such as for a rule that does not support these drafts, or if only one of target
      and draft is a model.
    """
    if isinstance(target, Target) and isinstance(draft, Target):
        models = target, draft
        if prompts is None:
            raise UsageError("prompts is missing; pass prompts to measure with models")
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
    """Return the block efficiency of a `decode` run."""
    tokens = np.asarray(result.lengths, np.float64)
    passes = np.maximum(np.asarray(result.stats.target_passes, np.float64), 1)
    mean, count = tokens.sum() / passes.sum(), len(tokens)
    error = None
    if count > 1:  # standard error of a ratio of sums
        error = float(np.sqrt(np.sum((tokens - mean * passes) ** 2) / (count * (count - 1))) / passes.mean())
    return BlockEfficiency(float(mean), error, tokens / passes, depth_curve([result]))


def depth_curve(results: Sequence[DecodeResult]) -> list[float | None]:
    """Return the acceptance rate at each depth from 1, over all rows of all results.

    It is the share of steps with a draft of that depth that accepted a node there, or None without drafts.
    """
    stats = [jax.device_get(result.stats) for result in results]
    return acceptance_by_depth(jax.tree.map(lambda *fields: np.concatenate(fields), *stats))


def last_token_model(rows: np.ndarray) -> Target:
    """Return a model whose next token has the distribution rows[last token] (float[V, V]), or rows (float[V])."""
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
