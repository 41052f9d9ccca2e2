"""Texts that several models or samples write. A table written by hand; `make` is the loop itself.

A test checks that every file of `specjax.collaborate.methods` is in it, and that options and defaults are those of its
function.
"""

from __future__ import annotations

from typing import Any

from specjax.catalog.method import Method
from specjax.catalog.options import Option, yes_or_no
from specjax.collaborate import methods


def _row(make: Any, summary: str, paper: str, *options: Option, **more: Any) -> Method:
    return Method(make.__name__, "collaboration", make, "lossy", summary, paper, options=options, **more)


DRAFT = frozenset({"draft"})


def most(what: str) -> Option:
    return Option("most", int, 512, f"tokens of a {what} at most")


COLLABORATIONS: dict[str, Method] = {
    method.name: method
    for method in (
        _row(
            methods.spec_reason,
            "a small model writes the steps of a chain of thought, the target rewrites those that it rates low",
            "Pan et al. 2025, arXiv 2504.07891",
            Option("threshold", float, 7.0, "rating from 0 to 9 from which on a step is kept"),
            Option("average", yes_or_no, False, "the mean rating, not the likeliest"),
            Option("first", int, 0, "steps that the target writes without a proposal"),
            most("step"),
            needs=frozenset({"draft", "segmenter", "judging"}),
        ),
        _row(
            methods.entropy_adaptive,
            "the large model writes where the text is uncertain, the small one where it is not",
            "Simonds 2025, arXiv 2502.06833",
            Option("tau", float, 1.0, "bits of mean entropy above which the large model writes"),
            Option("window", int, 5, "entropies that are averaged"),
            Option("least", int, 10, "tokens between two switches"),
            Option("start", ("small", "large"), "small", "who writes first"),
            needs=DRAFT,
        ),
        _row(
            methods.fs_gen,
            "a small and a large model, their logits fused or a router for each token",
            "Zhang et al. 2024, arXiv 2406.12295",
            Option("form", tuple(methods.FORMS), "contrastive", "how they are combined"),
            Option("strength", float, None, "beta of contrastive, 0.5, and proxy, 1.0; threshold of the routers"),
            Option("alpha", float, 0.1, "of contrastive: how likely a token must be beside the likeliest"),
            needs=DRAFT,
            takes=frozenset({"tuned"}),
        ),
        _row(
            methods.speculative_thinking,
            "a small model reasons, a large one takes over where it reflects or doubts",
            "Yang et al. 2025, arXiv 2504.12329",
            Option("look_ahead", int, 20, "tokens in which cues are looked for"),
            Option("long", int, 125, "tokens of a long takeover"),
            Option("patience", int, 15, "negative cues before one"),
            Option("reasons", yes_or_no, True, "whether the small model reasons by itself"),
            most("thought"),
            needs=frozenset({"draft", "segmenter"}),
            takes=frozenset({"cues"}),
        ),
        _row(
            methods.first_finish,
            "of several samples the one that ends first",
            "Agarwal et al. 2025, arXiv 2505.18149",
            Option("samples", int, 4, "per prompt"),
        ),
        _row(
            methods.cntp,
            "several continuations where the model is unsure, of which the likeliest is kept",
            "Wang et al. 2025, arXiv 2507.03038",
            Option("n_min", int, 1, "continuations at least"),
            Option("n_max", int, 10, "and at most"),
            Option("most", int, 32, "tokens of one at most"),
            needs=frozenset({"segmenter"}),
        ),
        _row(
            methods.power_smc,
            "particles that follow the power law p^alpha of whole texts",
            "Azizi et al. 2026, arXiv 2602.10273",
            Option("alpha", float, 4.0, "the power"),
            Option("particles", int, 64, "per prompt"),
            Option("block", int, 64, "tokens between two looks at the weights"),
            Option("kappa", float, 0.5, "share of effective particles below which they are drawn anew"),
            Option("ramp", int, 400, "tokens until the weights aim at alpha"),
        ),
        _row(
            methods.reward_smc,
            "particles that follow the model's law times rewards of the text so far",
            "arXiv 2604.16453",
            Option("particles", int, 16, "per prompt"),
            Option("block", int, 32, "tokens between two rewards"),
            Option("kappa", float, 0.5, "share of effective particles below which they are drawn anew"),
            Option("lookahead", int, 0, "roll-outs that say what rewards come; 0: the prefix alone"),
            Option("move", yes_or_no, True, "particles draw their last block anew after they were drawn anew"),
            needs=frozenset({"reward"}),
        ),
        _row(
            methods.a_star,
            "steps searched best first, by rewards and a guess at what is still to come",
            "arXiv 2505.13672",
            Option("k", int, 4, "steps per expansion"),
            Option("frontier", int, 64, "nodes that stay open"),
            Option("expected", float, 8.0, "steps that a text is expected to have; 0: costs alone decide"),
            Option("budget", int, 64, "expansions per prompt"),
            most("step"),
            needs=frozenset({"segmenter", "reward"}),
        ),
        _row(
            methods.anchored,
            "a risky model's text within a budget of divergence from a safe model's: KL(text || safe) <= k T",
            "He et al. 2026, arXiv 2602.07120",
            Option("budget", float, 0.15, "nats per token, k"),
            Option("debt", yes_or_no, True, "what the prompt tells of the risky model counts"),
            Option("tokens", int, 5, "of the prompt that tell it"),
            needs=frozenset({"safe"}),
        ),
        _row(
            methods.momentum,
            "greedy text that is held back from going round in circles",
            "Lan et al. 2022, arXiv 2212.02175",
            Option("k", int, 5, "likeliest tokens to choose from"),
            Option("alpha", float, 0.2, "weight of what was written already"),
        ),
        _row(
            methods.foreal,
            "a leading model begins sentences, a small one ends them",
            "Li et al. 2025, arXiv 2506.06998",
            Option("lead", int, 15, "tokens of a sentence that the leader writes"),
            Option("p", float, 0.6, "probability that it begins one"),
            needs=frozenset({"draft", "segmenter"}),
        ),
        _row(
            methods.arbitrage,
            "a small model writes steps, the target rewrites those that it would make better",
            "arXiv 2512.05033",
            Option("form", ("router", "reward", "oracle"), "router", "what decides"),
            Option("tau", float, None, "its threshold: 0.5 of a router, 0.7 of a reward, 0 of the oracle"),
            most("step"),
            needs=frozenset({"draft", "segmenter"}),
            takes=frozenset({"router", "reward"}),
        ),
        _row(
            methods.rpc,
            "of many samples the answer with the most probability, without the samples that are improbable",
            "Zhou et al. 2025, arXiv 2502.00511",
            Option("samples", int, 128, "per prompt"),
            Option("path", yes_or_no, False, "probabilities of whole texts, not their mean token's"),
            Option("prune", yes_or_no, True, "leave improbable samples out"),
            needs=frozenset({"answers"}),
        ),
    )
}
