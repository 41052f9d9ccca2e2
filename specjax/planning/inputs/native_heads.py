"""Shapes of the multi-token-prediction module in the release or the files of a model, without its weights."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from specjax.catalog.defaults import can_draft_natively
from specjax.errors import UsageError
from specjax.models import abstract_params, make_model
from specjax.models.heads import mtp
from specjax.models.loading.formats import gguf, hf
from specjax.models.loading.heads import mtp as stored_mtp
from specjax.models.loading.heads.target_fit import target_spec
from specjax.models.loading.mtp_dialects import BY_NAME, NativeModule
from specjax.planning.inputs.model_configs import is_builtin, module_form
from specjax.types import Target


def native_head(source: str | Path | Any, config: Any) -> mtp.MtpConfig:
    """Return the shapes of the module of a target.

    Args:
      source: a built-in name, a folder or a GGUF file; a config has no module.
      config: the target's own config.

    Raises: UsageError that names --draft, for a target without a module or with one that cannot draft.
    """
    if not isinstance(source, str | Path):
        raise UsageError(f"--draft native: {config.name} is a config, which has no module; give the target by its name")
    try:
        head = _stated(source, config) if is_builtin(source) else _stored(Path(os.path.expanduser(source)), config)
    except UsageError as error:
        raise UsageError(f"--draft native: {error}") from None
    if head is None:
        raise UsageError(
            f"--draft native: {config.name} has no multi-token-prediction module; "
            "name a draft model or leave --draft out"
        )
    return head


def default_native(source: str | Path | Any, config: Any) -> mtp.MtpConfig | None:
    """Return the shapes of the module that drafts for a target by default, or None if there is none.

    Args: as in `native_head`.

    Raises: UsageError that names --target, for files with a damaged module.
    """
    if not isinstance(source, str | Path):
        return None
    try:
        return native_head(source, config) if has_default_native(source, config) else None
    except UsageError as error:
        raise UsageError(f"--target: {str(error).removeprefix('--draft native: ')}") from None


def has_default_native(source: str | Path, config: Any) -> bool:
    """Return True if a target has a module that drafts by default, as in `specjax.catalog.defaults`."""
    if is_builtin(source):
        return module_form(str(source)) is not None
    native = native_of(Path(os.path.expanduser(source)), config.num_layers)
    return native is not None and can_draft_natively(Target(make_model(config), {}, native))


def native_of(path: Path, num_layers: int) -> NativeModule | None:
    """Return the module in a model's folder or GGUF file, or None. Only the tables of tensors are read."""
    if path.is_dir():
        has_weights = any(any(path.glob(f"*{suffix}")) for suffix in (hf.SAFETENSORS_SUFFIX, *hf.TORCH_SUFFIXES))
        return hf.find_module(path, num_layers) if has_weights else None
    return gguf.find_module(path, num_layers) if path.suffix == ".gguf" else None


def stated_config(config: Any, dialect: str) -> mtp.MtpConfig:
    """Return the shapes of a module of the form `dialect` for a target's config. A mixture's module has experts too."""
    row, fixed = BY_NAME[dialect], stored_mtp.OWN_FLAGS
    flags = {name: getattr(row, name) for name in stored_mtp.FLAGS if name not in fixed}
    head = mtp.of_target(config, **flags | fixed)
    if config.experts is None:
        return head
    experts = config.experts._replace(dense_layers=(), shuffling=None)
    return dataclasses.replace(head, layer=dataclasses.replace(head.layer, experts=experts))


def _stated(source: str | Path, config: Any) -> mtp.MtpConfig | None:
    """Return the shapes of the module in the release of a built-in config; None: it has none."""
    dialect = module_form(str(source))
    return None if dialect is None else stated_config(config, dialect)


def _stored(path: Path, config: Any) -> mtp.MtpConfig | None:
    """Return the shapes of the module in a folder or a GGUF file; None: it has none, or no weight file shows it."""
    native = native_of(path, config.num_layers)
    if native is None:
        return None
    if native.lacking is not None:
        raise UsageError(f"its layer has {native.lacking}, which specjax does not have in heads")
    spec = target_spec(Target(make_model(config), abstract_params(config)))
    return stored_mtp.plan(stored_mtp.native_contents(native, spec.num_layers), native.dialect, spec).config
