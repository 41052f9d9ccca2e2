"""Description of a model from its config and the tables of its tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from specjax.catalog.schemes import check_scheme
from specjax.errors import UsageError
from specjax.files.untrusted import guarded_read
from specjax.models import abstract_params, loading, make_model
from specjax.models.hybrid.memory import HybridCache
from specjax.models.layout import REPLICATED
from specjax.models.loading.formats import llama2c
from specjax.models.storage import num_bytes, quantized_config, storage_options
from specjax.models.storage.format_names import describe_formats
from specjax.models.vision.config import VisionLanguageConfig
from specjax.planning.abstract import cache_shapes
from specjax.planning.description.layers import LayerPattern, active_parameters, layers_of, sizes_of
from specjax.planning.description.module import (
    ModuleDescription,
    count_stated,
    describe_module,
    describe_stated,
)
from specjax.planning.inputs import model_configs
from specjax.planning.inputs.native_heads import native_of
from specjax.planning.traffic import bytes_per_token, fixed_bytes, pending_bytes
from specjax.types import Target


@dataclass(frozen=True)
class RowMemory:
    """Bytes that one text needs beside the weights."""

    states: int  # of recurrent layers, for a text of any length
    windows: int  # last inputs of convolutions, for a text of any length
    per_token: float  # keys and values of attention layers
    per_node: float  # a drafted token, from its pass to its commit

    @property
    def per_row(self) -> int:
        """Return the bytes of a text of any length."""
        return self.states + self.windows

    def total(self, tokens: int) -> float:
        """Return the bytes of a text of so many tokens."""
        return self.per_row + self.per_token * tokens


@dataclass(frozen=True)
class ImageReading:
    """The tower of a model that reads images, with its connector. Passes over tokens do not read them."""

    parameters: int
    bytes: int
    layers: int
    tile: int | None  # side of a tile in pixels; None: images of any size
    vectors: int | None  # of a tile; None: as many as blocks
    block: int | None  # side in pixels of the block that becomes a vector; None: tiles of one size


@dataclass(frozen=True)
class ModelDescription:
    """Sizes, layers and memory of a model, and its multi-token-prediction module."""

    name: str
    kind: str  # "autoregressive" or "diffusion"
    parameters: int
    active_parameters: int  # that the pass of one token reads: all, or fewer in a mixture of experts
    weights_bytes: int
    dtype: str
    formats: str | None  # of quantised matrices, in words
    vocab_size: int
    width: int
    mlp_width: int
    max_positions: int
    layers: LayerPattern
    sizes: dict[str, dict[str, Any]]  # of each mixer
    memory: RowMemory
    module: ModuleDescription | None  # None: there is none
    images: ImageReading | None = None  # None: the model reads text only


def describe_model(
    source: str | Path, *, dtype: str = "float32", quantize: str | None = None, keep_quantized: bool | None = None
) -> ModelDescription:
    """Describe a model without reading its weights.

    Args:
      source: a built-in config such as "qwen3_5_4b", or a model as in `specjax.load`. A folder needs no weights. Of a
        hub id, only configs and tables of tensors are downloaded, unless its weights are quantised.
      dtype, quantize, keep_quantized: as in `specjax.load`; the bytes are those on this device's platform.

    Returns: the kinds of its layers, bytes per text and per token, and the module for multi-token prediction.

    Raises: UsageError, in one sentence, for a source that is no model or cannot be read.
    """
    check_scheme(quantize)
    platform = jax.default_backend()
    with open_source(source) as path:
        keep = platform != "cpu" if keep_quantized is None and path is not None else keep_quantized
        config = _config(source, path, dtype, platform, keep)
        if quantize is not None:
            config = quantized_config(config, quantize, platform)
        return _describe(config, source, path)


@contextlib.contextmanager
def open_source(source: str | Path) -> Iterator[Path | None]:
    """Yield the file or folder of a source, of a hub id without weights; None for a built-in config."""
    if isinstance(source, str) and model_configs.is_builtin(source):
        yield None
        return
    with contextlib.ExitStack() as stack:
        try:
            path = stack.enter_context(loading.open_tables(source))
        except UsageError as error:
            names = ", ".join(model_configs.builtin_configs())
            raise UsageError(f"{error}; built-in configs are {names}") from None
        yield path


def _config(source: str | Path, path: Path | None, dtype: str, platform: str, keep_quantized: bool | None) -> Any:
    if path is not None and path.suffix == ".bin" and path.is_file():
        with guarded_read(path):
            return llama2c.read(path, dtype=dtype, name=path.stem, **storage_options(platform)).config
    return model_configs.load_config(path or source, dtype, "source", platform, keep_quantized)


def _describe(config: Any, source: str | Path, path: Path | None) -> ModelDescription:
    target, total = Target(make_model(config), abstract_params(config)), model_configs.num_params(config)
    return ModelDescription(
        name=config.name,
        kind="diffusion" if _is_diffusion(source, path) else "autoregressive",
        parameters=total,
        active_parameters=active_parameters(config, total),
        weights_bytes=num_bytes(target.params),
        dtype=config.dtype,
        formats=describe_formats(config),
        vocab_size=config.vocab_size,
        width=config.width,
        mlp_width=config.mlp_width,
        max_positions=config.max_positions,
        layers=layers_of(config),
        sizes=sizes_of(config),
        memory=_memory(target),
        module=_module(target, source, path),
        images=_images(target) if isinstance(config, VisionLanguageConfig) else None,
    )


def _images(target: Target) -> ImageReading:
    config, parts = target.model.config, [target.params[name] for name in REPLICATED]
    tower, any_size = config.tower, config.tower.merge > 0
    return ImageReading(
        parameters=sum(leaf.size for leaf in jax.tree.leaves(parts)),
        bytes=num_bytes(parts),
        layers=tower.num_layers,
        tile=None if any_size else tower.image_size,
        vectors=None if any_size else config.vectors_per_tile,
        block=tower.merge * tower.patch_size if any_size else None,
    )


def _is_diffusion(source: str | Path, path: Path | None) -> bool:
    if path is None:
        return model_configs.load_denoiser_settings(source) is not None
    return loading.is_diffusion(path)


def _memory(target: Target) -> RowMemory:
    cache = cache_shapes(target, 1, 1024)
    entries = cache.recurrent if isinstance(cache, HybridCache) else ()
    windows = sum(num_bytes(entry.window) for entry in entries)
    return RowMemory(
        states=fixed_bytes(target, 1, cache) - windows,
        windows=windows,
        per_token=bytes_per_token(target, 1, cache),
        per_node=pending_bytes(target, 1),
    )


def _module(target: Target, source: str | Path, path: Path | None) -> ModuleDescription | None:
    config = target.model.config
    if path is None:
        dialect = model_configs.module_form(str(source))
        return None if dialect is None else describe_stated(config, dialect)
    with guarded_read(path):
        native = native_of(path, config.num_layers)
        if native is not None:
            return describe_module(Target(target.model, target.params, native))
        count = count_stated(path) if path.is_dir() else 0
    return ModuleDescription(None, None, count, False, "the folder has no tensors of it") if count else None
