"""MaxText checkpoints: the `CHECKPOINT/items` folders that its trainer and its converters write with Orbax.

They contain arrays without a description. The config.json and the tokenizer of the trained Hugging Face model must be
copied to the same folder. MaxText stores a matrix as [in, heads, head_dim] or [in, out]. All layers are in one array,
along its second axis, or in separate arrays. Some steps of the forward pass are folded into the weights:

- queries are divided by the square root of head_dim, for models whose attention does not scale (llama, mistral);
- with the frequencies of Llama 3.1, rotated pairs of numbers are neighbours (`StoredTensor.heads`).

An array is read completely when its first layer is needed. So loading takes the memory of the model, of
`CACHED_ARRAYS` arrays and of the one being read.
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
from specjax.models.loading.tensors.assembly import StoredTensor
from specjax.models.loading.tensors.tensors import LazyTensor
from specjax.models.rotary import RopeScaling

ITEMS, METADATA = "items", "_METADATA"
"""The checkpoint folder in the folder of a step, and the file that identifies an Orbax folder."""

SCALED_QUERY_TYPES = ("llama", "mistral")
"""Model types with stored queries that are divided by the square root of head_dim."""

MODEL_TYPES = (*SCALED_QUERY_TYPES, "qwen2", "qwen3")

LLAMA31 = RopeScaling("llama3", factor=8.0, low=1.0, high=4.0, original_positions=8192)
"""The only scaled rotary frequencies that MaxText supports."""

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
"""Names by parameter path. Stacked layers have names without the number: `decoder.layers.mlp.wi_0.kernel`."""

LAYER_AXIS = 1  # param_scan_axis of MaxText
MAX_PADDING = 1024  # maximum number of padding rows of a vocabulary; a larger difference means another vocabulary
CACHED_ARRAYS = 4  # arrays in memory at the same time: those of one size, which are filled layer by layer


class ArrayInfo(NamedTuple):
    """Path and shape of an array in an Orbax folder."""

    path: tuple[str, ...]
    shape: tuple[int, ...]


def find_orbax_folder(folder: Path) -> Path | None:
    """Return the Orbax folder of a model folder: its `items`, or the folder itself."""
    places = (folder / ITEMS, folder)
    return next((place for place in places if (place / METADATA).is_file()), None)


def explain_missing_config(folder: Path) -> str | None:
    """Return an error message for a MaxText folder without a config.json; None for other folders."""
    if find_orbax_folder(folder) is None:
        return explain_missing_weights(folder)
    if folder.name == ITEMS and (folder.parent / "config.json").is_file():
        return f"{folder} has no config.json, which is in its parent folder; give {folder.parent}"
    return (
        f"{folder} has no config.json; copy that and the tokenizer of the Hugging Face model that MaxText trained "
        "into it"
    )


def explain_missing_weights(folder: Path) -> str | None:
    """Return an error message for a MaxText folder without a complete checkpoint; None for other folders."""
    if (folder / ITEMS).is_dir() or any(folder.glob(f"{ITEMS}.orbax-checkpoint-tmp*")):
        return f"{folder} has no complete checkpoint: its {ITEMS} lack {METADATA}; copy it again, or give another step"
    run = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    steps = [step for step in run.iterdir() if step.name.isdecimal() and find_orbax_folder(step) is not None]
    if steps:
        last = max(steps, key=lambda step: int(step.name))
        return (
            f"{run} contains the checkpoints of a run; give the folder of one step, such as {last}, with the "
            "config.json and the tokenizer in it"
        )
    return None


def read(folder: Path, config: Config, kind: str) -> tuple[dict[str, LazyTensor], dict[str, StoredTensor]]:
    """Read a checkpoint of a Hugging Face `model_type`.

    Returns: the tensors by name, and the stored tensors by parameter path.
    Raises: UsageError for a type outside of MODEL_TYPES, and for a folder that is not a MaxText checkpoint.
    """
    if kind not in MODEL_TYPES:
        raise UsageError(
            f"{folder} has a model of type {quote(kind)}; the MaxText checkpoints that specjax reads have the types "
            f"{', '.join(MODEL_TYPES)}; convert it with maxtext.checkpoint_conversion.to_huggingface"
        )
    check_folder(folder)
    store = _Store(folder)
    arrays = {".".join(array.path[len(store.prefix) :]): array for array in store.arrays()}
    tensors = {}
    for name, array in arrays.items():
        if name.endswith("query.kernel") and array.shape[-1] != config.head_dim:  # as a matrix it may still fit
            raise UsageError(
                f"{folder} has heads of width {array.shape[-1]}, but its config.json has head_dim {config.head_dim}; "
                "use the config.json of the trained model"
            )
        is_stacked = name.startswith("decoder.layers.")
        for layer in range(array.shape[LAYER_AXIS] if is_stacked and len(array.shape) > LAYER_AXIS else 1):
            layer_name = name.replace("layers.", f"layers_{layer}.", 1) if is_stacked else name
            tensors[layer_name] = _lazy_tensor(store, array, layer_name, layer if is_stacked else None, config, kind)
    rotates_neighbours = config.rope_scaling is not None and config.rope_scaling.kind == LLAMA31.kind
    if rotates_neighbours and config.rope_scaling != LLAMA31:
        raise UsageError(
            f"{folder} has another RoPE scaling in its config.json than that of Llama 3.1, which MaxText computes; set "
            f"factor {LLAMA31.factor:g}, low_freq_factor {LLAMA31.low:g}, high_freq_factor "
            f"{LLAMA31.high:g} and original_max_position_embeddings {LLAMA31.original_positions}"
        )
    heads = {"q": config.num_heads, "k": config.num_kv_heads} if rotates_neighbours else {}
    return tensors, {path: StoredTensor(name, heads=heads.get(path.split(".")[-2], 0)) for path, name in PATHS.items()}


def _lazy_tensor(
    store: _Store, array: ArrayInfo, name: str, layer: int | None, config: Config, kind: str
) -> LazyTensor:
    """Describe one tensor of one layer, [out, in] or [out]."""
    layer_shape = array.shape if layer is None else (*array.shape[:LAYER_AXIS], *array.shape[LAYER_AXIS + 1 :])
    *parts, part = name.split(".")
    is_matrix = part == "kernel"
    is_output = parts[-1] in ("out", "wo")  # [..., out]; others are [in, ...]
    fan_in = math.prod(layer_shape[:-1]) if is_output else layer_shape[0]
    shape = (
        (math.prod(layer_shape) // fan_in, fan_in)
        if is_matrix
        else layer_shape
        if part == "embedding"
        else (math.prod(layer_shape),)
    )
    is_vocabulary = name in (PATHS["embed.weight"], PATHS["head.weight"])
    if is_vocabulary and 0 < shape[0] - config.vocab_size < MAX_PADDING:
        shape = (config.vocab_size, *shape[1:])
    scale = math.sqrt(config.head_dim) if kind in SCALED_QUERY_TYPES and parts[-1] == "query" else 1.0

    def rows(start: int, stop: int) -> np.ndarray:
        stored = store.array(array.path)
        weight = stored if layer is None else stored[:, layer]  # LAYER_AXIS
        if is_output:  # slice first: the heads of a layer are not contiguous, so a reshape would copy all of them
            flat = weight[..., start:stop].reshape(fan_in, -1).T
        elif is_matrix:
            flat = weight.reshape(fan_in, -1).T[start:stop]
        elif part == "embedding":
            flat = weight[start:stop]
        else:
            flat = weight.reshape(-1)[start:stop]
        values = flat.astype(np.float32)
        return values * np.float32(scale) if scale != 1.0 else values

    return LazyTensor(store.folder, shape, rows)


class _Store:
    """An Orbax folder and its arrays, with a cache of the last few."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.lock = threading.Lock()
        self.cached_read = functools.lru_cache(CACHED_ARRAYS)(self._read)
        self.tree = self._metadata()
        prefixes: tuple[tuple[str, ...], ...] = (("params", "params"), ("params",), ())
        with_decoder = [prefix for prefix in prefixes if "decoder" in _subtree(self.tree, prefix)]
        if not with_decoder:
            raise UsageError(
                f"{folder} is an Orbax folder without a decoder in its params, so it is not a MaxText checkpoint"
            )
        self.prefix = with_decoder[0]

    def arrays(self) -> Iterator[ArrayInfo]:
        """Yield the arrays of the model, without those of the optimizer."""

        def walk(path: tuple[str, ...], node: Any) -> Iterator[ArrayInfo]:
            for key, child in node.items():
                if isinstance(child, dict):
                    yield from walk((*path, key), child)
                elif getattr(child, "shape", None) is not None:
                    yield ArrayInfo((*path, key), tuple(child.shape))

        return walk(self.prefix, _subtree(self.tree, self.prefix))

    def array(self, path: tuple[str, ...]) -> np.ndarray:
        with self.lock:  # all threads that fill a parameter request the same array at once
            return self.cached_read(path)

    def _read(self, path: tuple[str, ...]) -> np.ndarray:
        ocp = import_orbax()

        def nested(leaf: Any) -> Any:
            return functools.reduce(lambda inner, key: {key: inner}, reversed(path), leaf)

        args = ocp.args.PyTreeRestore(
            item=nested(0), restore_args=nested(ocp.RestoreArgs(restore_type=np.ndarray)), partial_restore=True
        )
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
                return _subtree(reader.restore(self.folder.absolute(), args=args), path)
        except Exception as error:  # from tensorstore, zarr, OCDBT or the disk
            raise UsageError(
                f"{'.'.join(path)} in {self.folder} cannot be read ({first_line(error)}); copy the checkpoint again"
            ) from error

    def _metadata(self) -> dict:
        ocp = import_orbax()
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
                metadata = reader.metadata(self.folder.absolute()).item_metadata
        except Exception as error:
            raise UsageError(
                f"{self.folder} is not a complete Orbax folder ({first_line(error)}); copy it again"
            ) from error
        tree = getattr(metadata, "tree", None)
        if not isinstance(tree, dict):
            raise UsageError(
                f"{self.folder} is not a complete Orbax folder: it has no description of its arrays; copy it again"
            )
        return tree


def _subtree(tree: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree.get(key, {}) if isinstance(tree, dict) else {}
    return tree
