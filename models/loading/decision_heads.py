"""Files of decision heads: SpecDec++'s acceptance head, which stops drafts, and Judge's head, which accepts tokens.

SpecDec++'s authors publish a folder. It has config.json with `hidden_size` and `num_layers`, and one file with
`model.{j}.linear.weight` and `.bias` per block, and `model.{num_layers}.weight` [2, D] and `.bias`. Their blocks share
their parameters, so a file may contain them once.

Judge's authors published no head. The reader accepts the state of a linear layer in a safetensors or PyTorch file:
`weight` [1, D] or [D] and `bias`, or two classes ([2, D]; 1: right). Optional tensors are the `mean` and `scale` [D]
that standardised the features, and a `threshold`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax.errors import UsageError
from specjax.files.homes import in_home
from specjax.files.untrusted import guarded_read, quote, read_json_object
from specjax.models.heads.acceptance import AcceptanceHead, AcceptanceLayer
from specjax.models.loading.families.config_fields import LAYERS, WIDTH, ConfigFields
from specjax.models.loading.formats import hf
from specjax.models.loading.tensors.tensors import TensorLocation
from specjax.models.loading.trained_arrays import find_file, read_array, write_arrays


class JudgeHead(NamedTuple):
    """A linear classifier: w . h + b are the log-odds that a token is right."""

    weight: np.ndarray  # float32[D]
    bias: float
    threshold: float | None  # least probability of accepted tokens; None: not in the file


def read_acceptance(folder: str | Path) -> AcceptanceHead:
    """Read SpecDec++'s acceptance head of a draft model. Raises: UsageError for a folder without one."""
    place = in_home(folder)
    if not place.is_dir():
        raise UsageError(f'there is no folder "{folder}" with an acceptance head')
    with guarded_read(place):
        config = read_json_object(place / "config.json")
        if config is None:
            raise UsageError(f"{place} has no config.json with the number of blocks of the head; add the file")
        c = ConfigFields(config, str(place / "config.json"))
        width, blocks = c.size("hidden_size", maximum=WIDTH), c.size("num_layers", 0, minimum=0, maximum=LAYERS)
        tensors = {name: tensor for file in hf.weight_files(place) for name, tensor in hf.read_tensors(file).items()}
        # Shared blocks may be saved once, as block 0.
        sources = [j if f"model.{j}.linear.weight" in tensors else 0 for j in range(blocks)]
        used = {f"model.{j}.linear.{leaf}" for j in sources for leaf in ("weight", "bias")}
        used |= {f"model.{blocks}.{leaf}" for leaf in ("weight", "bias")}
        _check_names(tensors, used, place)
        linear = lambda name, out: AcceptanceLayer(
            *(jnp.asarray(read_tensor(tensors, f"{name}.{leaf}", shape, place))
              for leaf, shape in (("weight", (out, width)), ("bias", (out,))))
        )  # fmt: skip
        layers = {j: linear(f"model.{j}.linear", width) for j in set(sources)}
        return AcceptanceHead(tuple(layers[j] for j in sources), linear(f"model.{blocks}", 2))


