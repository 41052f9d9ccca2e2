"""Big Little Decoder (BiLD): keep the draft up to the first token that the target finds too unlikely.

Kim, Mangalam, Moon, Malik, Mahoney, Gholami, Keutzer: Speculative Decoding with Big Little Decoder (NeurIPS 2023),
arXiv 2302.07863.

Rule (rollback): accept x_i while -log p_i(x_i) <= alpha. Replace the first rejected token by argmax p_i. If all tokens
are accepted, append argmax p_{L+1}. With `sample`, these tokens are drawn from p instead.
Rule (fallback): stop drafting below a node where max_y q(y) is below a bound. This is the stop condition
`trees.stops.fallback`.
Option of the official code: `keep_argmax` always accepts a token that is argmax p_i, however unlikely it is.
Setting of the paper: a greedy draft of at most 10 tokens with fallback below 0.6, scored by the distributions at
temperature 1.
  Python: `two_model(draft, tree=trees.bild())` with `verifier=rollback()` and `temperature=1.0`.
  Command line: `--draft DRAFT --tree bild:10 --verifier rollback --temperature 1`. Use `rollback:sample=yes` to draw
  the target's own tokens.
Guarantee: lossy. With alpha < ln 2 every accepted token has p > 1/2, so it is the argmax. The text is then the
target's greedy text for any draft and temperature. With `sample` and alpha < 0 no token is accepted, which is plain
sampling. alpha = inf accepts the complete draft.
p is the warped distribution. At temperature 0 it is one-hot, and the rule is greedy verification. For the relaxed rule
with greedy text, the setting of the paper, decode at temperature 1 without `sample`.
Deviations: on trees, the rule takes the longest run of accepted tokens (ties: the larger sum of log p). On a chain that
is the rule of the paper. The official code's other option, one more target token after a rollback, is omitted.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import first_largest, take_along
from specjax.types import Array, TokenTree
from specjax.verifiers.lossy.typical import longest_run, node_log_probability
from specjax.verifiers.verifier import ANY, Accepted, Verifier, check_parameter, distribution, with_keys


def core(
    u: Array,
    tree: TokenTree,
    target_logits: Array,
    *,
    alpha: float,
    sample: bool = False,
    keep_argmax: bool = False,
) -> Accepted:
    """Apply the rule. It does not read the uniforms float32[B, N]."""
    del u
    log_p = node_log_probability(target_logits, tree)
    passes = -log_p <= alpha
    if keep_argmax:
        passes |= tree.tokens == take_along(first_largest(target_logits), jnp.maximum(tree.parents, 0), 1)
    path, num_nodes, last = longest_run(tree, passes, log_p)
    p = distribution(target_logits, last)
    return Accepted(path, num_nodes, p if sample else jax.nn.one_hot(first_largest(p), p.shape[-1]))


@functools.cache
def rollback(alpha: float = 5.0, *, sample: bool = False, keep_argmax: bool = False) -> Verifier:
    """Build the rule. The official code has alpha = 5, and 0.6 for fallback, both tuned per task.

    Args:
      alpha: largest -log p, in nats, of an accepted token.
      sample: draw the target's own tokens from p instead of taking the argmax.
      keep_argmax: also accept the target's argmax, for any alpha.

    Raises: UsageError if alpha is not a number.
    """
    check_parameter("rollback: alpha", alpha, lambda x: x > -math.inf, "a number of nats, or inf to accept all")
    return Verifier(
        "rollback",
        with_keys(functools.partial(core, alpha=alpha, sample=sample, keep_argmax=keep_argmax)),
        draws=ANY,
        guarantee="lossy",
        summary="accepts the draft up to the first token that the target finds too unlikely",
        paper="Kim et al. 2023, arXiv 2302.07863",
        greedy_at_zero=alpha < math.inf,
    )
