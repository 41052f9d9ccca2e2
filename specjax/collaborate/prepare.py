"""Preparation of a text job from models, prompts and settings. All checks run before anything compiles."""

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
from specjax.models.requirements import check_complete_cache, check_rewinds
from specjax.numerics.validation import check_range
from specjax.trees.autoregressive import autoregressive
from specjax.types import Array, Drafter, Target


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TextJob:
    """The writers and the prompts that they continue. It is a pytree, the argument of a method's program."""

    writers: Writers
    tokens: Array  # int32[B, L], with room after the text for every pass
    lengths: Array  # int32[B]
    keys: Array  # key[B]
    stop: Array  # int32[B]

    def begin(self) -> TextState:
        """Return the text of the prompts after all writers have prefilled them."""
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
    method: str = "this method",
    readers: Sequence[Target] = (),
) -> TextJob:
    """Return the job of several models on the same prompts, with the checks that `decode` makes for each.

    Args:
      drafters: one per model; None means token by token.
      spare: tokens that a pass may read past the text, in addition to those that drafters need.
      keep: the outputs that passes record.
      rewinds: whether the method rewinds tokens.
      method: its name, for errors.
      readers: models that read the text and write nothing, such as reward models. They are the last writers.

    Raises: UsageError for models of different vocabularies, a model that cannot rewind as required, or arguments that
      `decode` rejects.
    """
    settings = Settings() if settings is None else settings
    if settings.logprobs or settings.debug:
        raise UsageError("only decode records logprobs and debug information; leave them out")
    sizes = [target.model.vocab_size for target in models]
    if len(set(sizes)) > 1:
        raise UsageError(
            f"the models have vocabularies of {', '.join(map(str, sizes))} tokens; models that write one text need the "
            "same, so choose models of one tokenizer"
        )
    all_drafters = [drafter or autoregressive() for drafter in (*drafters, *[None] * (len(models) - len(drafters)))]
    jobs = [
        prepare(target, drafter, prompts, settings, key=key, max_new_tokens=max_new_tokens)
        for target, drafter in zip(models, all_drafters, strict=True)
    ]
    jobs += [
        prepare(target, autoregressive(), prompts, Settings(capacity=settings.capacity), key=key,
            max_new_tokens=max_new_tokens)
        for target in readers
    ]  # fmt: skip
    models, all_drafters = [*models, *readers], all_drafters + [autoregressive()] * len(readers)
    for target, drafter in zip(models, all_drafters, strict=True):
        check_complete_cache(target.model, method)
        if rewinds or drafter.num_nodes > 1:
            check_rewinds(target.model, method if rewinds else f"a draft in {method}")
    capacity = settings.capacity or min(target.model.max_positions for target in models)
    # Leave room after the text for every kind of pass: near its end, a cache silently writes to other slots.
    room = max(CHUNK, spare + 1, *(drafter.num_nodes for drafter in all_drafters))
    tokens, lengths = pack(prompts, max_new_tokens, room, capacity, sizes[0])
    writers = tuple(replace(job.parts, keep=keep or Keep()) for job in jobs)
    return TextJob(writers, tokens, lengths, jobs[0].keys, lengths + max_new_tokens)


def number(name: str, value: float, holds: bool, requirement: str) -> None:
    """Raise UsageError unless the condition `holds`; NaN always fails."""
    if value != value or not holds:
        raise UsageError(f"{name} must be {requirement}, not {value}")


def whole(name: str, value: int, minimum: int, requirement: str = "") -> None:
    """Raise UsageError unless the value is a whole number of at least `minimum` that fits 32 bits."""
    number(name, value, value >= minimum, requirement or f"at least {minimum}")
    number(name, value, hasattr(value, "__index__") and value < 1 << 31, "a whole number below 2^31")


def refuse(settings: Mapping[str, Any], names: Sequence[str], why: str) -> None:
    """Raise UsageError for the first of these settings that is present; `why` describes its effect."""
    for name in names:
        value = settings.get(name)
        if not (value is None or (isinstance(value, Sequence) and not value)):
            raise UsageError(f"{name} {why}; leave it out")


def above_zero(temperature: float | Array, why: str) -> None:
    """Raise UsageError for a temperature of 0 or below, in any row; `why` is the reason. Traced values pass."""
    try:
        check_range("temperature", temperature, lambda x: x > 0, "above 0")
    except UsageError as error:
        raise UsageError(f"{error}: {why}") from None


def check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raise UsageError for a token outside the models' vocabulary."""
    for token in ids:
        if not 0 <= token < vocab_size:
            raise UsageError(
                f"{name} has the token {token}, outside of the models' vocabulary of {vocab_size}; was it encoded with "
                "another tokenizer?"
            )
