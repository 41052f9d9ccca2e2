"""SpecDec++'s acceptance head: how likely a token is accepted that a draft model has drafted and read.

Huang, Guo, Wang: SpecDec++: Boosting Speculative Decoding via Adaptive Candidate Lengths (2024), arXiv 2405.19715.
x <- x + SiLU(W_j x + b_j) for each block j, s = softmax(W x + b)_1, for x the draft model's feature of the token.
The authors' blocks are one block several times over; here each has its own parameters, and theirs are that many copies.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.errors import UsageError
from specjax.types import Array


class AcceptanceLayer(NamedTuple):
    weight: Array  # float32[out, in]
    bias: Array  # float32[out]

    def __call__(self, x: Array) -> Array:
        return jnp.matmul(x, self.weight.T, precision="highest") + self.bias


class AcceptanceHead(NamedTuple):
    """A head's parameters, a pytree."""

    blocks: tuple[AcceptanceLayer, ...]  # [D, D] each
    out: AcceptanceLayer  # [2, D]; 1: accepted

    def accepted(self, features: Array) -> Array:
        """float32[...], of tokens by their features [..., D]. Raises: UsageError for features of another width."""
        width = self.out.weight.shape[1]
        if features.shape[-1] != width:
            raise UsageError(
                f"the acceptance head reads {width} numbers, and the draft model's features have {features.shape[-1]}; "
                "give the head that was trained for this draft model"
            )
        x = features.astype(jnp.float32)
        for block in self.blocks:
            x = x + jax.nn.silu(block(x))
        return jax.nn.softmax(self.out(x), -1)[..., 1]


def init_acceptance(width: int, num_blocks: int = 3) -> AcceptanceHead:
    """An untrained one: even odds for every token."""
    nothing = lambda out: AcceptanceLayer(jnp.zeros((out, width)), jnp.zeros((out,)))
    return AcceptanceHead(tuple(nothing(width) for _ in range(num_blocks)), nothing(2))
