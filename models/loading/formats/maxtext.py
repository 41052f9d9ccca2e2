"""MaxText's checkpoints: what its trainer and its converters write with Orbax, `CHECKPOINT/items`.

They hold arrays and no description: the config.json and the tokenizer are those of the Hugging Face model that was
trained, laid into the same folder. MaxText keeps a matrix as [in, heads, width of a head] or [in, out], all layers in
one array, whose second axis they are, or each apart; what it does not do at run time, it has done to the weights:

- queries are divided by the square root of a head's width, where attention does not do it (llama, mistral);
- with the frequencies of Llama 3.1 the two numbers that are rotated together are neighbours (`StoredTensor.heads`).

An array is read whole when its first layer is wanted, so loading takes the memory of the model, of `CACHED_ARRAYS` arrays and of
the one that is read.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specjax.errors import UsageError
from specjax.files.untrusted import check_folder, first_line, import_orbax, quote
from specjax.models.bridge import Config
from specjax.models.layers import RopeScaling
from specjax.models.loading.tensors.assembly import StoredTensor
from specjax.models.loading.tensors.tensors import LazyTensor

ITEMS, METADATA = "items", "_METADATA"
"""The folder in a step's folder, and the file by which Orbax knows its own."""

SCALED = ("llama", "mistral")
"""Model types whose stored queries are divided by the square root of a head's width."""

KINDS = (*SCALED, "qwen2", "qwen3")

LLAMA31 = RopeScaling("llama3", factor=8.0, low=1.0, high=4.0, original_positions=8192)
"""The only frequencies of that kind that MaxText has."""

PATHS = {
    "embed.weight": "token_embedder.embedding",
    "norm.weight": "decoder.decoder_norm.scale",
    "head.weight": "decoder.logits_dense.kernel",
    "layers.*.attention_norm.weight": "decoder.layers_*.pre_self_attention_layer_norm.scale",
    "layers.*.attention.q.weight": "decoder.layers_*.self_attention.query.kernel",
    "layers.*.attention.k.weight": "decoder.layers_*.self_attention.key.kernel",
    "layers.*.attention.v.weight": "decoder.layers_*.self_attention.value.kernel",
    "layers.*.attention.o.weight": "decoder.layers_*.self_attention.out.kernel",
    "layers.*.attention.q.bias": "decoder.layers_*.self_attention.query.bias",
    "layers.*.attention.k.bias": "decoder.layers_*.self_attention.key.bias",
    "layers.*.attention.v.bias": "decoder.layers_*.self_attention.value.bias",
    "layers.*.attention.q_norm.weight": "decoder.layers_*.self_attention.query_norm.scale",
    "layers.*.attention.k_norm.weight": "decoder.layers_*.self_attention.key_norm.scale",
    "layers.*.mlp_norm.weight": "decoder.layers_*.post_self_attention_layer_norm.scale",
    "layers.*.mlp.gate.weight": "decoder.layers_*.mlp.wi_0.kernel",
    "layers.*.mlp.up.weight": "decoder.layers_*.mlp.wi_1.kernel",
    "layers.*.mlp.down.weight": "decoder.layers_*.mlp.wo.kernel",
}
"""By parameter path. Where layers are one array its name lacks the number: `decoder.layers.mlp.wi_0.kernel`."""

LAYERS_AXIS = 1  # MaxText's param_scan_axis
PADDING = 1024  # rows by which a vocabulary is filled up, at most; with more it is another one
CACHED_ARRAYS = 4  # arrays that are held at once: those of one size, whose layers are filled in turn


class ArrayInfo(NamedTuple):
    """What Orbax says of an array before it is read."""

    path: tuple[str, ...]
    shape: tuple[int, ...]


def find(folder: Path) -> Path | None:
    """The Orbax folder of a model folder: its `items`, or itself."""
    places = (folder / ITEMS, folder)
    return next((place for place in places if (place / METADATA).is_file()), None)


def why_none(folder: Path) -> str | None:
    """What to do with a folder of MaxText's that is no model folder, having no config.json."""
    if find(folder) is None:
        return why_no_weights(folder)
    if folder.name == ITEMS and (folder.parent / "config.json").is_file():
        return f"{folder} has no config.json, which lies beside it; give {folder.parent}"
    return (
        f"{folder} has no config.json; lay that and the tokenizer of the Hugging Face model that MaxText trained "
        "beside its checkpoint"
    )


def why_no_weights(folder: Path) -> str | None:
    """What to do with a folder of MaxText's that has no whole checkpoint itself."""
    if (folder / ITEMS).is_dir() or any(folder.glob(f"{ITEMS}.orbax-checkpoint-tmp*")):
        return f"{folder} has no whole checkpoint: its {ITEMS} lack {METADATA}; copy it again, or give another step"
    run = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    steps = [step for step in run.iterdir() if step.name.isdecimal() and find(step) is not None]
    if steps:
        last = max(steps, key=lambda step: int(step.name))
        return (
            f"{run} holds the checkpoints of a run; give the folder of one step, such as {last}, with the config.json "
            "and the tokenizer in it"
        )
    return None


