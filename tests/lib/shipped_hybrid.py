"""The tiny trained model in the form of Qwen3.5 with its own module, `tests/data/hybrid`, and texts to continue."""

from __future__ import annotations

import functools
from pathlib import Path

import specjax
from specjax.models.heads.contract import DraftHead
from specjax.models.loading.heads import load_head
from specjax.types import Target

FOLDER = Path(__file__).parents[1] / "data" / "hybrid"
TEXTS = (
    "Eva has 3 red apples in the kitchen. Finn gives Eva 2 more red apples.",
    "Ben",
    " ".join(
        f"Hana has {count} green marbles in the forest. They look at the {count} green marbles in the forest."
        for count in (7, 5, 3, 8, 2, 6, 4, 7, 5)
    ),
)
"""The third is longer than the rows on which the module was trained."""

NEW = 48  # tokens that are decoded after each of them


@functools.cache
def shipped_hybrid() -> Target:
    return specjax.load(FOLDER)[0]


@functools.cache
def shipped_module() -> DraftHead:
    return load_head("native", shipped_hybrid())


@functools.cache
def prompts() -> list[list[int]]:
    """Return the ids of TEXTS, of unequal lengths. The second is one token."""
    tokenizer = specjax.load(FOLDER)[1]
    return [tokenizer.encode(text) for text in TEXTS]


@functools.cache
def plain() -> list[list[int]]:
    """Return the greedy continuations of `prompts` by plain decoding."""
    return specjax.decode(shipped_hybrid(), "autoregressive", prompts(), key=0, max_new_tokens=NEW).to_lists()
