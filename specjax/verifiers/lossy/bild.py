"""Big Little Decoder (BiLD): keep the draft up to the first token that the target finds too unlikely.

Kim, Mangalam, Moon, Malik, Mahoney, Gholami, Keutzer: Speculative Decoding with Big Little Decoder (NeurIPS 2023),
arXiv 2302.07863.

Rule (rollback): x_i is kept while -log p_i(x_i) <= alpha; the first that is not is replaced by argmax p_i. If all are
kept, argmax p_{L+1} is appended. With `sample` these tokens are drawn from p instead.
Rule (fallback): draft no further below a node where max_y q(y) is under a bound: the drafter's `trees.stops.fallback`.
Guarantee: lossy. With alpha < ln 2 every kept token has p > 1/2, so it is the argmax, and the text is the greedy one of
the target, whatever was drafted and at any temperature. With `sample` and alpha < 0 nothing is kept, which is plain
sampling; alpha = inf keeps the whole draft.
p is the warped distribution: at temperature 0 it is one-hot and the rule is greedy verification. For the relaxed rule
with greedy text, the setting of the paper, decode at temperature 1 without `sample`.
Deviations: on trees the longest run of kept tokens is taken (ties: the larger sum of log p), which on a chain is the
rule of the paper. The official code's option of one more target token after a rollback is left out.
"""

from __future__ import annotations

import functools

import jax

from specjax.indexing import first_largest
from specjax.types import Array, TokenTree
from specjax.verifiers.lossy.typical import longest_run, node_log_probability
from specjax.verifiers.verifier import ANY, Accepted, Verifier, distribution, with_keys


def core(u: Array, tree: TokenTree, target_logits: Array, *, alpha: float, sample: bool = False) -> Accepted:
    """The rule; it does not read the uniforms float32[B, N]."""
    del u
    log_p = node_log_probability(target_logits, tree)
    path, num_nodes, last = longest_run(tree, -log_p <= alpha, log_p)
    p = distribution(target_logits, last)
    return Accepted(path, num_nodes, p if sample else jax.nn.one_hot(first_largest(p), p.shape[-1]))


@functools.cache
def rollback(alpha: float = 5.0, *, sample: bool = False) -> Verifier:
    """The rule. The official code has alpha = 5, and 0.6 for fallback, both tuned per task.

    Args:
      alpha: largest -log p, in nats, of a token that is kept.
      sample: draw the target's own tokens from p instead of taking the argmax.
    """
    return Verifier(
        "rollback",
        with_keys(functools.partial(core, alpha=alpha, sample=sample)),
        draws=ANY,
        guarantee="lossy",
        summary="keeps the draft up to the first token whose surprise under the target is over a bound",
        paper="Kim et al. 2023, arXiv 2302.07863",
    )
