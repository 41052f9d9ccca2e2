"""Acceptance rules, one per file. All are `VerifyFn`: (keys[B, N], tree, warped target logits) -> Verdict."""

from specjax.types import Draws, VerifyFn
from specjax.verifiers.greedy import greedy
from specjax.verifiers.sample_and_match import sample_and_match
from specjax.verifiers.speculative_sampling import speculative_sampling

__all__ = ["exact_verifier", "greedy", "sample_and_match", "speculative_sampling"]


def exact_verifier(draws: Draws, is_greedy: bool) -> VerifyFn:
    """The rule that keeps the target's law for drafts drawn this way."""
    if is_greedy:
        return greedy
    return {"point_mass": sample_and_match, "without_replacement": speculative_sampling}[draws]
