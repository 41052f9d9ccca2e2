"""From models, prompts and settings to a text that they write: what can be wrong is found before anything compiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from specjax.collaborate import multi_writer as texts
from specjax.collaborate.multi_writer import CHUNK, TextState, Writers
from specjax.engine.job import Keep
from specjax.engine.packing import Prompts, pack
from specjax.engine.prepare import Settings, prepare
from specjax.errors import UsageError
from specjax.trees.autoregressive import autoregressive
from specjax.types import Array, Drafter, Target


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TextJob:
    """Writers, and the prompts that they go on from. A pytree: the argument of a method's program."""

    writers: Writers
    tokens: Array  # int32[B, L], with room behind the text for every pass
    lengths: Array  # int32[B]
    keys: Array  # key[B]
    stop: Array  # int32[B]

    def begin(self) -> TextState:
        """The prompts, read by all."""
        return texts.begin(self.writers, self.tokens, self.lengths, self.keys, self.stop)


def prepare_texts(
    models: Sequence[Target],
    prompts: Prompts,
    *,
    key: Array | int,
    max_new_tokens: int,
    drafters: Sequence[Drafter | None] = (),
    settings: Settings | None = None,
    spare: int = 0,
    keep: Keep | None = None,
    rewinds: bool = True,
) -> TextJob:
    """The job of several models on the same prompts, each checked as `decode` checks it.

    Args:
      drafters: one per model, None: it writes token by token. spare: tokens that a pass may read behind the text,
        besides what drafters need. keep: what passes note. rewinds: whether the method takes tokens back.

    Raises: UsageError for models of different vocabularies, one that cannot take back what it must, or what `decode`
      refuses.
    """
    settings = Settings() if settings is None else settings
    if settings.logprobs or settings.debug:
        raise UsageError("logprobs and debug are noted by decode alone; leave them out")
    sizes = [target.model.vocab_size for target in models]
    if len(set(sizes)) > 1:
        raise UsageError(
            f"the models have vocabularies of {', '.join(map(str, sizes))} tokens; models that write one text need the "
            "same, so choose models of one tokenizer"
        )
    chosen = [drafter or autoregressive() for drafter in (*drafters, *[None] * (len(models) - len(drafters)))]
    jobs = [
        prepare(target, drafter, prompts, settings, key=key, max_new_tokens=max_new_tokens)
        for target, drafter in zip(models, chosen, strict=True)
    ]
    for target, drafter in zip(models, chosen, strict=True):
        if target.model.rewind is None and (rewinds or drafter.num_nodes > 1):
            raise UsageError(
                f"the model {target.model.name} cannot take tokens back, which this method needs of every model; "
                "choose one with a cache of keys and values"
            )
    capacity = settings.capacity or min(target.model.max_positions for target in models)
    # Behind the text every kind of pass has room: a cache silently writes elsewhere near its end.
    room = max(CHUNK, spare + 1, *(drafter.num_nodes for drafter in chosen))
    tokens, lengths = pack(prompts, max_new_tokens, room, capacity, sizes[0])
    writers = tuple(replace(job.parts, keep=keep or Keep()) for job in jobs)
    return TextJob(writers, tokens, lengths, jobs[0].keys, lengths + max_new_tokens)


def number(name: str, value: float, holds: bool, wanted: str) -> None:
    """Raises: UsageError unless it holds; NaN never may."""
    if value != value or not holds:
        raise UsageError(f"{name} must be {wanted}, not {value}")


def whole(name: str, value: int, least: int, wanted: str = "") -> None:
    """Raises: UsageError unless it is a whole number from `least` on that fits 32 bits."""
    number(name, value, value >= least, wanted or f"at least {least}")
    number(name, value, hasattr(value, "__index__") and value < 1 << 31, "a whole number below 2^31")


def refuse(settings: Mapping[str, Any], names: Sequence[str], why: str) -> None:
    """Raises: UsageError for the first of these settings that was given; `why` says what it would do."""
    for name in names:
        value = settings.get(name)
        if not (value is None or (isinstance(value, Sequence) and not value)):
            raise UsageError(f"{name} {why}; leave it out")


def check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raises: UsageError for a token that the models do not have."""
    for token in ids:
        if not 0 <= token < vocab_size:
            raise UsageError(
                f"{name} has the token {token}, outside of the models' vocabulary of {vocab_size}; was it encoded with "
                "another tokenizer?"
            )
