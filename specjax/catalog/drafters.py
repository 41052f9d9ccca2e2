"""Drafters: methods that draft for the loop of `specjax.decode`.

A table written by hand; a test checks that every drafter file is in it and that options and defaults are the factory's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

from specjax import drafters, trees
from specjax.adaptive import Depth
from specjax.catalog.adaptive import depth_spec, parse_depth
from specjax.catalog.method import Method
from specjax.catalog.options import REQUIRED, Option, numbers, read_call, two_numbers, yes_or_no
from specjax.costs import dtype_of
from specjax.diffusion import drafters as denoising
from specjax.errors import UsageError
from specjax.models.heads.contract import DraftHead
from specjax.models.loading.decision_heads import read_acceptance
from specjax.retrieval.datastore import Datastore
from specjax.trees import stops
from specjax.types import Drafter, Target

# --- from (target, draft, **options) to what a factory takes ----------------------------------------------------------


def _alone(factory: Callable[..., Drafter]) -> Callable[..., Drafter]:
    return lambda target, draft, **options: factory(**options)


def _of_draft(factory: Callable[..., Drafter]) -> Callable[..., Drafter]:
    return lambda target, draft, **options: factory(draft, **options)


def _of_target(factory: Callable[..., Drafter]) -> Callable[..., Drafter]:
    return lambda target, draft, **options: factory(target, **options)


def _of_vocabulary(factory: Callable[..., Drafter]) -> Callable[..., Drafter]:
    return lambda target, draft, **options: factory(target.model.vocab_size, **options)


def _auto(target: Target, draft: Target | DraftHead | None, **options) -> Drafter:
    head = draft if isinstance(draft, DraftHead) else None
    return drafters.auto(target.model.vocab_size, head=head, dtype=dtype_of(target), **options)


def _choice(
    target: Target,
    draft: Target | None,
    *,
    several: str | Sequence[str | Drafter] = "prompt_lookup+token_recycling",
    num_nodes: int = 7,
    datastore: Datastore | None = None,
    **options,
) -> Drafter:
    specs: Sequence[str | Drafter] = several.split("+") if isinstance(several, str) else several
    made = (_inner(spec, target, datastore, num_nodes) for spec in specs)
    return drafters.choice(*made, dtype=dtype_of(target), **options)


def _hierarchical(
    target: Target,
    draft: Target,
    *,
    inner: str | Drafter = "prompt_lookup",
    datastore: Datastore | None = None,
    **options,
) -> Drafter:
    return drafters.hierarchical(draft, _inner(inner, draft, datastore), **options)


def _rasd(
    target: Target,
    draft: Target | DraftHead,
    *,
    retrieval: str | Drafter | None = None,
    datastore: Datastore | None = None,
    **options,
) -> Drafter:
    if retrieval is None and datastore is not None:
        retrieval = "suffix:7"
    if retrieval is not None:
        retrieval = _inner(retrieval, target, datastore)
    return drafters.rasd(draft, retrieval, **options)


def _suffix(
    target: Target,
    draft: Target | None,
    *,
    fallback: str | Drafter | None = None,
    datastore: Datastore | None = None,
    **options,
) -> Drafter:
    other = None if fallback is None else _inner(fallback, target, datastore)
    corpus = None if datastore is None else datastore.to_device(target.model.mesh)
    return drafters.suffix(fallback=other, corpus=corpus, **options)


def _rest(target: Target, draft: Target | None, *, datastore: Datastore, **options) -> Drafter:
    return drafters.rest(datastore.to_device(target.model.mesh), **options)


def _aded(target: Target, draft: Target | None, *, datastore: Datastore | None = None, **options) -> Drafter:
    drafter = drafters.aded(**options)
    if datastore is None:
        return drafter
    texts: list[Any] = list(datastore.documents())
    size = {"buckets": options["buckets"]} if "buckets" in options else {}
    return drafter.replace(params=drafters.corpus_table(texts, **size))


def _thinned(target: Target, draft: Target | None, *, depth: str | Depth = "calm", **options) -> Drafter:
    return drafters.thinned(target, parse_depth(depth) if isinstance(depth, str) else depth, **options)


def _row_of(spec: str) -> Method:
    """The row of a drafter inside of another. Raises: UsageError unless that needs a datastore at most."""
    known = {name: method for name, method in DRAFTERS.items() if method.needs <= {"datastore"}}
    name = spec.partition(":")[0]
    if name not in known:
        raise UsageError(f'"{name}" is no drafter for the inside of another; choose one of {", ".join(known)}')
    return known[name]


def inside(spec: str) -> str:
    """A text such as `suffix` or `suffix:7,bias=2`. Raises: UsageError unless it names a drafter and its options."""
    read_call(spec, _row_of(spec).options)
    return spec


def several_inside(specs: str) -> str:
    """Such texts, joined by +. Raises: UsageError."""
    return "+".join(map(inside, specs.split("+")))


def _inner(spec: str | Drafter, target: Target, datastore: Datastore | None = None, size: int | None = None) -> Drafter:
    """The drafter inside of another: itself, or from a text such as `suffix` or `suffix:7,bias=2`.

    Args: size: how much it drafts, unless the text says so.
    """
    if isinstance(spec, Drafter):
        return spec
    method = _row_of(spec)
    options = read_call(spec, method.options)
    if size is not None and method.size is not None:
        options = {method.size: size} | options
    if datastore is None and "datastore" in method.needs:
        raise UsageError(f"{method.name} needs a datastore; give one with --datastore (datastore= in Python)")
    if datastore is not None and method.uses("datastore"):
        options["datastore"] = datastore
    return method.make(target, None, **options)


# --- options that several have ----------------------------------------------------------------------------------------

TREE = Option("tree", trees.parse, None, "what to draft instead of a chain")
STOP = Option("stop", stops.parse, None, "when to draft no further")
PATHS = Option("tree", trees.parse_paths, None, "the static tree, in place of the first num_nodes of its own")
KEEP_LOGITS = Option("keep_logits", yes_or_no, False, "hand the draft's logits on in greedy and coupled decoding")
EXIT_LAYER = Option("exit_layer", int, None, "layers that draft; default: a quarter")


def num_tokens(default: int, help: str = "drafted tokens per round") -> Option:
    return Option("num_tokens", int, default, help)


def num_nodes(default: int) -> Option:
    return Option("num_nodes", int, default, "drafted tokens per round")


def buckets(default: int) -> Option:
    return Option("buckets", int, default, "of the table of each row")


# --- the table --------------------------------------------------------------------------------------------------------

DRAFTERS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            "auto",
            "drafter",
            _auto,
            "distribution",
            "suffix matches, recycled runners-up and a head in one tree, of which only what pays is verified",
            "our combination of arXiv 2411.10666, 2408.08696, 2503.03434 and 2406.14066",
            takes=frozenset({"costs", "head"}),
            options=(
                Option("widths", numbers, None, "verify widths, rising from 1"),
                Option("num_recycled", int, None, "nodes of recycled tokens"),
                Option("head_tree", trees.parse_paths, None, "of a head's likeliest tokens"),
                Option("head_cost", float, None, "of drafting them, in plain passes; default: by the weights it reads"),
            ),
        ),
        Method(
            "autoregressive",
            "drafter",
            _alone(drafters.autoregressive),
            "distribution",
            "plain decoding, one token per pass: the baseline",
        ),
        Method(
            "two_model",
            "drafter",
            _of_draft(drafters.two_model),
            "distribution",
            "a smaller model drafts a chain, verified with its true q",
            "Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318",
            needs=frozenset({"draft"}),
            options=(
                num_tokens(4),
                TREE,
                STOP,
                Option("lag", int, 2, "last tokens of the text that are fed anew in each round"),
                KEEP_LOGITS,
                Option("acceptance", read_acceptance, None, "SpecDec++'s head of the draft model, for trained:T"),
            ),
        ),
        Method(
            "easyspec",
            "drafter",
            _of_draft(drafters.easyspec),
            "distribution",
            "a smaller model drafts a chain, the attention of several of its layers at once",
            "Wu et al. 2025, arXiv 2502.02493",
            needs=frozenset({"draft"}),
            options=(
                num_tokens(4),
                TREE,
                Option("group", int, None, "layers whose attention runs at once; default: as the draft model lies"),
                STOP,
                KEEP_LOGITS,
            ),
        ),
        Method(
            "hierarchical",
            "drafter",
            _hierarchical,
            "distribution",
            "a smaller model, itself helped by prompt lookup, drafts a chain",
            "SpecMQuant 2025, arXiv 2505.22179; Spector, Re 2023, arXiv 2308.04623",
            needs=frozenset({"draft"}),
            takes=frozenset({"datastore"}),
            options=(
                Option("min_tokens", int, 6, "drafted tokens after which it stops"),
                Option("own_token", yes_or_no, True, "begin with a token that the smaller model draws without a draft"),
                Option("inner", inside, "prompt_lookup", "what drafts for the smaller model, such as suffix:7"),
            ),
        ),
        Method(
            "rasd",
            "drafter",
            _rasd,
            "distribution",
            "a smaller model's or a head's tree fused with what followed the last occurrence of the end of the text",
            "Quan et al. 2025, arXiv 2503.03434",
            needs=frozenset({"draft"}),
            takes=frozenset({"datastore", "head"}),
            options=(
                Option("retrieval", inside, None, "what is fused with it, such as rest:16; default: suffix:7"),
                Option("tree", trees.parse, "top:8x2x1x1", "of the smaller model, without randomness"),
                Option("prune", yes_or_no, True, "keep only retrieved paths that start as the smaller model would"),
            ),
        ),
        Method(
            "rapid",
            "drafter",
            _of_draft(drafters.rapid),
            "distribution",
            "a draft model that reads only the relevant chunks of a long prompt",
            "Chen et al. 2025, arXiv 2502.20330",
            needs=frozenset({"draft"}),
            options=(
                num_tokens(10),
                TREE,
                Option("budget", int, 4096, "tokens of the prompt that it reads"),
                Option("chunk", int, 128, "tokens of a chunk"),
                Option("query", int, 64, "last tokens of the prompt, to which chunks are compared"),
                Option("max_new_tokens", int, 1024, "new tokens at most, for its cache"),
            ),
        ),
        Method(
            "nar_block",
            "drafter",
            _alone(drafters.nar_block),
            "distribution",
            "a block of tokens at once from a model trained for masked places",
            "Xia et al. 2022, arXiv 2203.16487; Ge et al. 2022, arXiv 2205.10350",
            needs=frozenset({"fill"}),
            options=(Option("mask_token", int, REQUIRED, "stands where a token is missing"), num_tokens(25)),
        ),
        Method(
            "deer",
            "drafter",
            _of_draft(denoising.deer),
            "distribution",
            "a denoiser drafts a block in one pass, each token drawn by itself",
            "Cheng et al. 2025, arXiv 2512.15176",
            needs=frozenset({"denoiser"}),
            options=(num_tokens(32),),
        ),
        Method(
            "diffuspec",
            "drafter",
            _of_draft(denoising.diffuspec),
            "distribution",
            "a denoiser says what each place may hold, a search finds the words that go together",
            "Li et al. 2025, arXiv 2510.02358",
            needs=frozenset({"denoiser"}),
            options=(
                num_tokens(30, "tokens of the longest draft"),
                Option("least", int, 20, "tokens of the shortest draft"),
                Option("grow", int, 10, "tokens that it may grow by"),
                Option("rate", float, 0.5, "weight of the last round in what it goes by"),
                Option("mass", float, 0.8, "of the tokens that a place may hold"),
                Option("choices", int, 15, "tokens at most that a place may hold"),
                Option("beams", int, 3, "paths of the search"),
                Option("blend", float, 0.5, "weight of the denoiser beside a trigram model of the text"),
                Option("eos", numbers, None, "tokens that end a text; default: none"),
            ),
        ),
        Method(
            "failfast",
            "drafter",
            _of_draft(denoising.failfast),
            "distribution",
            "a denoiser drafts a chunk a pass, and another one as long as it is sure of all of the last",
            "Pan et al. 2025, arXiv 2512.20573",
            needs=frozenset({"denoiser"}),
            options=(
                Option("chunk", int, 8, "tokens of a pass"),
                num_tokens(64, "tokens of the longest draft"),
                Option("tau", float, 0.45, "probability that each token of a chunk must have for another one"),
            ),
        ),
        Method(
            "prompt_lookup",
            "drafter",
            _alone(drafters.prompt_lookup),
            "distribution",
            "copies what followed the last occurrence of the current n-gram",
            "Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding",
            options=(
                num_tokens(7),
                Option("max_ngram", int, 3, "tokens of the longest n-gram that is looked for"),
                Option("min_ngram", int, 2, "and of the shortest"),
                Option("mode", ("latest", "reference"), "latest", "which occurrence to copy from"),
            ),
        ),
        Method(
            "suffix",
            "drafter",
            _suffix,
            "distribution",
            "copies what followed the longest occurrence of the end of the text, in itself or in a corpus",
            "Hu et al. 2024, arXiv 2411.10666",
            takes=frozenset({"datastore"}),
            options=(
                num_tokens(15),
                Option("max_match", int, 16, "tokens of the longest match"),
                Option("min_match", int, None, "and of the shortest; default: 2, with a fallback 5"),
                Option("occurrence", ("latest", "earliest"), "latest", "which one in the text to copy from"),
                Option("fallback", inside, None, "what drafts where nothing matches, such as token_recycling"),
                Option("bias", int, 5, "tokens by which a match in the corpus must be longer than one in the text"),
            ),
            cpu_options=MappingProxyType({"num_tokens": 7}),
        ),
        Method(
            "input_guided",
            "drafter",
            _alone(drafters.input_guided),
            "distribution",
            "copies the text to be edited, or the prompt, from where the output stands in it",
            "Ge et al. 2022, arXiv 2205.10350",
            takes=frozenset({"source"}),
            options=(
                num_tokens(32),
                Option("max_ngram", int, 3, "tokens of the longest end of the output that is looked for"),
            ),
        ),
        Method(
            "token_recycling",
            "drafter",
            _of_vocabulary(drafters.token_recycling),
            "distribution",
            "a static tree filled from the target's recent runners-up",
            "Luo et al. 2024, arXiv 2408.08696",
            options=(
                num_nodes(80),
                PATHS,
                Option("read_prompt", yes_or_no, False, "learn from the target's outputs for the prompt"),
                Option("keep_chances", yes_or_no, False, "keep the runners-up's log-probabilities too"),
            ),
            cpu_options=MappingProxyType({"num_nodes": 7}),  # on 2 cores 8 tokens cost 1.7 passes over one, 81 cost 5
        ),
        Method(
            "jacobi",
            "drafter",
            _of_vocabulary(drafters.jacobi),
            "distribution",
            "the target's last pass over a window is the draft of its next one",
            "Teng et al. 2025, arXiv 2410.01699",
            options=(
                Option("window", int, 15, "drafted tokens per round"),
                Option("initial", ("random", "repeat", "sample"), "random", "what the end of the window starts with"),
                Option("ids", two_numbers, None, "first and end of the ids that random tokens come from; default: all"),
                Option("stride", int, 1, "how far back the token is that `repeat` copies"),
            ),
        ),
        Method(
            "lookahead",
            "drafter",
            _alone(drafters.lookahead),
            "distribution",
            "n-grams from Jacobi iterations on a window of guesses",
            "Fu et al. 2024, arXiv 2402.02057",
            options=(
                Option("ngram", int, 5, "tokens of an n-gram"),
                Option("window", int, 7, "columns of guesses"),
                Option("guesses", int, 7, "candidates per pass"),
                Option("seed_pool", yes_or_no, True, "take n-grams from the text too"),
                buckets(4096),
            ),
            cpu_options=MappingProxyType({"ngram": 4, "window": 3, "guesses": 2}),
        ),
        Method(
            "aded",
            "drafter",
            _aded,
            "distribution",
            "a tree searched in a tri-gram table that adapts to the text",
            "Liu et al. 2024, arXiv 2407.12021",
            takes=frozenset({"datastore"}),
            options=(
                num_nodes(63),
                Option("depth", int, 4, "levels of the tree"),
                Option("search", ("best_first", "mcts"), "best_first", "how the tree is found"),
                Option("iterations", int, 32, "of mcts"),
                Option("reward", ("mean", "sum", "constant"), "mean", "of mcts"),
                buckets(4096),
            ),
            cpu_options=MappingProxyType({"num_nodes": 7}),
        ),
        Method(
            "stand",
            "drafter",
            _of_vocabulary(drafters.stand),
            "distribution",
            "a tree drawn from a table of the target's distributions after the last 4, 3 or 2 tokens",
            "Song et al. 2025, arXiv 2506.04708",
            options=(
                num_nodes(32),
                PATHS,
                Option("draw", ("sampled", "likeliest"), "sampled", "which tokens of an entry are drafted"),
                Option(
                    "verify",
                    ("sample_and_match", "recursive_rejection"),
                    "sample_and_match",
                    "the rule that judges the draft",
                ),
                Option("read_prompt", yes_or_no, True, "learn from the target's outputs for the prompt"),
                buckets(8192),
            ),
            cpu_options=MappingProxyType({"num_nodes": 7}),
        ),
        Method(
            "rest",
            "drafter",
            _rest,
            "distribution",
            "a tree of what most often followed the current words in a corpus",
            "He et al. 2024, arXiv 2311.08252",
            needs=frozenset({"datastore"}),
            options=(
                num_nodes(64),
                Option("depth", int, 10, "levels of the tree"),
                Option("max_span", int, 16, "tokens of the longest match"),
                Option("min_span", int, 2, "and of the shortest"),
                Option("num_paths", int, 64, "continuations that are read"),
            ),
            cpu_options=MappingProxyType({"num_nodes": 7}),
        ),
        Method(
            "early_exit",
            "drafter",
            _of_target(drafters.early_exit),
            "distribution",
            "the target's own first layers draft a chain",
            "Elhoushi et al. 2024, arXiv 2404.16710",
            options=(EXIT_LAYER, num_tokens(6), TREE, STOP),
            draft_cost=0.25,
        ),
        Method(
            "swift",
            "drafter",
            _of_target(drafters.swift),
            "distribution",
            "the target drafts with sublayers skipped, and searches for the best ones to skip",
            "Xia et al. 2024, arXiv 2410.06916",
            options=(
                num_tokens(25),
                TREE,
                Option("ratio", float, 0.45, "share of sublayers to skip"),
                Option("layers", numbers, None, "those that may be skipped; default: all but the first and last"),
                Option("stop", float, 0.8, "the draft ends behind a token less sure than this"),
                Option("window", int, 32, "tokens that a set of sublayers is scored on"),
                Option("enough", float, 0.95, "score at which the search ends"),
                Option("patience", int, 300, "rounds without a better set after which it ends"),
                Option("max_trials", int, 1000, "rounds after which it ends"),
            ),
            draft_cost=0.55,
        ),
        Method(
            "thinned",
            "drafter",
            _thinned,
            "distribution",
            "the target drafts with the layers that a method of adaptive depth chooses",
            "our combination; papers: the methods of a target that does less",
            options=(
                Option("depth", depth_spec, "calm", "what chooses them, such as skip_decode:speedup=2"),
                num_tokens(4),
                TREE,
                STOP,
            ),
            draft_cost=0.6,
        ),
        Method(
            "dynamic_exit",
            "drafter",
            _of_target(drafters.dynamic_exit),
            "distribution",
            "the target's own first layers draft; how many of them, and how far, is chosen each round",
            "Zarch et al. 2025, arXiv 2504.05598",
            options=(
                num_tokens(18, "drafted tokens per round at most"),
                Option("exits", numbers, None, "numbers of layers to choose from"),
                Option("decay", float, 0.95, "how much of what was counted is kept each round"),
            ),
            draft_cost=0.25,
        ),
        Method(
            "superposed",
            "drafter",
            _of_target(drafters.superposed),
            "distribution",
            "the target's own first layers draft several chains at once, from a mixture of their tokens",
            "Shen et al. 2024, arXiv 2405.18400",
            options=(
                EXIT_LAYER,
                num_tokens(6, "tokens of a chain"),
                Option("drafts", int, 3, "chains"),
                Option("candidates", int, 9, "likeliest tokens that chains choose from"),
                Option("temperature", float, 0.06, "of the mixture's distribution"),
            ),
            draft_cost=0.25,
        ),
        Method(
            "choice",
            "drafter",
            _choice,
            "distribution",
            "a bandit picks prompt lookup or token recycling, their depth, or plain decoding, by what each paid",
            "Auer et al. 2002; Garivier, Moulines 2008, arXiv 0805.3415",
            takes=frozenset({"costs", "datastore"}),
            options=(
                Option("several", several_inside, "prompt_lookup+token_recycling", "what to pick from, joined by +"),
                num_nodes(7),
                Option("depths", numbers, (3, 7), "depths to pick from"),
            ),
        ),
    )
}
