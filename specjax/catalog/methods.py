"""METHODS: every method by name, with what it promises and where it comes from.

A table written by hand; a test checks that every drafter file is in it. The README's list, the command line's choices
and the conformance tests come from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax

from specjax import drafters
from specjax.errors import UsageError
from specjax.retrieval.datastore import Datastore
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
    takes_datastore: bool = False  # `make` takes `datastore=` too
    needs_datastore: bool = False  # and cannot do without
    takes_costs: bool = False  # and `costs=`, of `specjax.costs`, and `platform=`
    draft_cost: float = 0.0  # of one drafting pass of the target itself, in its whole passes
    takes_tree: bool = False  # and `tree=`, a `trees.Builder`, and `stop=`, a `trees.Stop`


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            "auto",
            lambda target, draft, **options: drafters.auto(
                target.model.vocab_size, dtype=jax.tree.leaves(target.params)[0].dtype.name, **options
            ),
            "distribution",
            False,
            "suffix matches and recycled runners-up in one tree, of which only what pays is verified; often nothing",
            "our combination of arXiv 2411.10666, 2408.08696, 2503.03434 and 2406.14066",
            takes_costs=True,
        ),
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
            takes_tree=True,
        ),
        Method(
            "easyspec",
            lambda target, draft, **options: drafters.easyspec(draft, **options),
            "distribution",
            True,
            "a smaller model drafts a chain, the attention of several of its layers at once",
            "Wu et al. 2025, arXiv 2502.02493",
            takes_tree=True,
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
            "rasd",
            lambda target, draft, **options: drafters.rasd(draft, **options),
            "distribution",
            True,
            "a smaller model's tree fused with what followed the longest earlier occurrence of the end of the text",
            "Quan et al. 2025, arXiv 2503.03434",
        ),
        Method(
            "rapid",
            lambda target, draft, **options: drafters.rapid(draft, **options),
            "distribution",
            True,
            "a draft model that reads only the relevant chunks of a long prompt",
            "Chen et al. 2025, arXiv 2502.20330",
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
            "suffix",
            lambda target, draft, *, datastore=None, **options: drafters.suffix(
                corpus=datastore and datastore.to_device(target.model.mesh), **options
            ),
            "distribution",
            False,
            "copies what followed the longest occurrence of the end of the text, in itself or in a corpus",
            "Hu et al. 2024, arXiv 2411.10666",
            MappingProxyType({"num_tokens": 7}),
            takes_datastore=True,
        ),
        Method(
            "input_guided",
            lambda target, draft, **options: drafters.input_guided(**options),
            "distribution",
            False,
            "copies the text to be edited, or the prompt, from where the output stands in it",
            "Ge et al. 2022, arXiv 2205.10350",
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
            "jacobi",
            lambda target, draft, **options: drafters.jacobi(target.model.vocab_size, **options),
            "distribution",
            False,
            "the target's last pass over a window is the draft of its next one",
            "Teng et al. 2025, arXiv 2410.01699",
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
            "a tree drawn from a table of the target's laws after the last 4, 3 or 2 tokens",
            "Song et al. 2025, arXiv 2506.04708",
            MappingProxyType({"num_nodes": 7}),
        ),
        Method(
            "rest",
            lambda target, draft, *, datastore, **options: drafters.rest(
                datastore.to_device(target.model.mesh), **options
            ),
            "distribution",
            False,
            "a tree of what most often followed the current words in a corpus",
            "He et al. 2024, arXiv 2311.08252",
            MappingProxyType({"num_nodes": 7}),
            takes_datastore=True,
            needs_datastore=True,
        ),
        Method(
            "early_exit",
            lambda target, draft, **options: drafters.early_exit(target, **options),
            "distribution",
            False,
            "the target's own first layers draft a chain",
            "Elhoushi et al. 2024, arXiv 2404.16710",
            draft_cost=0.25,
            takes_tree=True,
        ),
        Method(
            "swift",
            lambda target, draft, **options: drafters.swift(target, **options),
            "distribution",
            False,
            "the target drafts with sublayers skipped, and searches for the best ones to skip",
            "Xia et al. 2024, arXiv 2410.06916",
            draft_cost=0.55,
        ),
        Method(
            "dynamic_exit",
            lambda target, draft, **options: drafters.dynamic_exit(target, **options),
            "distribution",
            False,
            "the target's own first layers draft; how many of them, and how far, is chosen each round",
            "Zarch et al. 2025, arXiv 2504.05598",
            draft_cost=0.25,
        ),
        Method(
            "superposed",
            lambda target, draft, **options: drafters.superposed(target, **options),
            "distribution",
            False,
            "the target's own first layers draft several chains at once, from a mixture of their tokens",
            "Shen et al. 2024, arXiv 2405.18400",
            draft_cost=0.25,
        ),
        Method(
            "choice",
            lambda target, draft, **options: _pick(target, **options),
            "distribution",
            False,
            "a bandit picks prompt lookup or token recycling, their depth, or plain decoding, by what each paid",
            "Auer et al. 2002; Garivier, Moulines 2008, arXiv 0805.3415",
            takes_costs=True,
        ),
    )
}


def _pick(target: Target, num_nodes: int = 7, **options) -> Drafter:
    several = drafters.prompt_lookup(num_nodes), drafters.token_recycling(target.model.vocab_size, num_nodes=num_nodes)
    return drafters.choice(*several, dtype=jax.tree.leaves(target.params)[0].dtype.name, **options)


def make_drafter(
    name: str, target: Target, draft: Target | None = None, *, datastore: Datastore | None = None, **options
) -> Drafter:
    """The drafter of a method by name. `options` go to its factory.

    Raises: UsageError for an unknown name, or a missing or mismatched draft model or datastore.
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
    if method.needs_datastore and datastore is None:
        raise UsageError(f"method {name} needs a datastore; give one with --datastore (datastore= in Python)")
    if method.takes_datastore and datastore is not None:
        if datastore.vocab_size > target.model.vocab_size:
            raise UsageError(
                f"the datastore has {datastore.vocab_size} tokens in its vocabulary and the target "
                f"{target.model.vocab_size}; build one with the target's own tokenizer"
            )
        options["datastore"] = datastore
    return method.make(target, draft, **options)
