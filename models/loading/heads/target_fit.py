"""Checks of a head against its target, and parameters that a head takes from the target."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays.modes import jit
from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.gemma3 import Gemma3Config
from specjax.models.llama import LlamaConfig
from specjax.models.loading.families import llama
from specjax.models.loading.families.config_fields import LAYERS, ConfigFields
from specjax.models.loading.heads.checkpoint_contents import Contents, Tensors
from specjax.models.loading.tensors.tensors import TensorLocation, read_rows
from specjax.models.storage.format_names import describe_formats
from specjax.models.vision.config import VisionLanguageConfig
from specjax.types import Array, Target

FAMILIES = {
    "Llama": "llama", "Mistral": "llama", "Qwen2": "qwen2", "Qwen3": "qwen3", "Olmo2": "olmo2", "Olmo3": "olmo3",
    "Gemma2": "gemma2", "Gemma3": "gemma3",
}  # fmt: skip
"""Families of targets by the beginning of `architectures` in config.json."""


class TargetSpec(NamedTuple):
    """The properties of the target that a head must fit."""

    target: Target
    name: str
    width: int
    vocab_size: int
    num_layers: int
    family: str | None
    dtype: str


def target_spec(target: Target) -> TargetSpec:
    """Return the properties of a target. Raises: UsageError for a target that shares no embedding or output layer."""
    model, config = target.model, target.model.config
    if model.embed is None or model.unembed is None:
        raise UsageError(f"the target {model.name} shares no embedding and output layer, which draft heads need")
    stream = jax.eval_shape(model.embed, target.params, jnp.zeros((1, 1), jnp.int32))
    family = None
    if isinstance(config, Gemma3Config):
        family = "gemma3" if config.qk_norm else "gemma2"
    elif isinstance(config, VisionLanguageConfig) and config.text_type == "gemma3_text":
        family = "gemma3"
    elif isinstance(config, LlamaConfig):
        kind = llama.model_type_of(config)
        family = kind if kind in FAMILIES.values() else "llama"
    layers = model.capabilities.num_layers
    return TargetSpec(target, model.name, stream.shape[-1], model.vocab_size, layers, family, str(stream.dtype))


def layer_config(
    fields: ConfigFields, tensors: Tensors, first: str, count: int, spec: TargetSpec, *, windows: bool = True
) -> LlamaConfig:
    """Return the shapes of a head's decoder layers. Biases and q/k norms are detected in the file.

    Args:
      first: name of the attention of the first layer. count: number of layers in the file.
      windows: True: all layers have the window of the config; False: windows are ignored.

    Raises: UsageError for a config with another number of layers, or with mixed windows.
    """
    kind = fields.text("model_type", "llama")
    kind = kind if kind in llama.ROWS_OF_HF else "llama"
    changes: dict[str, Any] = {"model_type": kind, "attention_bias": None, "mlp_bias": None}
    if not windows:
        changes |= {"layer_types": None, "sliding_window": None, "use_sliding_window": None}
    if not fields.has("vocab_size"):  # assistants leave it to the target
        changes["vocab_size"] = spec.vocab_size
    values = {**fields.values, **{fields.prefix + name: value for name, value in changes.items()}}
    fields = dataclasses.replace(fields, values=values)
    num_layers = fields.size("num_hidden_layers", count, maximum=LAYERS)
    if num_layers != count:
        raise UsageError(
            f"{fields.where} has num_hidden_layers {num_layers}, and the file has {count} layers of a head"
        )
    fields = fields.with_defaults({"num_hidden_layers": count})
    config = llama.config_from_hf(fields, dtype=spec.dtype, cache_bits=jax.default_backend() == "cpu", name=spec.name)
    if config.is_global is not None:
        raise UsageError(
            f"{fields.where} mixes windowed and full attention layers, which specjax does not support in heads"
        )
    has = lambda part: f"{first}.{part}" in tensors
    return config.draft_head_config(
        count,
        qkv_bias=has("q_proj.bias") or has("qkv_proj.bias"),
        qk_norm=has("q_norm.weight"),
        tied=False,
    )


def target_layer_config(spec: TargetSpec, layer: str) -> LlamaConfig:
    """Return the shape of the target's decoder layers, for heads with files that do not describe their layer.

    layer: a description for the error. Raises: UsageError for a target without Llama-like layers.
    """
    config = spec.target.model.config
    if not isinstance(config, LlamaConfig):
        raise UsageError(f"{layer} needs a Llama-like target, and {spec.name} is not one; choose a head of this target")
    return config.draft_head_config()


HUB_NAMES = {"smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct"}
"""The hub ids of models that have another name here."""


def hub_name(name: str) -> str:
    """Return the name by which other engines load a target, for the name of its model."""
    return HUB_NAMES.get(name, name)


def trained_target(contents: Contents) -> str | None:
    """Return the name of the target in the config, or None."""
    verifier = contents.config.subfields("speculators_config").subfields("verifier")
    return verifier.text("name_or_path", None) or contents.config.text("base_model_name_or_path", None)


TARGET_QUANTIZED = "target_quantized"
"""Field of config.json with the scheme of the quantised target on which a head was trained."""


def describe_other_scheme(contents: Contents, target: Target) -> str | None:
    """Return a sentence about a head that was trained on its target in another scheme.

    None: the schemes are equal, or the config names none. Files of other programs never name one.
    """
    trained, scheme = contents.config.text(TARGET_QUANTIZED, None), describe_formats(target.model.config)
    if trained is None or trained == scheme:
        return None
    return (
        f"{contents.config.where} is of a head that was trained with the scheme {quote(trained)} of its target, and "
        f"the target {target.model.name} is {f'in {scheme}' if scheme else 'not quantised'}; the text stays right, but "
        "drafting may be slow"
    )


def check_equal(where: str, name: str, value: int, expected: int, owner: str) -> None:
    """Raise a UsageError unless `value`, a number of the files, is `expected`.

    name, owner: descriptions of both numbers for the error.
    """
    if value != expected:
        raise UsageError(f"{where} has {name} {value}, and {owner} {expected}; choose a head of this target")


def check_fits_target(where: str, width: int, vocab_size: int, spec: TargetSpec, named: str = "hidden_size") -> None:
    """Raise a UsageError for a head with another width or vocabulary. named: the config's name of the width."""
    check_equal(where, named, width, spec.width, f"the width of the target {spec.name} is")
    check_equal(where, "vocab_size", vocab_size, spec.vocab_size, f"the vocabulary of the target {spec.name} has")


