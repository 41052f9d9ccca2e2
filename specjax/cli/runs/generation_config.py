"""The defaults of sampling that a model's folder recommends (generation_config.json)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, TypeVar

from specjax.cli.options.groups import SamplingOptions
from specjax.errors import require
from specjax.files.untrusted import quote, read_json_object
from specjax.models.loading import resolve

FILE = "generation_config.json"
RANGES = {"temperature": (0.0, 100.0), "top_p": (1e-9, 1.0), "top_k": (0, (1 << 31) - 1), "min_p": (0.0, 1.0)}
"""The fields that are read, with their smallest and largest values. Those of eos belong to the tokenizer."""

Options = TypeVar("Options", bound=SamplingOptions)


def with_recommended(sampling: Options, source: str | Path | None, default_temperature: float) -> Options:
    """Return the flags of sampling with the values of the file in place of None.

    Args:
      source: the model. Only folders have the file. default_temperature: without a flag and a value of the file.

    Raises: UsageError for a value outside its range.
    """
    missing = {name: value for name, value in _read(source).items() if getattr(sampling, name) is None}
    if sampling.temperature is None:
        missing.setdefault("temperature", default_temperature)
    return dataclasses.replace(sampling, **missing)


def _read(source: str | Path | None) -> dict[str, Any]:
    folder = None if source is None else resolve(source)
    if folder is None or not folder.is_dir():
        return {}
    contents, values = read_json_object(folder / FILE) or {}, {}
    for name, (low, high) in RANGES.items():
        value = contents.get(name)
        if value is None or (name == "top_k" and value == 0):  # 0 is off
            continue
        is_number = type(value) is int or (type(value) is float and name != "top_k")
        require(
            is_number and low <= value <= high,
            f"{folder / FILE} has {name} {quote(value)}, not a number from {low} to {high}; correct it, or start "
            "with --generation-config none",
        )
        values[name] = value
    return values
