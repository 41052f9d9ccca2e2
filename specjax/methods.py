"""METHODS: every method by name, with what it promises and where it comes from.

A table written by hand; a test checks that every drafter file is in it. The README's list, the command line's choices
and the conformance tests come from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from specjax import drafters
from specjax.errors import UsageError
from specjax.types import Drafter, Guarantee, Target


class Method(NamedTuple):
    """One row of the table."""

    name: str
    make: Callable[..., Drafter]  # (target, draft, **options) -> Drafter
    guarantee: Guarantee
    needs_draft: bool  # a second model
    summary: str
    paper: str
    cpu_options: Mapping[str, int] = MappingProxyType({})  # budgets for machines where wide passes are dear


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            "autoregressive",
            lambda target, draft, **options: drafters.autoregressive(**options),
            "distribution",
            False,
            "plain decoding, one token per pass: the baseline",
            "",
        ),
        Method(
            "two_model",
            lambda target, draft, **options: drafters.two_model(draft, **options),
            "distribution",
            True,
            "a smaller model drafts a chain, verified with its true q",
            "Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318",
        ),
        Method(
            "jacobi",
            lambda target, draft, **options: drafters.jacobi(target.model.vocab_size, **options),
            "distribution",
            False,
            "the target's last pass over a window is the draft of its next one",
            "Teng et al. 2025, arXiv 2410.01699",
        ),
        Method(
            "hierarchical",
            lambda target, draft, **options: drafters.hierarchical(draft, drafters.prompt_lookup(), **options),
            "distribution",
            True,
            "a smaller model, itself helped by prompt lookup, drafts a chain",
            "SpecMQuant 2025, arXiv 2505.22179; Spector, Re 2023, arXiv 2308.04623",
        ),
        Method(
            "prompt_lookup",
            lambda target, draft, **options: drafters.prompt_lookup(**options),
            "distribution",
            False,
            "copies what followed the last occurrence of the current n-gram",
            "Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding",
        ),
        Method(
            "token_recycling",
            lambda target, draft, **options: drafters.token_recycling(target.model.vocab_size, **options),
            "distribution",
            False,
            "a static tree filled from the target's recent runners-up",
            "Luo et al. 2024, arXiv 2408.08696",
            MappingProxyType({"num_nodes": 7}),  # a pass over 8 tokens costs 1.7 of one on 2 cores; over 81 it costs 5
        ),
        Method(
            "lookahead",
            lambda target, draft, **options: drafters.lookahead(**options),
            "distribution",
            False,
            "n-grams from Jacobi iterations on a window of guesses",
            "Fu et al. 2024, arXiv 2402.02057",
            MappingProxyType({"ngram": 4, "window": 3, "guesses": 2}),
        ),
        Method(
            "aded",
            lambda target, draft, **options: drafters.aded(**options),
            "distribution",
            False,
            "a tree searched in a tri-gram table that adapts to the text",
            "Liu et al. 2024, arXiv 2407.12021",
            MappingProxyType({"num_nodes": 7}),
        ),
        Method(
            "stand",
            lambda target, draft, **options: drafters.stand(target.model.vocab_size, **options),
            "distribution",
            False,
            "a tree drawn from tables of the target's laws after the last 4, 3 or 2 tokens",
            "Song et al. 2025, arXiv 2506.04708",
            MappingProxyType({"num_nodes": 7}),
        ),
    )
}


def make_drafter(name: str, target: Target, draft: Target | None = None, **options) -> Drafter:
    """The drafter of a method by name. `options` go to its factory.

    Raises: UsageError for an unknown name, or a missing or mismatched draft model.
    """
    if name not in METHODS:
        raise UsageError(f'unknown method "{name}"; choose one of {", ".join(METHODS)}')
    method = METHODS[name]
    if method.needs_draft:
        if draft is None:
            raise UsageError(f"method {name} needs a draft model; give one with --draft (draft= in Python)")
        if draft.model.vocab_size != target.model.vocab_size:
            raise UsageError(
                f"the draft model has {draft.model.vocab_size} tokens in its vocabulary and the target "
                f"{target.model.vocab_size}; choose a draft model of the same family"
            )
    return method.make(target, draft, **options)
