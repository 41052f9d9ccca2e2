"""Acceptance rules, one per file. Each is a `Verifier`: (keys, tree, warped target logits) -> Verdict."""

from dataclasses import replace

from specjax.types import Drafter
from specjax.verifiers.bild import rollback
from specjax.verifiers.block import block
from specjax.verifiers.greedy import greedy
from specjax.verifiers.greedy_multi_draft import greedy_multi_draft
from specjax.verifiers.grouped import grouped, grouped_static
from specjax.verifiers.judge import init_judge, judge
from specjax.verifiers.lantern import lantern
from specjax.verifiers.multipath_block import multipath_block
from specjax.verifiers.recursive_rejection import recursive_rejection
from specjax.verifiers.sample_and_match import sample_and_match
from specjax.verifiers.specinfer import specinfer
from specjax.verifiers.spectr import spectr
from specjax.verifiers.standard import standard
from specjax.verifiers.traversal import traversal
from specjax.verifiers.typical import typical
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
    "recursive_rejection",
    "rollback",
    "sample_and_match",
    "specinfer",
    "spectr",
    "standard",
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
        multipath_block(2),
        greedy_multi_draft,
        traversal,
        replace(typical(), distance=0.33),
        replace(rollback(), distance=0.497),
    )
}
"""Rules by name, written by hand. Those that take arrays are left out: judge, lantern, grouped, grouped_static."""


def exact_verifier(drafter: Drafter, is_greedy: bool) -> Verifier:
    """The default rule that keeps the target's law for the way the drafter draws."""
    if is_greedy:
        return greedy
    return {
        "point_mass": sample_and_match,
        "chain": standard,
        "without_replacement": recursive_rejection,
        "with_replacement": specinfer,
        "top_and_sampled": greedy_multi_draft,
    }[drafter.draws]
