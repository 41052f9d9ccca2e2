"""Tiny heads and four texts of a tiny target, to train on."""

from __future__ import annotations

import dataclasses
import functools

import heads
import jax
import numpy as np
import toy

import specjax
from specjax.models.heads.kinds import init_head
from specjax.training import TrainingSettings
from specjax.training.data.packing import TrainingText
from specjax.training.objectives.recipes import recipe_of

NEW, DEPTHS = 24, 3


@functools.cache
def target():
    return toy.tiny_llama(layers=3)


@functools.cache
def texts() -> tuple[TrainingText, ...]:
    """Four prompts, and what the target writes."""
    prompts = np.random.default_rng(0).integers(1, 60, (4, 6)).tolist()
    result = specjax.decode(target(), None, prompts, key=0, max_new_tokens=NEW)
    return tuple(
        TrainingText((*prompt, *text), len(prompt)) for prompt, text in zip(prompts, result.to_lists(), strict=True)
    )


def head_of(kind: str):
    config = heads.config_of(kind, target())
    if kind == "eagle3":  # of all tokens, so that every text can be learnt
        layer = dataclasses.replace(config.layer, vocab_size=config.vocab_size, num_layers=1)
        config = dataclasses.replace(config, layer=layer)
    return init_head(kind, config, jax.random.key(1))


def recipe(kind: str = "eagle3", **changes):
    plain = {"losses": (("ce", 1.0),), "decay": 1.0, "weighting": "decay", "confidence": 0.0, "features": 0.0}
    plain["optimizer"] = "adamw"  # with which what is this small is learnt by heart at the rate below
    return recipe_of(kind, **{"depths": DEPTHS, "learning_rate": 1e-2, **plain, **changes})


PROMPTS = ["ab", "the cat", "one two", "x y z", "hello", "why not"]
SETTINGS = TrainingSettings(
    held_out=2, max_new_tokens=8, rows=2, length=32, evaluate_every=2, epochs=2, num_draft_tokens=2
)


class LetterTokenizer:
    """Each letter is one token of the tiny target's 64."""

    eos = (1,)
    vocab = tuple(map(str, range(64)))

    def encode(self, text: str, special: bool = True) -> list[int]:
        return [2 + ord(letter) % 60 for letter in text]

    def chat(self, text) -> list[int]:
        messages = [{"content": text}] if isinstance(text, str) else text
        return [id for message in messages for id in self.encode(message["content"])]

    def decode(self, ids) -> str:
        return "".join(chr(97 + id % 26) for id in ids)
