"""Acceptance rules, one per file. Each is a `Verifier`: (keys, tree, warped target logits) -> Verdict."""

from dataclasses import replace

import jax.numpy as jnp

from specjax.types import Drafter
from specjax.verifiers.exact.block import block
from specjax.verifiers.exact.greedy import greedy
from specjax.verifiers.exact.greedy_multi_draft import greedy_multi_draft
from specjax.verifiers.exact.multipath_block import multipath_block
from specjax.verifiers.exact.recursive_rejection import recursive_rejection
from specjax.verifiers.exact.sample_and_match import sample_and_match
from specjax.verifiers.exact.sequoia import sequoia
from specjax.verifiers.exact.specinfer import specinfer
from specjax.verifiers.exact.spectr import spectr
from specjax.verifiers.exact.standard import standard
from specjax.verifiers.exact.traversal import traversal
from specjax.verifiers.lossy.bild import rollback
from specjax.verifiers.lossy.grouped import grouped, grouped_static
from specjax.verifiers.lossy.judge import init_judge, judge
from specjax.verifiers.lossy.lantern import lantern, nearest_codes
from specjax.verifiers.lossy.rapid import rapid
from specjax.verifiers.lossy.top_beta import top_beta
from specjax.verifiers.lossy.typical import typical
from specjax.verifiers.verifier import ANY, Verifier

__all__ = [
    "ANY",
    "VERIFIERS",
    "Verifier",
    "block",
    "exact_verifier",
    "greedy",
    "greedy_multi_draft",
    "grouped",
    "grouped_static",
    "init_judge",
    "judge",
    "lantern",
    "multipath_block",
    "nearest_codes",
    "rapid",
    "recursive_rejection",
    "rollback",
    "rules_with_arrays",
    "sample_and_match",
    "sequoia",
    "specinfer",
    "spectr",
    "standard",
    "top_beta",
    "traversal",
    "typical",
]

VERIFIERS: dict[str, Verifier] = {
    verifier.name: verifier
    for verifier in (
        greedy,
        sample_and_match,
        standard,
        block,
        recursive_rejection,
        specinfer,
        spectr,
        multipath_block(),
        greedy_multi_draft,
        traversal,
        sequoia,
        replace(typical(), distance=0.33, setting="epsilon 0.09, delta 0.3"),
        replace(rollback(), distance=0.497, setting="alpha 5"),
        replace(top_beta(), distance=0.497, setting="beta 5, tau 3"),
        replace(rapid(), distance=0.719, setting="eta 10, alpha 0.1"),
    )
}
"""Rules by name. Rules with arrays are specific to a vocabulary; see `rules_with_arrays`."""


def rules_with_arrays() -> dict[str, Verifier]:
    """Return the rules that are not in `VERIFIERS`, with arrays for the three tokens of the toy pair.

    The tests measure their distance from the target with these arrays. This is a function so that importing the package
    creates no arrays.
    """
    nearest = jnp.array([[1, 2], [0, 2], [1, 0]])  # the neighbours of each token, nearest first
    return {
        # The toy's hidden state of a token is one-hot, so the weight is the token's score.
        "judge": replace(
            judge(jnp.array([-1.5, 0.3, 1.5])), distance=0.24, setting="threshold 0.5, scores -1.5, 0.3, 1.5"
        ),
        "lantern": replace(lantern(nearest, 0.3), distance=0.22, setting="delta 0.3, 2 neighbours"),
        "lantern++": replace(
            lantern(nearest, 2.6, relative=True),
            name="lantern++",
            distance=0.22,
            setting="lambda 2.6, 2 neighbours",
            paper="Park et al. 2025, arXiv 2502.06352",
        ),
        "grouped": replace(grouped(2), distance=0.144, setting="size 2"),
        "grouped_static": replace(grouped_static(jnp.array([0, 0, 1])), distance=0.13, setting="clusters {0, 1}, {2}"),
    }


def exact_verifier(drafter: Drafter, is_greedy: bool) -> Verifier:
    """Return the default lossless rule for the drafter's kind of draws, or the greedy rule if `is_greedy`."""
    if is_greedy:
        return greedy
    return {
        "point_mass": sample_and_match,
        "chain": standard,
        "without_replacement": recursive_rejection,
        "with_replacement": specinfer,
        "with_replacement_uneven": specinfer,
        "top_and_sampled": greedy_multi_draft,
        "without_replacement_then_uniform": sequoia,
    }[drafter.traits.draws]
