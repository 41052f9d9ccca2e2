"""The acceptance head of SpecDec++ predicts the probability that a drafted token will be accepted.

Huang, Guo, Wang: SpecDec++: Boosting Speculative Decoding via Adaptive Candidate Lengths (2024), arXiv 2405.19715.
With x the draft model's feature of the token: x <- x + SiLU(W_j x + b_j) for each block j, s = softmax(W x + b)_1.
The authors apply one block several times. Here each block has its own parameters, and theirs are loaded as copies.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.errors import UsageError
from specjax.types import Array


class AcceptanceLayer(NamedTuple):
    """A linear layer in float32."""

    weight: Array  # float32[out, in]
    bias: Array  # float32[out]

    def __call__(self, x: Array) -> Array:
        return jnp.matmul(x, self.weight.T, precision="highest") + self.bias


class AcceptanceHead(NamedTuple):
    """The parameters of an acceptance head. It is a pytree."""

    blocks: tuple[AcceptanceLayer, ...]  # [D, D] each
    out: AcceptanceLayer  # [2, D]; 1: accepted

    def acceptance(self, features: Array) -> Array:
        """Return the acceptance probabilities float32[...] of tokens with these features [..., D].

        Raises: UsageError for features of another width.
        """
        width = self.out.weight.shape[1]
        if features.shape[-1] != width:
            raise UsageError(
                f"the acceptance head reads features of width {width}, but those of the draft model have width "
                f"{features.shape[-1]}; use the head that was trained for this draft model"
            )
        x = features.astype(jnp.float32)
        for block in self.blocks:
            x = x + jax.nn.silu(block(x))
        return jax.nn.softmax(self.out(x), -1)[..., 1]


def init_acceptance(width: int, num_blocks: int = 3) -> AcceptanceHead:
    """Return an untrained head, which predicts 1/2 for every token."""
    zeros = lambda out: AcceptanceLayer(jnp.zeros((out, width)), jnp.zeros((out,)))
    return AcceptanceHead(tuple(zeros(width) for _ in range(num_blocks)), zeros(2))
