"""A denoiser in one file: its weights, and in the header how the model is made and read."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from specjax.diffusion.types import Denoiser
from specjax.errors import UsageError
from specjax.files.atomic import write_tensors
from specjax.files.untrusted import guarded_read
from specjax.models import LlamaConfig, abstract_params, init_params, make_model

READ = ("mask_token", "attention", "block", "alignment", "seeding")


def new(config: LlamaConfig, *, seed: int = 0, **read: Any) -> Denoiser:
    """A denoiser that has learned nothing; `read` are `Denoiser`'s own fields."""
    return Denoiser(make_model(config), init_params(config, jax.random.key(seed)), **read)


def save(file: str | Path, denoiser: Denoiser, dtype: str = "float16", **about: str) -> None:
    """Write a safetensors file. about: further words for its header."""
    header = {
        "config": json.dumps(dataclasses.asdict(denoiser.model.config)),
        "read": json.dumps({name: getattr(denoiser, name) for name in READ}),
        **about,
    }
    write_tensors(Path(file), {name: x.astype(dtype) for name, x in _named(denoiser.params).items()}, header)


def load(file: str | Path) -> Denoiser:
    """What `save` wrote, in the dtype of its config.

    Raises: UsageError for another file.
    """
    from safetensors import safe_open

    with guarded_read(file), safe_open(str(file), "flax") as opened:
        header = opened.metadata() or {}
        if not {"config", "read"} <= header.keys():
            raise UsageError(f"{file} holds no denoiser: its header has no config; give a file that `save` wrote")
        config = LlamaConfig(**json.loads(header["config"]))
        wanted = abstract_params(config)
        missing = _named(wanted).keys() - set(opened.keys())
        if missing:
            raise UsageError(f"{file} has no tensor {min(missing)}; give a file that `save` wrote")
        found = {name: opened.get_tensor(name).astype(x.dtype) for name, x in _named(wanted).items()}
    leaves = [jnp.asarray(found[name]) for name in _named(wanted)]
    params = jax.tree.unflatten(jax.tree.structure(wanted), leaves)
    return Denoiser(make_model(config), params, **json.loads(header["read"]))


def _named(params: Any) -> dict[str, Any]:
    """Leaves by path, in their order."""
    return {
        ".".join(str(getattr(entry, "key", entry)) for entry in path): x
        for path, x in jax.tree_util.tree_flatten_with_path(params)[0]
    }
