"""A learned head's files before any weight is read, and the plan that its kind makes of them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.errors import UsageError
from specjax.files.untrusted import check_folder, quote, read_json_object
from specjax.models.gemma3 import Gemma3Config
from specjax.models.llama import LlamaConfig
from specjax.models.loading.families import llama
from specjax.models.loading.families.config_fields import LAYERS, Fields
from specjax.models.loading.formats import hf
from specjax.models.loading.tensors.tensors import Tensor, bytes_of, read_rows
from specjax.types import Array, Target

Rules = tuple[tuple[str, str | Callable[[re.Match], str]], ...]
"""Regular expressions and what replaces them: from the names in a file to those of a kind's table."""

FAMILIES = {
    "Llama": "llama", "Mistral": "llama", "Qwen2": "qwen2", "Qwen3": "qwen3", "Olmo2": "olmo2", "Olmo3": "olmo3",
    "Gemma2": "gemma2", "Gemma3": "gemma3",
}  # fmt: skip
"""Of `architectures` as config.json names them."""


class Contents(NamedTuple):
    """What a folder says, and where its tensors lie."""

    folder: Path
    config: Fields
    tensors: dict[str, Tensor]


class Reader(NamedTuple):
    """The target, as far as a head must fit it."""

    target: Target
    name: str
    width: int
    vocab_size: int
    num_layers: int
    family: str | None
    dtype: str


class Tensors(dict[str, Tensor]):
    """By the names of a kind's table; `own` has those of the file."""

    def __init__(self) -> None:
        super().__init__()
        self.own: dict[str, str] = {}

    def shape(self, name: str, where: Path) -> tuple[int, ...]:
        """Raises: UsageError if there is no such tensor."""
        if name not in self:
            raise UsageError(f"{where} has no tensor {name}, which a head of this kind needs")
        return self[name].shape


class Plan(NamedTuple):
    """What a head's parameters are read from."""

    kind: str  # of `specjax.models.heads.kinds`
    dialect: str
    config: Any
    table: Mapping[str, str]  # names of tensors by path of the parameter, `*` for a number, `*+1` for the next one
    tensors: Tensors
    flags: Mapping[str, Any]  # what the head was taken to be
    arrays: Mapping[str, np.ndarray | Array] = {}  # parameters that are no tensors of the file
    notes: tuple[str, ...] = ()  # what had to be assumed
    unused: tuple[str, ...] = ()  # tensors of no use here, by patterns


def read_contents(folder: Path) -> Contents:
    """Config and table of tensors of a folder. Raises: UsageError for one without, or with a tensor twice."""
    check_folder(folder)
    where = config_file(folder)
    config = read_json_object(where)
    if config is None:
        raise UsageError(f"{folder} has no config.json, so what its weights are is unknown")
    if config.get("quantization_config"):
        raise UsageError(f"{where} says the weights are quantised; use the original checkpoint")
    tensors: dict[str, Tensor] = {}
    for file in _files(folder):
        for name, tensor in hf.read_tensors(file, integers=True).items():
            first = tensors.setdefault(name, tensor)
            if first is not tensor:
                raise UsageError(f"{folder} has {quote(name)} twice, in {first.file.name} and {file.name}; remove one")
    return Contents(folder, Fields(config, str(where)), tensors)


def config_file(folder: Path) -> Path:
    """Where a folder says what it holds: config.json, or that of an adapter of PEFT's."""
    whole, adapter = folder / "config.json", folder / "adapter_config.json"
    return adapter if adapter.exists() and not whole.exists() else whole


def _files(folder: Path) -> list[Path]:
    if any(folder.glob(f"*{hf.SAFETENSORS}")) or (folder / hf.WHOLE_OF_TORCH).exists():
        return hf.weight_files(folder)
    adapter, lone = folder / "adapter_model.bin", sorted(folder.glob("*.pt"))
    if adapter.exists() or lone:
        return [adapter] if adapter.exists() else lone
    return hf.weight_files(folder)


def reader_of(target: Target) -> Reader:
    """What a head must fit."""
    model, config = target.model, target.model.config
    if model.embed is None or model.unembed is None:
        raise UsageError(f"the target {model.name} lends no embedding and no head, which learned heads need")
    stream = jax.eval_shape(model.embed, target.params, jnp.zeros((1, 1), jnp.int32))
    family = None
    if isinstance(config, Gemma3Config):
        family = "gemma3" if config.qk_norm else "gemma2"
    elif isinstance(config, LlamaConfig):
        kind = llama.kind_of(config)
        family = kind if kind in FAMILIES.values() else "llama"
    layers = model.capabilities.num_layers
    return Reader(target, model.name, stream.shape[-1], model.vocab_size, layers, family, str(stream.dtype))


