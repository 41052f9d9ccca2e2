"""RAPID's verification with knowledge transfer: the draft pulls the target's distribution towards its own.

Chen, Feng, Ni, Li, Shieh: Long-Context Inference with Retrieval-Augmented Speculative Decoding (ICML 2025),
arXiv 2502.20330.

Rule: at a drafted position with target logits z, p = softmax(z) and the draft's distribution q,
  m = [q >= alpha max q],  z^ = z - eta m (p - q),  p^ = softmax(z^);
accept x with probability min(1, p^(x) / q(x)). After the first rejection the next token is drawn from
  residual "phat":  norm([p^ - q]+), with which the token at a drafted position has exactly the distribution p^;
  residual "paper": norm([max(p - q, p - p^)]+), the released code's, with which it has neither p nor p^.
After the last acceptance it is drawn from p, since q does not exist at that position.
Without `sample`, the draft is accepted while it is argmax z^. The next token is argmax z^, and at the end argmax z.
Guarantee: lossy, by design. The draft has information that the target lacks, such as the relevant part of a long
prompt. The distance of p^ from p depends on eta and on the draft. eta = 0 is the standard rule. alpha = 1 changes only
the logit of the draft's likeliest token.
p and q are warped distributions, so p^ cannot draw a token that p cannot. At temperature 0 both are one-hot, and the
rule is greedy verification. For the relaxed rule with greedy text, decode at temperature 1 without `sample`.
Deviation: "phat" is the default.
The rule supports chains only.
"""

from __future__ import annotations

import functools
import math
from typing import Literal

import jax.numpy as jnp

from specjax.errors import UsageError
from specjax.numerics.sampling import warp
from specjax.types import Array, Sampling, TokenTree
from specjax.verifiers.exact.standard import chain_logits
from specjax.verifiers.exact.standard import core as standard_core
from specjax.verifiers.verifier import (
    Accepted,
    Verifier,
    check_parameter,
    distribution,
    need_logits,
    normalise,
    with_keys,
)

Residual = Literal["phat", "paper"]


def core(
    u: Array,
    tree: TokenTree,
    target_logits: Array,
    *,
    eta: float | Array,
    alpha: float | Array = 0.1,
    residual: Residual = "phat",
    sample: bool = True,
) -> Accepted:
    """Apply the rule with given uniforms float32[B, N]. `tree` is a chain, and u[:, 0] is not used."""
    tree = tree._replace(logits=chain_logits(tree, target_logits.shape[-1]))
    adjusted = adjusted_logits(tree, target_logits, eta, alpha)
    if not sample:
        return standard_core(u, tree, warp(adjusted, Sampling()))
    end = standard_core(u, tree, adjusted)
    if residual == "phat":
        return end
    last = end.num_nodes - 1
    p, q, p_hat = (distribution(logits, last) for logits in (target_logits, need_logits(tree), adjusted))
    remaining = normalise(jnp.maximum(p - jnp.minimum(q, p_hat), 0.0), p)  # p - min(q, p^) = max(p - q, p - p^)
    drafted = end.num_nodes < jnp.sum(tree.valid, 1)
    return end._replace(residual=jnp.where(drafted[:, None], remaining, p))


def adjusted_logits(tree: TokenTree, target_logits: Array, eta: float | Array, alpha: float | Array) -> Array:
    """Return z^ float32[B, N, V] for nodes of a chain with a drafted child, and z for the others."""
    p, q = distribution(target_logits), distribution(need_logits(tree))
    trusted = q >= alpha * jnp.max(q, -1, keepdims=True)
    drafted = jnp.pad(tree.valid[:, 1:], ((0, 0), (0, 1)))[:, :, None]
    return jnp.where(drafted & trusted, target_logits - eta * (p - q), target_logits)


@functools.cache
def rapid(eta: float = 10.0, alpha: float = 0.1, *, residual: Residual = "phat", sample: bool = True) -> Verifier:
    """Build the rule.

    The authors set eta by the strength of the draft: 10 for an 8B target as its own draft, 20 for a 70B target, and 40
    to 50 for an 8B target with a 70B draft.

    Raises: UsageError for an eta below 0, an alpha outside 0 to 1, or another residual.
    """
    finite = "at least 0, the standard rule, and finite"
    check_parameter("rapid: eta", eta, lambda x: (x >= 0) & (x < math.inf), finite)
    check_parameter("rapid: alpha", alpha, lambda x: (x >= 0) & (x <= 1), "from 0 to 1")
    if residual not in ("phat", "paper"):
        raise UsageError(f'rapid: residual must be "phat" or "paper", not "{residual}"')
    return Verifier(
        "rapid",
        with_keys(functools.partial(core, eta=eta, alpha=alpha, residual=residual, sample=sample)),
        draws=("chain",),
        guarantee="lossy",
        summary="accepts against a mixture of target and draft, for drafts that read retrieved context",
        paper="Chen et al. 2025, arXiv 2502.20330",
        greedy_at_zero=True,
    )
