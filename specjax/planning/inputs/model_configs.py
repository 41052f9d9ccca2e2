"""Configs of models, without their weights."""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from specjax import configs
from specjax.errors import UsageError, require
from specjax.files.untrusted import SENTENCE, guarded_read, shorten
from specjax.models import abstract_params, loading, storage_options
from specjax.models.heads.kinds import abstract_head
from specjax.models.loading.families import denoisers
from specjax.models.loading.families.config_fields import ConfigFields
from specjax.models.loading.families.denoisers import DenoiserSettings
from specjax.models.loading.families.unread_fields import warn_of_unread
from specjax.models.loading.formats import ctranslate2, gguf, hf
from specjax.models.loading.quantized import is_quantized_folder
from specjax.models.loading.tensors.assembly import Checkpoint, check_tensors
from specjax.models.loading.tensors.file_formats import with_file_formats
from specjax.models.seq2seq.config import Seq2SeqConfig
from specjax.models.storage import stored_format, with_quantized
from specjax.numerics.quantized_array import QuantizedArray


def is_builtin(source: str | Path) -> bool:
    """Return True if a source is the name of a built-in config, and no file or folder has this name."""
    return _name(source) in _modules() and not os.path.exists(os.path.expanduser(source))


def builtin_configs() -> dict[str, Callable[..., Any]]:
    """Return `get_config` of every file of configs/, by name."""
    return {name: module.get_config for name, module in _modules().items()}


def _modules() -> dict[str, Any]:
    names = sorted(module.name for module in pkgutil.iter_modules(configs.__path__))
    return {name: importlib.import_module(f"specjax.configs.{name}") for name in names}


def hub_id(name: str) -> str:
    """Return the Hugging Face hub id of a built-in config. Raises: UsageError for another name."""
    modules = _modules()
    if _name(name) not in modules:
        raise UsageError(f'"{name}" is not a built-in config; choose one of {", ".join(modules)}')
    return modules[_name(name)].HUB_ID


def module_form(name: str) -> str | None:
    """Return the form of the multi-token-prediction module in the release of a built-in config; None: it has none."""
    return getattr(_modules()[_name(name)], "MODULE", None)


def _name(source: str | Path) -> str:
    """Return the name that a file of configs/ would have."""
    return str(source).replace("-", "_").replace(".", "_").lower()


def load_config(
    source: str | Path, dtype: str, flag: str = "--target", platform: str = "tpu", keep_quantized: bool | None = None
) -> Any:
    """Load the config of a built-in name, a Hugging Face folder or a GGUF file. No weights are read.

    Args:
      platform: "tpu" or "gpu", for the layout of the weights and the cache.
      keep_quantized: True to keep the matrices of quantised files in their formats; False: they are expanded. A
        built-in config has the formats of its published files for True only. None: True for files.

    Warns: CheckpointWarning that names the fields of a file that are not read and can change the results.

    Raises: UsageError that names `flag`, for anything else.
    """
    if dtype not in ("float32", "bfloat16"):
        raise UsageError(f'--dtype must be float32 or bfloat16, not "{dtype}"')
    configs_by_name = builtin_configs()
    name = _name(source)
    path = Path(os.path.expanduser(source))
    is_file, is_folder = os.path.isfile(path), os.path.isdir(path)  # False for invalid names, where pathlib may raise
    if is_builtin(source):
        config = dataclasses.replace(configs_by_name[name](), dtype=dtype, **storage_options(platform))
        return _as_published(config, name, flag, platform) if keep_quantized else config
    options = {"dtype": dtype, **storage_options(platform), "name": path.resolve().name if is_folder else path.stem}
    try:
        with guarded_read(path):
            if is_folder and (path / "config.json").is_file():
                return _from_folder(path, options, platform, keep_quantized is not False)
            if is_file and path.suffix == ".gguf":
                return _with_formats(gguf.read(path, **options)[0], platform, keep_quantized is not False)
    except UsageError as error:
        raise UsageError(f"{flag}: {error}") from None
    raise UsageError(
        f'{flag}: "{shorten(str(source), SENTENCE // 2)}" is not a built-in config, a folder with a config.json or '
        f"a .gguf file; built-in configs are {', '.join(configs_by_name)}"
    )


def _as_published(config: Any, name: str, flag: str, platform: str) -> Any:
    """Return a built-in config with the formats of its files. Raises: UsageError if these have floats."""
    formats = getattr(_modules()[name], "FILE_FORMATS", None)
    if formats is None:
        raise UsageError(
            f"{flag}: the published files of {config.name} have no quantised weights; leave --keep-quantized out"
        )
    stored = tuple((pattern, stored_format(form, platform)) for pattern, form in formats)
    return with_quantized(config, stored, platform)


def load_denoiser_settings(source: str | Path, flag: str = "--target") -> DenoiserSettings | None:
    """Return the denoiser settings of a source that `load_config` accepts, or None for an autoregressive model.

    Raises: UsageError that names `flag`, for a folder without these settings.
    """
    folder = os.path.expanduser(source)
    if not os.path.exists(folder):
        module = _modules().get(_name(source))
        return (
            None if module is None or not hasattr(module, "get_denoiser_settings") else module.get_denoiser_settings()
        )
    try:
        return loading.load_denoiser_settings(folder) if os.path.isdir(folder) else None
    except UsageError as error:
        raise UsageError(f"{flag}: {error}") from None


_NO_ENCODERS = "plans and descriptions of the encoder-decoder {} do not exist yet; choose a decoder-only model"


def _from_folder(folder: Path, options: dict, platform: str, keep_quantized: bool) -> Any:
    """Return the config of a folder. Quantised folders need their tensors, which decide what is quantised."""
    record = hf.read_config(folder)
    if ctranslate2.is_folder(folder):
        raise UsageError(_NO_ENCODERS.format(folder.resolve().name))
    if is_quantized_folder(record, folder):
        config = _quantized_config(folder, record, options, platform, keep_quantized)
    else:
        config = hf.parse_config(record, **options)[0]
    require(
        not isinstance(config, Seq2SeqConfig),
        _NO_ENCODERS.format(config.name),
    )
    denoisers.skip_denoiser_settings(record)
    warn_of_unread(record, stacklevel=4)
    return config


def _quantized_config(folder: Path, record: ConfigFields, options: dict, platform: str, keep_quantized: bool) -> Any:
    """Return the config of a quantised folder, with the formats of its tensors or without formats."""
    if not any(folder.glob(f"*{hf.SAFETENSORS_SUFFIX}")):
        raise UsageError(
            f"{record.where} describes quantised weights, and the folder has no *.safetensors file, whose tensors "
            "decide which matrices are quantised; add the files, or give the original model and --quantize"
        )
    return _with_formats(hf.read(folder, record, **options), platform, keep_quantized)


def _with_formats(checkpoint: Checkpoint, platform: str, keep_quantized: bool) -> Any:
    """Return the config of a checkpoint, with the formats of its tensors or without formats."""
    check_tensors(checkpoint)
    return with_file_formats(checkpoint, platform) if keep_quantized else checkpoint.config


def num_params(config: Any) -> int:
    """Count the parameters of a model."""
    return _count(abstract_params(config))


def num_params_of_head(kind: str, config: Any) -> int:
    """Count the parameters of a draft head, including the map of its vocabulary."""
    return _count(abstract_head(kind, config).params)


def _count(params: Any) -> int:
    is_matrix = lambda leaf: isinstance(leaf, QuantizedArray)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params, is_leaf=is_matrix))
