"""Options that several methods have."""

from __future__ import annotations

from typing import Any

from specjax.catalog.options import Option

# Drafters.
SMOLLM2 = "SmolLM2-135M, greedy, 66 prompts of Spec-Bench"
"""The measurement of drafters without weights in docs/drafting.md."""
TREE = Option("tree", "tree", None, "tree to draft instead of a chain")
STOP = Option("stop", "stop", None, "condition that ends the draft early")
PATHS = Option("tree", "tree_shape", None, "static tree; default: the first num_nodes nodes of the built-in tree")
KEEP_LOGITS = Option("keep_logits", "yes_or_no", False, "keep the draft's logits in greedy and coupled decoding too")
EXIT_LAYER = Option("exit_layer", "int", None, "number of first layers that draft; default: a quarter of all")


def num_tokens(default: int, help: str = "drafted tokens per step") -> Option:
    """Return the option for the length of a chain."""
    return Option("num_tokens", "int", default, help)


def num_nodes(default: int) -> Option:
    """Return the option for the size of a tree."""
    return Option("num_nodes", "int", default, "drafted tokens per step")


def buckets(default: int) -> Option:
    """Return the option for the size of a hash table."""
    return Option("buckets", "int", default, "buckets of the hash table of each batch row")


def cached_selection(selection: str, budget: int, *others: str) -> tuple[Option, ...]:
    """Return the options of a selection of cached tokens, with these defaults. others: further selections."""
    return (
        Option("selection", ("sinks", "snapkv", "retrieval", *others), selection, "selection of cached tokens"),
        Option("budget", "int", budget, "cached tokens that a draft reads, besides those that are newer"),
        Option("sinks", "int", 4, "first tokens of the text that the selection sinks keeps"),
        Option("window", "int", 32, "last tokens whose attention decides, for the selection snapkv"),
        Option("chunk", "int", 8, "tokens per chunk, for the selection retrieval"),
        Option("refresh", "int", 256, "new tokens after which the tokens are selected again"),
        Option(
            "pays_from", "int", None, "tokens of the text from which a row drafts; default: from the bytes of a pass"
        ),
    )


# Draft heads.
HEAD: dict[str, Any] = {
    "kind": "drafter",
    "guarantee": "distribution",
    "needs": frozenset({"head"}),
    "module": "head_drafter",
    "factory": "head_drafter",
    "arguments": ("draft",),
}
"""The columns that the rows of draft heads share: one factory builds the drafters of all of them."""


KEEP_CONFIDENCE = Option("keep_confidence", "yes_or_no", False, "keep the head's trained confidence for a controller")
CANDIDATES = Option(
    "candidates", "int", None, "tokens that a low-rank layer selects for exact logits; default: the whole vocabulary"
)
CANDIDATE_RANK = Option("candidate_rank", "int", None, "rank of this layer; default: a quarter of the head's width")


def head_options(length: int | None = None, stop: str | None = None) -> tuple[Option, ...]:
    """Return the options of a draft head.

    Args:
      length: default number of drafted tokens per step; None: as many as the head drafts.
      stop: default stop condition, as `specjax.trees.stops.parse` reads it; None: the draft has its full length.
    """
    length_help = "drafted tokens per step" + ("; default: as many as the head drafts" if length is None else "")
    return (
        Option("num_tokens", "int", length, length_help),
        TREE,
        STOP._replace(default=stop),
        KEEP_LOGITS,
        KEEP_CONFIDENCE,
        CANDIDATES,
        CANDIDATE_RANK,
    )


# Methods of diffusion models.
BLOCK = Option("block", "int", 32, "columns per block, for models with full attention")
STEPS = Option("steps", "int", None, "passes per block; default: one per column")
EPS = Option("eps", "float", 1e-3, "last time of the time grid")
RANKING = Option(
    "by",
    (
        "confidence", "warped_confidence", "entropy", "warped_entropy", "margin", "warped_margin", "random",
        "left_to_right",
    ),
    "confidence",
    "score that ranks the columns",
)  # fmt: skip


def tau(default: float) -> Option:
    """Return the option for the confidence threshold of a column."""
    return Option("tau", "float", default, "confidence at which a column is decided")


# Methods of several models or samples.
WRITING_DRAFTER = Option(
    "drafter", "writing_drafter", None, "drafter of the target's own tokens, such as two_model or prompt_lookup"
)


def steps(default: str) -> Option:
    """Return the option for the texts that end a step, with the default in words."""
    return Option(
        "steps", "texts", None, f"texts that end a step, joined by |; \\n is a line break; default: {default}"
    )


def reward_words(name: str = "reward", what: str = "reward model") -> tuple[Option, ...]:
    """Return the options that name a reward model: the model, its head, the function of the score, and a suffix."""
    return (
        Option(name, "reward_model", None, f"{what}: a folder of a classifier with one or two labels"),
        Option(f"{name}_head", "judge_head_file", None, f"file of a trained head, for a {name} without its own"),
        Option(f"{name}_link", ("sigmoid", "exp", "identity"), "sigmoid", "function of the score"),
        Option(f"{name}_suffix", "text", None, "text that the model reads before it scores; \\n is a line break"),
    )


# Methods of adaptive depth.
EVERY = Option("every", "int", 4, "layers between two exit tests")
HORIZON = Option("horizon", "int", 128, "maximum number of new tokens; default: --max-new-tokens")
