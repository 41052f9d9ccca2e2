"""Configs of models, without their weights."""

from __future__ import annotations

import dataclasses
import importlib
import math
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from specjax import configs
from specjax.errors import UsageError
from specjax.models import abstract_params, lanes_of
from specjax.models.heads.kinds import abstract_head
from specjax.models.loading import gguf, hf
from specjax.reading import reading


def builtin_configs() -> dict[str, Callable[..., Any]]:
    """`get_config` of every file of configs/, by name."""
    names = sorted(module.name for module in pkgutil.iter_modules(configs.__path__))
    return {name: importlib.import_module(f"specjax.configs.{name}").get_config for name in names}


ON_TPU = {"stacked": True, "cache_lanes": lanes_of("tpu")}
"""How `specjax.load` lays out a model there."""


def load_config(source: str | Path, dtype: str, flag: str = "--target") -> Any:
    """The config of a built-in name, a Hugging Face folder or a GGUF file; no weights are read.

    Raises: UsageError for anything else, naming `flag`.
    """
    if dtype not in ("float32", "bfloat16"):
        raise UsageError(f'--dtype must be float32 or bfloat16, not "{dtype}"')
    known = builtin_configs()
    name = str(source).replace("-", "_").replace(".", "_").lower()
    path = Path(source).expanduser()
    if name in known and not path.exists():
        return dataclasses.replace(known[name](), dtype=dtype, **ON_TPU)
    options = {"dtype": dtype, **ON_TPU, "name": path.stem if path.is_file() else path.resolve().name}
    try:
        with reading(path):
            if path.is_dir() and (path / "config.json").is_file():
                return _from_folder(path, options)
            if path.is_file() and path.suffix == ".gguf":
                return gguf.read(path, **options)[0].config
    except UsageError as error:
        raise UsageError(f"{flag}: {error}") from None
    raise UsageError(
        f'{flag}: "{source}" is no built-in config, folder with a config.json or .gguf file; built in are '
        f"{', '.join(known)}"
    )


def _from_folder(folder: Path, options: dict) -> Any:
    where = str(folder / "config.json")
    fields = hf.read_json(folder / "config.json") or {}
    if fields.get("quantization_config"):
        raise UsageError(f"{where} says the weights are quantised, which specjax does not run; give the original")
    return hf.parse_config(fields, where, **options)[0]


def num_params(config: Any) -> int:
    """Parameters of a model."""
    return _count(abstract_params(config))


def num_params_of_head(kind: str, config: Any) -> int:
    """Parameters of a learned head, and the map of its vocabulary."""
    return _count(abstract_head(kind, config).params)


def _count(params: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