def first_statement(statements: Mapping[str, list[int]], where: str, notes: list[str]) -> tuple[str, list[int]]:
    """Return the first field that lists streams, and its streams; "" and none without a field.

    A note names fields that list other streams. statements: streams by the name of the field.
    """
    field, ids = next(iter(statements.items()), ("", []))
    for other, other_ids in statements.items():
        if other_ids != ids:
            notes.append(f"{where} names the streams {ids} in {field} and {other_ids} in {other}; the first are used")
    return field, ids


def resolve_taps(
    contents: Contents,
    tensors: Tensors,
    spec: TargetSpec,
    ids: Sequence[int],
    field: str,
    default: Callable[[int], Sequence[int]],
    notes: list[str],
) -> tuple[int, ...]:
    """Return the streams of the target that a head reads. Their number must match the columns of fc.

    Args:
      ids, field: the streams that config.json lists, and the name of that field.
      default: `(number of streams) -> streams` for a config that lists none.

    Raises: UsageError for another number of streams, or a stream that the target lacks.
    """
    columns = tensors.shape("fc.weight", contents.folder)[-1]
    count, remainder = divmod(columns, spec.width)
    if remainder:
        raise UsageError(
            f"{contents.folder} has fc.weight with {columns} columns, not a multiple of {spec.width}, the width of the "
            f"target {spec.name}"
        )
    where = contents.config.where
    if not ids and count <= LAYERS and default(count):
        ids = default(count)
        notes.append(f"{where} lists no layers of the target; assumed the authors' default {list(ids)}")
    elif len(ids) != count:
        named = f"{field} names {len(ids)}" if ids else "config.json does not list them"
        raise UsageError(f"{contents.folder} has fc.weight for {count} of the target's streams, and {named}")
    missing = [i for i in ids if not 0 <= i <= spec.num_layers]
    if missing:
        raise UsageError(
            f"{where} reads the target's stream {quote(missing[0])} ({field or 'by default'}), and {spec.name} has "
            f"{spec.num_layers} layers; choose a head of this target"
        )
    return tuple(ids)


def check_family(contents: Contents, spec: TargetSpec) -> None:
    """Raise a UsageError if the config names a target of another family."""
    verifier = contents.config.subfields("speculators_config").subfields("verifier")
    for name in verifier.array("architectures", str):
        match = re.match("|".join(FAMILIES), name)
        family = FAMILIES[match[0]] if match else None
        if family and spec.family and family != spec.family:
            raise UsageError(
                f"the head of {contents.config.where} is for {quote(name)}, and the target {spec.name} is of the "
                f"family {spec.family}; choose a head of this target"
            )


def take_embedding(tensors: Tensors, spec: TargetSpec, notes: list[str]) -> bool:
    """Return True if the head has an embedding of its own. A copy of the target's table is removed, and noted."""
    tensor = tensors.get("embed_tokens.weight")
    if tensor is not None and _is_target_embedding(tensor, spec):
        tensors.pop("embed_tokens.weight")
        notes.append("embed_tokens equals the target's embedding and is shared")
        return False
    return tensor is not None


def _is_target_embedding(tensor: TensorLocation, spec: TargetSpec) -> bool:
    model, params = spec.target.model, spec.target.params
    if tensor.shape != (spec.vocab_size, spec.width) or model.embed is None:
        return False
    for start in range(0, spec.vocab_size, 4096):
        stop = min(start + 4096, spec.vocab_size)
        expected = np.asarray(model.embed(params, jnp.arange(start, stop)[None])[0], np.float32)
        if not np.array_equal(np.asarray(read_rows(tensor, start, stop), spec.dtype).astype(np.float32), expected):
            return False
    return True


def unembedding_rows(spec: TargetSpec, ids: Sequence[int] | np.ndarray) -> Array:
    """Return the rows [len(ids), D] of the target's output layer for these ids."""
    unembed, params, columns = spec.target.model.unembed, spec.target.params, jnp.asarray(ids)
    assert unembed is not None
    basis = np.eye(spec.width, dtype=spec.dtype)
    some = jit(lambda part: jnp.take(unembed(params, part), columns, axis=-1))
    parts = [some(basis[start : start + 256]) for start in range(0, spec.width, 256)]
    return jnp.concatenate(parts, 0).T.astype(spec.dtype)
