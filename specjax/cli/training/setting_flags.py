"""Flags of `TrainingSettings`, and error messages that name flags instead of settings."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from specjax.errors import UsageError
from specjax.training.pipeline import TrainingSettings

FLAGS = {
    "generated_prompts": "--own-prompts", "evaluate_every": "--every", "cache_gib": "--keep-states",
    "draft_vocab_size": "--draft-vocab", "num_tokens": "--num-draft-tokens",
}  # fmt: skip
"""Flags whose names differ from those of settings."""


NAMES = {field.name for field in dataclasses.fields(TrainingSettings)} | {*FLAGS, "layers", "start", "draft", "depths"}


def to_flag(name: str) -> str:
    """Return the flag of a setting."""
    return FLAGS.get(name, f"--{name.replace('_', '-')}")


def read_settings(arguments: Mapping[str, Any], **changes: Any) -> TrainingSettings:
    """Return the settings of the flags. Raises: UsageError for numbers out of range."""
    names = [field.name for field in dataclasses.fields(TrainingSettings) if field.name not in changes]
    values = {name: arguments[to_flag(name).removeprefix("--").replace("-", "_")] for name in names}
    settings = TrainingSettings(**values, **changes)
    settings.check()
    return settings


def name_flags(message: str) -> str:
    """Replace names of settings in a message by flags."""
    message = re.sub(r"`(\w+)`", lambda match: to_flag(match[1]) if match[1] in NAMES else match[0], message)
    return re.sub(r"\b(\w+)=(?=\S)", lambda match: f"{to_flag(match[1])} " if match[1] in NAMES else match[0], message)


@contextlib.contextmanager
def in_flags() -> Iterator[None]:
    """Raise UsageErrors with the names of flags."""
    try:
        yield
    except UsageError as error:
        raise UsageError(name_flags(str(error))) from None
