"""The block drafter of generalised aggressive decoding (GAD): k tokens at once from a non-autoregressive model.

Xia, Ge, Wang, Chen, Wei, Sui: Speculative Decoding: Exploiting Speculative Execution for Accelerating Seq2seq
Generation (2022), arXiv 2203.16487; Ge, Xia, Sun, Chen, Wei: Lossless Acceleration for Seq2seq Generation with
Aggressive Decoding (2022), arXiv 2205.10350.

Rule: a model reads the text and k mask tokens after it, and predicts all k positions in one pass. The draft is the
chain of their most likely tokens. Each position is predicted independently of the tokens chosen for the others.
Guarantee: distribution (a point-mass chain). The papers' relaxed acceptance is `specjax.verifiers.top_beta`.
Deviations: none in the draft. Further inputs of the model, such as the source of a translation, belong to its `params`.
The command line cannot load a model of this kind; the catalogue lists it under `needs`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax.numpy as jnp

from specjax.arrays.indexing import first_largest
from specjax.catalog import REQUIRED, Method, Option, shared
from specjax.errors import UsageError
from specjax.trees.contracts import verify_widths
from specjax.trees.operations import chain
from specjax.types import Array, Context, Drafter, PyTree, Traits, TreeSize

METHOD = Method(
    name="nar_block",
    kind="drafter",
    guarantee="distribution",
    summary="drafts a block of tokens in one pass of a model that fills masked positions",
    paper="Xia et al. 2022, arXiv 2203.16487; Ge et al. 2022, arXiv 2205.10350",
    needs=frozenset({"fill"}),
    options=(
        Option("mask_token", "int", REQUIRED, "id of the mask token"),
        shared.num_tokens(25),
    ),
)


FillFn = Callable[[PyTree, Array, Array, Array], Array]
"""`fill(params, tokens int32[B, L], is_text bool[B, L], positions int32[B, k]) -> logits float32[B, k, V]`.

The function returns the distribution of the token at each of `positions`, given the tokens where `is_text` is true. All
other tokens are the mask token. Those at `positions` may be attended to; those after them are padding.
"""


def nar_block(fill: FillFn, params: PyTree, *, mask_token: int, num_tokens: int = 25) -> Drafter:
    """Draft a chain of `num_tokens` tokens from one pass of `fill`.

    Args:
      fill: the model's function; it is static, and using the same function again compiles no new program.
      params: the parameters of `fill`.
      mask_token: id of the mask token; it is never drafted.

    The drafter has no state. Raises: UsageError for num_tokens < 1 or a negative mask_token.
    """
    if num_tokens < 1:
        raise UsageError(f"num_tokens must be at least 1, not {num_tokens}")
    if mask_token < 0:
        raise UsageError(f"mask_token must be a token id, not {mask_token}")
    return _functions(fill, mask_token, num_tokens).replace(params=params)


@functools.cache
def _functions(fill: FillFn, mask_token: int, num_tokens: int) -> Drafter:
    block = jnp.arange(num_tokens)

    def propose(params, keys, state, context: Context, limit):
        tokens, length = context.tokens, context.length[:, None]
        is_text = jnp.arange(tokens.shape[1]) < length
        logits = fill(params, jnp.where(is_text, tokens, mask_token), is_text, length + block)
        drafted = first_largest(logits.at[:, :, mask_token].set(-jnp.inf, mode="drop"))
        root = context.root
        valid = jnp.concatenate([jnp.ones_like(root, bool), block < limit[:, None]], 1)
        return chain(jnp.concatenate([root, drafted], 1), valid), state

    return Drafter(
        propose=propose,
        size=TreeSize(num_tokens + 1, num_tokens),
        traits=Traits(chains=True, widths=verify_widths(range(1, num_tokens + 2))),
    )