def renamed(contents: Contents, rules: Rules) -> Tensors:
    """The tensors by their names in the kind's table. Raises: UsageError if two get the same."""
    found = Tensors()
    for name, tensor in contents.tensors.items():
        new = name
        for pattern, replacement in rules:
            new = re.sub(pattern, replacement, new)
        if new in found:
            raise UsageError(
                f"{contents.folder} has {quote(found.own[new])} and {quote(name)}, which are one tensor; remove one"
            )
        found[new], found.own[new] = tensor, name
    return found


def indices(tensors: Mapping[str, Tensor], pattern: str) -> int:
    """How many different numbers the first group of `pattern` takes in the names."""
    found = (re.match(pattern, name) for name in tensors)
    return len({match[1] for match in found if match})


def split_fused(tensors: Tensors, c: LlamaConfig) -> None:
    """Take apart what was joined for fewer products: q, k and v, gate and up. Raises: UsageError for other rows."""
    heads, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    fused = {
        "qkv_proj": {"q_proj": heads, "k_proj": kv, "v_proj": kv},
        "gate_up_proj": {"gate_proj": c.mlp_width, "up_proj": c.mlp_width},
    }
    for joined, parts in fused.items():
        for name in [name for name in tensors if f".{joined}." in name]:
            tensor, own, row = tensors.pop(name), tensors.own.pop(name), 0
            if tensor.shape[0] != sum(parts.values()):
                raise UsageError(
                    f"{tensor.file} has {quote(own)} of {tensor.shape[0]} rows, and by config.json it joins "
                    f"{' + '.join(map(str, parts.values()))}"
                )
            for part, rows in parts.items():
                start = bytes_of(tensor.kind, row * math.prod(tensor.shape[1:]))
                new = name.replace(joined, part)
                tensors[new] = tensor._replace(offset=tensor.offset + start, shape=(rows, *tensor.shape[1:]))
                tensors.own[new], row = own, row + rows


def layer_config(
    fields: Fields, tensors: Tensors, first: str, count: int, reader: Reader, *, windows: bool = True
) -> LlamaConfig:
    """Shapes of a head's decoder layers, with biases and q/k norms if `first`, the attention of the first, has them.

    windows: all layers have the same one; else it is left out.

    Raises: UsageError for a number of layers that is not `count`, the number in the file.
    """
    kind = fields.text("model_type", "llama")
    written = {"model_type": kind if kind in llama.ROWS_OF_HF else "llama", "attention_bias": None, "mlp_bias": None}
    if not windows:
        written |= {"layer_types": None, "sliding_window": None, "use_sliding_window": None}
    values = {**fields.values, **{fields.prefix + name: value for name, value in written.items()}}
    fields = Fields(values, fields.where, fields.prefix)
    said = fields.size("num_hidden_layers", count, most=LAYERS)
    if said != count:
        raise UsageError(f"{fields.where} has num_hidden_layers {said}, and the file has {count} layers of a head")
    config = llama.config_from_hf(
        fields, dtype=reader.dtype, cache_bits=jax.default_backend() == "cpu", name=reader.name
    )
    if config.is_global is not None:
        raise UsageError(f"{fields.where} mixes windowed and full attention layers, which specjax supports of no head")
    has = lambda part: f"{first}.{part}" in tensors
    return config.of_head(
        count,
        qkv_bias=has("q_proj.bias") or has("qkv_proj.bias"),
        qk_norm=has("q_norm.weight"),
        tied=False,
    )


def layer_of_target(reader: Reader, what: str) -> LlamaConfig:
    """A decoder layer like the target's, for heads whose files do not say how theirs is made.

    Raises: UsageError for a target whose layers are none of Llama's.
    """
    config = reader.target.model.config
    if not isinstance(config, LlamaConfig):
        raise UsageError(
            f"{what} is like a Llama's, and the target {reader.name} is none; choose a head of this target"
        )
    return config.of_head()


def trained_for(contents: Contents) -> str | None:
    """The target as the files name it."""
    verifier = contents.config.inside("speculators_config").inside("verifier")
    return verifier.text("name_or_path", None) or contents.config.text("base_model_name_or_path", None)


