"""Judge Decoding: a trained head on the target's features may accept what the standard test rejects.

Bachmann, Anagnostidis, Pumarola, Georgopoulos, Sanakoyeu, Du, Schönfeld, Thabet, Kohler: Judge Decoding: Faster
Speculative Sampling Requires Going Beyond Model Alignment (ICLR 2025), arXiv 2501.19309.

Rule: node x is accepted if the exact test accepts it or sigmoid(w . h_x + b) > threshold, where h_x is the target's
feature at x itself, after it has read x. The next token comes from what the exact test left: norm([p - q]+) after a
rejection on a chain, p at its end.
The exact test is recursive rejection for drawn siblings (on a chain the standard rule); for point masses accept x if
u < r(x), else r(x) <- 0, r <- norm(r).
Guarantee: lossy. On a chain at least what the standard rule accepts with the same uniforms; threshold 1 is that rule,
threshold 0 accepts every node it reaches.
The paper has chains only. On a tree, where it leaves the rule open, siblings are tested in draft order and a judged one
is descended into at once, so a tree can accept less than without the head.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.errors import UsageError
from specjax.types import Array, TokenTree, Verdict
from specjax.verifiers.descent import descend, rule_for
from specjax.verifiers.verifier import Accepted, Verifier, check_parameter, with_keys


def core(
    u: Array, tree: TokenTree, target_logits: Array, hidden: Array, weight: Array, bias: Array, threshold: Array
) -> Accepted:
    """The rule with its uniforms float32[B, N] given (u[:, 0] is not used). `hidden` [B, N, D]."""
    judged = judge_score(hidden, weight, bias) > log_odds_of(threshold)
    return descend(rule_for(tree), u, tree, target_logits, also=judged)


def log_odds_of(chance: Array) -> Array:
    """float32[...]: above which a token's are to be. Near a chance of 1 the steps between float32 are wide."""
    return jnp.log(chance) - jnp.log1p(-chance)


def judge_score(hidden: Array, weight: Array, bias: Array) -> Array:
    """float32[...]: the head's log-odds that a token is right, from features [..., D] of a frozen target."""
    hidden = jax.lax.stop_gradient(hidden).astype(jnp.float32)
    return jnp.dot(hidden, weight, precision="highest") + bias


def init_judge(hidden_width: int) -> tuple[Array, Array]:
    """(weight float32[D], bias float32[]) of an untrained head: even odds, which a threshold of 0.5 does not accept."""
    return jnp.zeros((hidden_width,)), jnp.zeros(())


def judge(weight: Array, bias: Array | float = 0.0, threshold: Array | float = 0.5) -> Verifier:
    """The rule with a head. All three are leaves: another head or threshold compiles nothing.

    Raises: UsageError for a threshold outside 0 to 1.
    """
    check_parameter("judge: threshold", threshold, lambda x: (x >= 0) & (x <= 1), "from 0 to 1")
    return Verifier(
        "judge",
        _rule,
        draws=("point_mass", "chain", "without_replacement"),
        guarantee="lossy",
        summary="accepts what the exact test accepts, and what a trained head on the target's features finds right",
        paper="Bachmann et al. 2025, arXiv 2501.19309",
        params=tuple(jnp.asarray(x, jnp.float32) for x in (weight, bias, threshold)),
    )


def _rule(keys: Array, tree: TokenTree, target_logits: Array, hidden: Array | None, params) -> Verdict:
    if hidden is None:
        raise ValueError("the judge reads the target's features; call it with hidden[B, N, D]")
    if hidden.shape[-1] != len(params[0]):
        raise UsageError(
            f"the judge's head reads {len(params[0])} numbers, and the target's features have {hidden.shape[-1]}; give "
            "the head that was trained for this target"
        )
    rule = with_keys(lambda u, tree, target_logits: core(u, tree, target_logits, hidden, *params))
    return rule(keys, tree, target_logits)