def save_acceptance(folder: str | Path, head: AcceptanceHead) -> None:
    """Write config.json and model.safetensors in the authors' format, and replace existing files.

    Raises: UsageError for a folder that cannot be written.
    """
    blocks = {f"model.{j}.linear": block for j, block in enumerate(head.blocks)} | {
        f"model.{len(head.blocks)}": head.out
    }
    arrays = {f"{name}.{leaf}": np.array(x) for name, block in blocks.items() for leaf, x in block._asdict().items()}
    config = {"hidden_size": int(head.out.weight.shape[1]), "num_layers": len(head.blocks)}
    place = in_home(folder)
    write_arrays(place / hf.SAFETENSORS_FILE, arrays)
    try:
        (place / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{place} cannot be written ({error.strerror or error}); choose another folder") from error


def read_judge(source: str | Path) -> JudgeHead:
    """Read Judge's head of a target, with the standardisation of features folded into its weights.

    Raises: UsageError for a file without such a head.
    """
    file = find_file(source, "a judge's weight and bias")
    with guarded_read(file):
        tensors = hf.read_tensors(file)
        _check_names(tensors, {"weight", "bias", "mean", "scale", "threshold"}, file)
        w, b = read_linear(tensors, file)
        ones = {"mean": np.zeros(len(w), np.float32), "scale": np.ones(len(w), np.float32)}
        mean, scale = (read_tensor(tensors, name, w.shape, file) if name in tensors else ones[name] for name in ones)
        if not (scale > 0).all():
            raise UsageError(f"{file} has a scale with entries that are not above 0")
        threshold = (
            read_tensor(tensors, "threshold", tensors["threshold"].shape, file) if "threshold" in tensors else None
        )
        if threshold is not None and threshold.size != 1:
            raise UsageError(f"{file} has a threshold of {threshold.size} numbers, not one")
    w = w / scale
    return JudgeHead(w, float(b - w @ mean), None if threshold is None else float(threshold.reshape(())))


def check_judge(source: str) -> str:
    """Return the text itself. Raises: UsageError if `read_judge` refuses the file."""
    read_judge(source)
    return source


def read_linear(tensors: Mapping[str, TensorLocation], where: Path, prefix: str = "") -> tuple[np.ndarray, float]:
    """Return the log-odds (w float32[D], b) of a linear layer `{prefix}weight` and `{prefix}bias`, as `to_log_odds`.

    Raises: UsageError for a layer that is missing, or has other shapes. A layer with a name and no bias has the bias 0.
    """
    names = [prefix + name for name in ("weight", "bias")]
    shapes = [tensors[name].shape if name in tensors else () for name in names]
    if not shapes[0]:
        raise UsageError(f"{where} has no tensor {names[0]}, which the head needs")
    _check_rows(shapes[0], str(where))
    weight = read_tensor(tensors, names[0], shapes[0], where)
    has_bias = names[1] in tensors or not prefix
    bias = (
        read_tensor(tensors, names[1], shapes[1], where)
        if has_bias
        else np.zeros(len(np.atleast_2d(weight)), np.float32)
    )
    return to_log_odds(weight, bias, str(where))


def to_log_odds(weight: np.ndarray, bias: np.ndarray, where: str) -> tuple[np.ndarray, float]:
    """Return (w float32[D], b) so that w . h + b are the log-odds of a linear layer.

    Args: weight: [D] or [1, D], or [2, D] for two classes, of which the second counts. bias: one number per row.

    Raises: UsageError for other shapes. `where` is the name of the layer.
    """
    _check_rows(weight.shape, where)
    rows, bias = np.atleast_2d(weight), np.reshape(bias, -1)
    if len(bias) != len(rows):
        raise UsageError(f"{where} has a bias of {len(bias)} numbers, and a weight of {len(rows)} rows")
    if len(rows) == 1:
        return rows[0], float(bias[0])
    return rows[1] - rows[0], float(bias[1] - bias[0])


def _check_rows(shape: tuple[int, ...], where: str) -> None:
    if len(shape) not in (1, 2) or (len(shape) == 2 and shape[0] not in (1, 2)):
        raise UsageError(
            f"{where} has no weight with one or two rows, one per label, which such a head needs, but one of shape "
            f"{quote(list(shape))}"
        )


def save_judge(file: str | Path, weight, bias: float = 0.0, threshold: float | None = None) -> None:
    """Write a .safetensors file for `read_judge`. Raises: UsageError if it cannot be written."""
    numbers = {"bias": bias} | ({} if threshold is None else {"threshold": threshold})
    vectors = {name: np.array([number], np.float32) for name, number in numbers.items()}
    write_arrays(file, {"weight": np.array(weight, np.float32)} | vectors)


def read_tensor(tensors: Mapping[str, TensorLocation], name: str, shape: tuple[int, ...], where: Path) -> np.ndarray:
    """Read a float32 tensor of this shape. Raises: UsageError for other shapes or values that are not finite."""
    if name not in tensors:
        raise UsageError(f"{where} has no tensor {name}, which the head needs")
    if tensors[name].shape != shape:
        raise UsageError(
            f"{where} has {name} of shape {quote(list(tensors[name].shape))}, and it must be {list(shape)}"
        )
    return read_array(tensors, name, where)


def _check_names(tensors: Mapping[str, TensorLocation], used: set[str], where: Path) -> None:
    unknown = sorted(set(tensors) - used)
    if unknown:
        raise UsageError(f"{where} has {quote(unknown[0])}, which is not a tensor of such a head; give the head's file")
