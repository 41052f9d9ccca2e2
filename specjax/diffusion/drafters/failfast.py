"""FailFast: a drafter that extends its draft chunk by chunk while the denoiser is confident of all tokens of a chunk.

Pan et al.: Fail Fast, Win Big: Rethinking the Drafting Strategy in Speculative Decoding via Diffusion LLMs (2025),
arXiv 2512.20573.

Rule: one pass takes the most likely tokens of the next `chunk` columns. If each of them has a probability of at least
`tau`, the next chunk is drafted after them, up to `num_tokens`. Otherwise the draft ends with this chunk. In difficult
text a step costs one pass and few verified tokens. In easy text dozens of tokens are drafted at once.
Guarantee: distribution: drafted tokens are the most likely ones, point masses, at any temperature. Sampled chunks would
also have known draft probabilities, but the draft length would depend on the sampled tokens.
Deviations: a chunk is decided in a single pass, as the release's threshold of .05 nearly does. Rows whose draft has
ended wait for the others of the batch.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import first_largest
from specjax.catalog import Method, Option, shared
from specjax.diffusion import drafting, forward
from specjax.diffusion.measures import probability
from specjax.diffusion.types import Denoiser
from specjax.errors import UsageError
from specjax.types import Array, Context, Drafter, TokenTree, Traits, TreeSize

METHOD = Method(
    name="failfast",
    kind="drafter",
    guarantee="distribution",
    summary="drafts with a diffusion model, chunk by chunk while all tokens of the last chunk are confident",
    paper="Pan et al. 2025, arXiv 2512.20573",
    needs=frozenset({"denoiser"}),
    options=(
        Option("chunk", "int", 8, "drafted tokens per pass of the diffusion model"),
        shared.num_tokens(64, "maximum draft length"),
        Option("tau", "float", 0.45, "minimum probability of each token of a chunk for drafting another chunk"),
    ),
    arguments=("draft",),
)


def failfast(denoiser: Denoiser, *, chunk: int = 8, num_tokens: int = 64, tau: float = 0.45) -> Drafter:
    """Return the drafter. chunk: drafted tokens per pass. num_tokens: maximum draft length. tau: minimum probability of
    each token of a chunk for drafting another chunk.

    Raises: UsageError for numbers below 1, or a chunk longer than num_tokens.
    """
    if not 1 <= chunk <= num_tokens:
        raise UsageError(f"chunk must be from 1 to num_tokens, {num_tokens}, not {chunk}")
    return Drafter(
        propose=functools.partial(_propose, chunk=chunk, width=num_tokens, tau=tau),
        size=TreeSize(num_tokens + 1, num_tokens),
        init=functools.partial(drafting.init, width=num_tokens),
        params=(denoiser,),
        traits=Traits(chains=True, rewinds=False),
    )


def _propose(
    params: tuple[Denoiser], keys: Array, state: drafting.DenoiserDrafterState, context: Context, limit: Array, *,
    chunk: int,
    width: int, tau: float,
) -> tuple[TokenTree, drafting.DenoiserDrafterState]:  # fmt: skip
    (denoiser,) = params
    offset = jnp.arange(width)
    drafted = context.length[:, None] + offset
    max_count = jnp.minimum(limit, width)
    begin = drafting.open_canvas(context, width)

    def go_on(carry):
        canvas, count, sure, pending = carry
        until = jnp.where(sure, jnp.minimum(count + chunk, max_count), count)
        runs = (offset >= count[:, None]) & (offset < until[:, None])
        hidden, pending = drafting.look(denoiser, state, canvas._replace(end=context.length + until), width)
        logits = forward.compute_logits(denoiser, hidden)
        token = first_largest(logits)
        canvas = forward.decide_columns(canvas, drafted, runs, token)
        good = jnp.all(~runs | (probability(logits, token) >= tau), 1)
        return canvas, until, sure & good & (until < max_count), pending

    nothing = jnp.zeros_like(context.length)
    first = go_on((begin, nothing, max_count > 0, None))
    canvas, count, _, pending = jax.lax.while_loop(lambda carry: jnp.any(carry[2]), go_on, first)
    token = jnp.take_along_axis(canvas.tokens, drafted, 1)
    return drafting.build_chain(context, token, count), drafting.update_cache(denoiser, state, context, pending, width)