def read(place: Path, config: Config, kind: str) -> tuple[dict[str, LazyTensor], dict[str, StoredTensor]]:
    """(tensors by name, what is stored by parameter path) of a checkpoint of a Hugging Face `model_type`.

    Raises: UsageError for a type that is not of KINDS, and for what is no checkpoint of MaxText.
    """
    if kind not in KINDS:
        raise UsageError(
            f"{place} cannot be read as a model of the type {quote(kind)}: of MaxText's checkpoints specjax reads "
            f"{', '.join(KINDS)}; convert it with maxtext.checkpoint_conversion.to_huggingface"
        )
    check_folder(place)
    store = _Store(place)
    arrays = {".".join(array.path[len(store.prefix) :]): array for array in store.arrays()}
    tensors = {}
    for name, array in arrays.items():
        if name.endswith("query.kernel") and array.shape[-1] != config.head_dim:  # as a matrix it may fit all the same
            raise UsageError(
                f"{place} has heads of the width {array.shape[-1]}, and its config.json says {config.head_dim}; lay "
                "the config.json of the model that was trained there"
            )
        one_of_all = name.startswith("decoder.layers.")
        for layer in range(array.shape[LAYERS_AXIS] if one_of_all and len(array.shape) > LAYERS_AXIS else 1):
            own = name.replace("layers.", f"layers_{layer}.", 1) if one_of_all else name
            tensors[own] = _held(store, array, own, layer if one_of_all else None, config, kind)
    neighbours = config.rope_scaling is not None and config.rope_scaling.kind == LLAMA31.kind
    if neighbours and config.rope_scaling != LLAMA31:
        raise UsageError(
            f"{place}: MaxText has Llama 3.1's frequencies alone, and its config.json those of another; for what "
            f"MaxText computes give it factor {LLAMA31.factor:g}, low_freq_factor {LLAMA31.low:g}, high_freq_factor "
            f"{LLAMA31.high:g} and original_max_position_embeddings {LLAMA31.original_positions}"
        )
    heads = {"q": config.num_heads, "k": config.num_kv_heads} if neighbours else {}
    return tensors, {path: StoredTensor(name, heads=heads.get(path.split(".")[-2], 0)) for path, name in PATHS.items()}


def _held(store: _Store, array: ArrayInfo, name: str, layer: int | None, config: Config, kind: str) -> LazyTensor:
    """One tensor of one layer, [out, in] or [out]."""
    own = array.shape if layer is None else (*array.shape[:LAYERS_AXIS], *array.shape[LAYERS_AXIS + 1 :])
    *parts, part = name.split(".")
    matrix = part == "kernel"
    joined = parts[-1] in ("out", "wo")  # [..., out]; others are [in, ...]
    ins = math.prod(own[:-1]) if joined else own[0]
    shape = (math.prod(own) // ins, ins) if matrix else own if part == "embedding" else (math.prod(own),)
    of_words = name in (PATHS["embed.weight"], PATHS["head.weight"])
    if of_words and 0 < shape[0] - config.vocab_size < PADDING:
        shape = (config.vocab_size, *shape[1:])
    times = math.sqrt(config.head_dim) if kind in SCALED and parts[-1] == "query" else 1.0

    def rows(start: int, stop: int) -> np.ndarray:
        whole = store.array(array.path)
        own = whole if layer is None else whole[:, layer]  # LAYERS_AXIS
        if joined:  # cut first: heads of a layer do not lie together, so to reshape them all is to copy them all
            flat = own[..., start:stop].reshape(ins, -1).T
        else:
            flat = (own.reshape(ins, -1).T if matrix else own if part == "embedding" else own.reshape(-1))[start:stop]
        found = flat.astype(np.float32)
        return found * np.float32(times) if times != 1.0 else found

    return LazyTensor(store.place, shape, rows)


class _Store:
    """An Orbax folder: what is in it, and its arrays, of which the last few are kept."""

    def __init__(self, place: Path):
        self.place = place
        self.lock = threading.Lock()
        self.kept = functools.lru_cache(CACHED_ARRAYS)(self._read)
        self.tree = self._metadata()
        prefixes: tuple[tuple[str, ...], ...] = (("params", "params"), ("params",), ())
        with_decoder = [prefix for prefix in prefixes if "decoder" in _inside(self.tree, prefix)]
        if not with_decoder:
            raise UsageError(f"{place} is a folder of Orbax with no decoder in its params, so no checkpoint of MaxText")
        self.prefix = with_decoder[0]

    def arrays(self) -> Iterator[ArrayInfo]:
        """Of the model: not those of the optimiser."""

        def below(path: tuple[str, ...], node: Any) -> Iterator[ArrayInfo]:
            for key, child in node.items():
                if isinstance(child, dict):
                    yield from below((*path, key), child)
                elif getattr(child, "shape", None) is not None:
                    yield ArrayInfo((*path, key), tuple(child.shape))

        return below(self.prefix, _inside(self.tree, self.prefix))

    def array(self, path: tuple[str, ...]) -> np.ndarray:
        with self.lock:  # all threads that fill a parameter ask for the same one at once
            return self.kept(path)

    def _read(self, path: tuple[str, ...]) -> np.ndarray:
        ocp = import_orbax()

        def nested(leaf: Any) -> Any:
            return functools.reduce(lambda inner, key: {key: inner}, reversed(path), leaf)

        args = ocp.args.PyTreeRestore(
            item=nested(0), restore_args=nested(ocp.RestoreArgs(restore_type=np.ndarray)), partial_restore=True
        )
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
                return _inside(reader.restore(self.place.absolute(), args=args), path)
        except Exception as error:  # of tensorstore, of zarr, of OCDBT, of the disk
            raise UsageError(
                f"{'.'.join(path)} of {self.place} cannot be read ({first_line(error)}); copy the checkpoint again"
            ) from error

    def _metadata(self) -> dict:
        ocp = import_orbax()
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
                found = reader.metadata(self.place.absolute()).item_metadata
        except Exception as error:
            raise UsageError(
                f"{self.place} is no whole folder of Orbax ({first_line(error)}); copy it again"
            ) from error
        tree = getattr(found, "tree", None)
        if not isinstance(tree, dict):
            raise UsageError(f"{self.place} is no whole folder of Orbax: what is in it is not said; copy it again")
        return tree


def _inside(tree: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree.get(key, {}) if isinstance(tree, dict) else {}
    return tree
