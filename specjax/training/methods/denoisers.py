"""Initialisation and storage of denoisers, in a model folder, or in one file for models without a tokenizer.

denoiser = init_denoiser(LlamaConfig(...), mask_token=0)
denoiser = train(None, denoiser, texts, recipe=recipe_of("masked_diffusion"))
save_denoiser("denoiser.safetensors", denoiser)
denoiser = load_denoiser("denoiser.safetensors")
save_denoiser_model("folder", denoiser, tokenizer)
denoiser, tokenizer = specjax.load_denoiser("folder")
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from specjax.arrays.modes import with_standard_modes
from specjax.diffusion.types import Denoiser
from specjax.errors import UsageError
from specjax.files.atomic import write_tensors
from specjax.files.homes import in_home
from specjax.files.untrusted import guarded_read
from specjax.models import LlamaConfig, Tokenizer, abstract_params, init_params, make_model
from specjax.models.loading.families.denoisers import DenoiserSettings
from specjax.models.loading.formats.writing import save_model

FIELDS = ("mask_token", "attention", "block", "alignment", "seeding")


@with_standard_modes
def init_denoiser(config: LlamaConfig, *, seed: int = 0, **fields: Any) -> Denoiser:
    """Return an untrained denoiser. Args: fields: fields of `Denoiser`, such as mask_token, attention and block."""
    return Denoiser(make_model(config), init_params(config, jax.random.key(seed)), **fields)


def save_denoiser_model(folder: str | Path, denoiser: Denoiser, tokenizer: Tokenizer | str | Path | None) -> None:
    """Write a denoiser as a model folder for `specjax.load_denoiser` and the command line.

    Args: tokenizer: as for `specjax.save_model`.

    Raises: UsageError in its cases, and for settings that no config.json expresses.
    """
    if denoiser.mask_token is None:
        raise UsageError("the denoiser has no mask token, which a config.json states; save it with specjax.save_model")
    settings = DenoiserSettings(**{name: getattr(denoiser, name) for name in DenoiserSettings._fields})
    save_model(folder, denoiser.target, tokenizer, denoiser_settings=settings)


def save_denoiser(file: str | Path, denoiser: Denoiser, dtype: str = "float16", **metadata: str) -> None:
    """Write a denoiser to a safetensors file. Args: metadata: additional entries of its header."""
    header = {
        "config": json.dumps(dataclasses.asdict(denoiser.model.config)),
        "read": json.dumps({name: getattr(denoiser, name) for name in FIELDS}),
        **metadata,
    }
    tensors = {name: x.astype(dtype) for name, x in _leaves_by_path(denoiser.params).items()}
    write_tensors(in_home(file), tensors, header)


def load_denoiser(file: str | Path) -> Denoiser:
    """Read a denoiser that `save_denoiser` wrote, in the dtype of its config.

    Raises: UsageError for other files.
    """
    from safetensors import safe_open

    with guarded_read(file), safe_open(str(file), "flax") as tensors:
        header = tensors.metadata() or {}
        if not {"config", "read"} <= header.keys():
            raise UsageError(f"{file} holds no denoiser: its header has no config; give a file of save_denoiser")
        config = LlamaConfig(**json.loads(header["config"]))
        shapes = abstract_params(config)
        missing = _leaves_by_path(shapes).keys() - set(tensors.keys())
        if missing:
            raise UsageError(f"{file} has no tensor {min(missing)}; give a file of save_denoiser")
        leaves = [jnp.asarray(tensors.get_tensor(name).astype(x.dtype)) for name, x in _leaves_by_path(shapes).items()]
    params = jax.tree.unflatten(jax.tree.structure(shapes), leaves)
    return Denoiser(make_model(config), params, **json.loads(header["read"]))


def _leaves_by_path(params: Any) -> dict[str, Any]:
    """Return a dict from path to leaf, in the order of the leaves."""
    return {
        ".".join(str(getattr(entry, "key", entry)) for entry in path): x
        for path, x in jax.tree_util.tree_flatten_with_path(params)[0]
    }
