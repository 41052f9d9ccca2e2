"""Sentences with inserted errors: letters that are swapped, left out or doubled, and wrong or missing articles."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

ARTICLES = "a", "an", "the"


class Correction(NamedTuple):
    """A sentence with errors, and the sentence without them."""

    wrong: str
    right: str


def sentences(file: Path) -> list[str]:
    """Return the sentences of 5 to 18 words of a text file, each once, in order."""
    parts = re.split(r"(?<=[.!?])\s+", file.read_text(errors="ignore"))
    plain = [part for part in parts if re.fullmatch(r"[A-Z][A-Za-z ,.'!?]+[.!?]", part)]
    return [part for part in dict.fromkeys(plain) if 5 <= len(part.split()) <= 18]


def _misspelled(word: str, rng: np.random.Generator) -> str:
    """Return a word with one error in its letters."""
    at, kind = int(rng.integers(1, len(word) - 1)), rng.integers(3)
    if kind == 0:
        return word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    return word[:at] + word[at + 1 :] if kind == 1 else word[:at] + word[at] + word[at:]


def with_errors(sentence: str, rng: np.random.Generator, share: float = 0.12) -> Correction:
    """Return a sentence whose words have errors with this probability, and articles with twice of it."""
    changed = []
    for word in sentence.split():
        if word in ARTICLES and rng.random() < 2 * share:
            choice = rng.integers(3)
            changed += [] if choice == 0 else [str(rng.choice([x for x in ARTICLES if x != word]))]
        elif word.isalpha() and len(word) > 3 and rng.random() < share:
            changed.append(_misspelled(word, rng))
        else:
            changed.append(word)
    return Correction(" ".join(changed), sentence)
