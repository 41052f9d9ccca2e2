"""Judge Decoding: a trained head on the target's hidden states may accept tokens that the standard test rejects.

Bachmann, Anagnostidis, Pumarola, Georgopoulos, Sanakoyeu, Du, Schönfeld, Thabet, Kohler: Judge Decoding: Faster
Speculative Sampling Requires Going Beyond Model Alignment (ICLR 2025), arXiv 2501.19309.

Rule: accept node x if the exact test accepts it or sigmoid(w . h_x + b) > threshold. h_x is the target's hidden state
at x itself, after it has read x. The next token is drawn from the residual of the exact test: norm([p - q]+) after a
rejection on a chain, and p at its end.
The exact test is recursive rejection for drawn siblings (on a chain the standard rule). For point masses it accepts x
if u < r(x), else r(x) <- 0, r <- norm(r).
Guarantee: lossy. On a chain it accepts at least as many tokens as the standard rule with the same uniforms. Threshold 1
is the standard rule, and threshold 0 accepts every node that the descent reaches.
Deviations: the paper covers chains only. On a tree, siblings are tested in draft order, and the descent immediately
enters a node that the head accepts. So on a tree it can accept fewer tokens than without the head.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from specjax.errors import UsageError
from specjax.types import Array, TokenTree, Verdict
from specjax.verifiers.descent import descend, rule_for
from specjax.verifiers.verifier import Accepted, Verifier, check_parameter, with_keys


def core(
    u: Array, tree: TokenTree, target_logits: Array, hidden: Array, weight: Array, bias: Array, threshold: Array
) -> Accepted:
    """Apply the rule with given uniforms float32[B, N]. `hidden` is [B, N, D], and u[:, 0] is not used."""
    judged = judge_score(hidden, weight, bias) > log_odds_of(threshold)
    return descend(rule_for(tree), u, tree, target_logits, also=judged)


def log_odds_of(probability: Array) -> Array:
    """Convert a probability threshold to log-odds float32[...].

    The head's scores are compared as log-odds, because float32 probabilities are too coarse close to 1.
    """
    return jnp.log(probability) - jnp.log1p(-probability)


def judge_score(hidden: Array, weight: Array, bias: Array) -> Array:
    """Return the head's log-odds float32[...] that a token is right, from hidden states [..., D] of a frozen target."""
    hidden = jax.lax.stop_gradient(hidden).astype(jnp.float32)
    return jnp.dot(hidden, weight, precision="highest") + bias


def init_judge(hidden_width: int) -> tuple[Array, Array]:
    """Return (weight float32[D], bias float32[]) of an untrained head. Its scores are 0.5, so threshold 0.5 rejects."""
    return jnp.zeros((hidden_width,)), jnp.zeros(())


def judge(weight: Array | np.ndarray, bias: Array | float = 0.0, threshold: Array | float = 0.5) -> Verifier:
    """Build the rule with a head. All three arguments are pytree leaves, so new values do not recompile the program.

    Raises: UsageError for a threshold outside 0 to 1.
    """
    check_parameter("judge: threshold", threshold, lambda x: (x >= 0) & (x <= 1), "from 0 to 1")
    return Verifier(
        "judge",
        _rule,
        draws=("point_mass", "chain", "without_replacement"),
        guarantee="lossy",
        summary="accepts tokens that the exact test or a trained head on the target's hidden states accepts",
        paper="Bachmann et al. 2025, arXiv 2501.19309",
        by_row=True,
        params=tuple(jnp.asarray(x, jnp.float32) for x in (weight, bias, threshold)),
    )


def _rule(keys: Array, tree: TokenTree, target_logits: Array, hidden: Array | None, params) -> Verdict:
    if hidden is None:
        raise ValueError("judge needs the target's hidden states; pass hidden[B, N, D]")
    if hidden.shape[-1] != len(params[0]):
        raise UsageError(
            f"the judge head has width {len(params[0])}, but the target's hidden states have {hidden.shape[-1]}; pass "
            "the head that was trained for this target"
        )
    rule = with_keys(lambda u, tree, target_logits: core(u, tree, target_logits, hidden, *params))
    return rule(keys, tree, target_logits)