def check_equal(where: str, name: str, value: int, wanted: int, what: str) -> None:
    """Raises: UsageError that names both numbers, unless they are the same."""
    if value != wanted:
        raise UsageError(f"{where} has {name} {value}, and {what} {wanted}; choose a head of this target")


def check_of_target(where: str, width: int, vocab_size: int, reader: Reader, named: str = "hidden_size") -> None:
    """Raises: UsageError for a head of another width, which its config has as `named`, or vocabulary."""
    check_equal(where, named, width, reader.width, f"the width of the target {reader.name} is")
    check_equal(where, "vocab_size", vocab_size, reader.vocab_size, f"the vocabulary of the target {reader.name} has")


def check_layers(
    contents: Contents,
    tensors: Tensors,
    reader: Reader,
    ids: Sequence[int],
    found: str,
    default: Callable[[int], Sequence[int]],
    notes: list[str],
) -> tuple[int, ...]:
    """The target's streams that a head reads, whose number fc has to fit.

    Args:
      ids, found: those that config.json names, and where. default: (how many) -> those of a head that names none.

    Raises: UsageError for another number of them, or one that the target has not.
    """
    columns = tensors.shape("fc.weight", contents.folder)[-1]
    count, rest = divmod(columns, reader.width)
    if rest:
        raise UsageError(
            f"{contents.folder} has fc.weight for {columns} numbers, no multiple of {reader.width}, the width of the "
            f"target {reader.name}"
        )
    where = contents.config.where
    if not ids and count <= LAYERS and default(count):
        ids = default(count)
        notes.append(f"{where} names no layers of the target; taken for the authors', {list(ids)}")
    elif len(ids) != count:
        named = f"{found} names {len(ids)}" if ids else "it does not say which"
        raise UsageError(f"{contents.folder} has fc.weight for {count} of the target's streams, and {named}")
    wrong = [i for i in ids if not 0 <= i <= reader.num_layers]
    if wrong:
        raise UsageError(
            f"{where} reads the target's stream {quote(wrong[0])} ({found or 'by default'}), and {reader.name} has "
            f"{reader.num_layers} layers; choose a head of this target"
        )
    return tuple(ids)


def check_family(contents: Contents, reader: Reader) -> None:
    """Raises: UsageError for a head that was trained for a target of another family, if it says so."""
    verifier = contents.config.inside("speculators_config").inside("verifier")
    for name in verifier.array("architectures", str):
        match = re.match("|".join(FAMILIES), name)
        family = FAMILIES[match[0]] if match else None
        if family and reader.family and family != reader.family:
            raise UsageError(
                f"{contents.config.where} is of a head for {quote(name)}, and the target {reader.name} is of the "
                f"family {reader.family}; choose a head of this target"
            )


def has_embedding(tensors: Tensors, reader: Reader, notes: list[str]) -> bool:
    """Whether there is an embedding other than the target's, whose table need not be kept twice and is put aside."""
    tensor = tensors.get("embed_tokens.weight")
    if tensor is not None and _is_targets(tensor, reader):
        tensors.pop("embed_tokens.weight")
        notes.append("embed_tokens is the target's own, and is shared")
        return False
    return tensor is not None


def _is_targets(tensor: Tensor, reader: Reader) -> bool:
    model, params = reader.target.model, reader.target.params
    if tensor.shape != (reader.vocab_size, reader.width) or model.embed is None:
        return False
    for start in range(0, reader.vocab_size, 4096):
        stop = min(start + 4096, reader.vocab_size)
        theirs = np.asarray(model.embed(params, jnp.arange(start, stop)[None])[0], np.float32)
        if not np.array_equal(np.asarray(read_rows(tensor, start, stop), reader.dtype).astype(np.float32), theirs):
            return False
    return True


def rows_of_head(reader: Reader, ids: Sequence[int] | np.ndarray) -> Array:
    """[len(ids), D]: what the target multiplies its last state by, for some of its ids."""
    unembed, params, wanted = reader.target.model.unembed, reader.target.params, jnp.asarray(ids)
    assert unembed is not None
    basis = np.eye(reader.width, dtype=reader.dtype)
    some = jax.jit(lambda part: jnp.take(unembed(params, part), wanted, axis=-1))
    parts = [some(basis[start : start + 256]) for start in range(0, reader.width, 256)]
    return jnp.concatenate(parts, 0).T.astype(reader.dtype)
