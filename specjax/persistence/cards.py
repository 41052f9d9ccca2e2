"""Cards: a file beside a result, with the facts that are needed to repeat and to compare it."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from specjax.errors import UsageError
from specjax.models.loading.heads.target_fit import TARGET_QUANTIZED
from specjax.models.storage.format_names import describe_formats
from specjax.numerics.text_identity import text_identity
from specjax.types import Target
from specjax.version import __version__

CARD = "card.json"
"""File in the folder of a trained drafter, with the settings of its training."""


def describe_version() -> dict[str, str]:
    """Return the date and the version."""
    return {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "specjax": __version__}


def describe_machine() -> dict[str, Any]:
    """Return the facts about this machine that explain a measurement."""
    return {
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "backend": jax.default_backend(),
        "device_kind": jax.devices()[0].device_kind,
        "device_count": jax.device_count(),
        "hosts": jax.process_count(),
    }


def describe_target(target: Target, tokenizer: Any) -> dict[str, Any]:
    """Return the facts about a target that a drafter depends on."""
    config: Any = target.model.config
    return {
        "target": target.model.name,
        "dtype": getattr(config, "dtype", None),
        "cache_dtype": getattr(config, "cache_dtype", None),
        "same_bits": getattr(config, "same_bits", False),
        TARGET_QUANTIZED: describe_formats(config),
        "text_identity": text_identity(target),
        "template_args": template_args_of(tokenizer),
    }


def template_args_of(tokenizer: Any) -> dict[str, Any]:
    """Return the variables of the chat template that a tokenizer uses by default; {} for one without a template."""
    return dict(getattr(tokenizer, "template_args", {}))


def write_card(folder: str | Path, card: Mapping[str, Any]) -> None:
    """Write the card of a folder. Raises: UsageError if it cannot be written."""
    try:
        (Path(folder) / CARD).write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{folder} cannot be written ({error.strerror}); make room, and run it again") from error
