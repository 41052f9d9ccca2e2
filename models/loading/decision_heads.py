"""Small trained heads that decide something: SpecDec++'s, when to stop a draft, and Judge's, what to accept.

SpecDec++'s authors publish a folder: config.json with `hidden_size` and `num_layers`, and `model.{j}.linear.weight`,
`.bias` per block and `model.{num_layers}.weight` [2, D], `.bias` in one file. Their blocks are one, so that files may
hold it once. Judge's authors published no head; what is read is the state of a linear layer, `weight` [1, D] or [D]
and `bias`, or of one with two classes ([2, D]; 1: right), in a safetensors or PyTorch file, and beside them, if they
are there, the `mean` and `scale` [D] by which its features were standardised, and a `threshold`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax.errors import UsageError
from specjax.files.atomic import write_tensors
from specjax.files.untrusted import guarded_read, quote, read_json_object
from specjax.models.heads.acceptance import AcceptanceHead, Linear
from specjax.models.loading.families.config_fields import LAYERS, WIDTH, Fields
from specjax.models.loading.formats import hf
from specjax.models.loading.tensors.tensors import Tensor, read_rows


class JudgeHead(NamedTuple):
    """Log-odds w . h + b that a token is right, and above which chance it is accepted."""

    weight: np.ndarray  # float32[D]
    bias: float
    threshold: float | None  # None: the file does not say


def read_acceptance(folder: str | Path) -> AcceptanceHead:
    """SpecDec++'s head of a draft model. Raises: UsageError, in one sentence, for what is none."""
    place = Path(folder).expanduser()
    if not place.is_dir():
        raise UsageError(f'there is no folder "{folder}" with an acceptance head')
    with guarded_read(place):
        config = read_json_object(place / "config.json")
        if config is None:
            raise UsageError(f"{place} has no config.json, so how many blocks the head has is unknown")
        c = Fields(config, str(place / "config.json"))
        width, blocks = c.size("hidden_size", most=WIDTH), c.size("num_layers", 0, least=0, most=LAYERS)
        tensors = {name: tensor for file in hf.weight_files(place) for name, tensor in hf.read_tensors(file).items()}
        own = [j if f"model.{j}.linear.weight" in tensors else 0 for j in range(blocks)]  # saved once, where it is one
        used = {f"model.{j}.linear.{what}" for j in own for what in ("weight", "bias")}
        used |= {f"model.{blocks}.{what}" for what in ("weight", "bias")}
        _refuse_others(tensors, used, place)
        linear = lambda name, out: Linear(
            *(jnp.asarray(_read(tensors, f"{name}.{what}", shape, place))
              for what, shape in (("weight", (out, width)), ("bias", (out,))))
        )  # fmt: skip
        made = {j: linear(f"model.{j}.linear", width) for j in set(own)}
        return AcceptanceHead(tuple(made[j] for j in own), linear(f"model.{blocks}", 2))


def save_acceptance(folder: str | Path, head: AcceptanceHead) -> None:
    """Write config.json and model.safetensors as the authors do, over those that are there.

    Raises: UsageError for a folder that cannot be written.
    """
    blocks = {f"model.{j}.linear": block for j, block in enumerate(head.blocks)} | {
        f"model.{len(head.blocks)}": head.out
    }
    arrays = {f"{name}.{what}": np.array(x) for name, block in blocks.items() for what, x in block._asdict().items()}
    config = {"hidden_size": int(head.out.weight.shape[1]), "num_layers": len(head.blocks)}
    place = Path(folder)
    _write(place / hf.WHOLE, arrays)
    (place / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_judge(source: str | Path) -> JudgeHead:
    """Judge's head of a target, features standardised within it. Raises: UsageError for a file that holds none."""
    file = Path(source).expanduser()
    if file.suffix not in (hf.SAFETENSORS, *hf.OF_TORCH):
        raise UsageError(f"{source} is no .safetensors, .pt or .bin file with a judge's weight and bias")
    if not file.is_file():
        raise UsageError(f'there is no file "{source}" with a judge\'s weight and bias')
    with guarded_read(file):
        tensors = hf.read_tensors(file)
        _refuse_others(tensors, {"weight", "bias", "mean", "scale", "threshold"}, file)
        shape = tensors["weight"].shape if "weight" in tensors else ()
        if len(shape) not in (1, 2) or (len(shape) == 2 and shape[0] not in (1, 2)):
            raise UsageError(f"{file} has no weight of one or two rows, as a judge of two classes has")
        rows, width = (shape[0] if len(shape) == 2 else 1), shape[-1]
        weight = _read(tensors, "weight", shape, file).reshape(rows, width)
        bias = _read(tensors, "bias", tensors["bias"].shape if "bias" in tensors else (rows,), file).reshape(-1)
        if bias.shape != (rows,):
            raise UsageError(f"{file} has a bias of {len(bias)} numbers, and a weight of {rows} rows")
        w, b = (weight[0], bias[0]) if rows == 1 else (weight[1] - weight[0], bias[1] - bias[0])
        ones = {"mean": np.zeros(width, np.float32), "scale": np.ones(width, np.float32)}
        mean, scale = (_read(tensors, name, (width,), file) if name in tensors else ones[name] for name in ones)
        if not (scale > 0).all():
            raise UsageError(f"{file} has a scale that is not above 0 everywhere")
        threshold = _read(tensors, "threshold", tensors["threshold"].shape, file) if "threshold" in tensors else None
        if threshold is not None and threshold.size != 1:
            raise UsageError(f"{file} has a threshold of {threshold.size} numbers, not one")
    w = w / scale
    return JudgeHead(w, float(b - w @ mean), None if threshold is None else float(threshold.reshape(())))


def save_judge(file: str | Path, weight, bias: float = 0.0, threshold: float | None = None) -> None:
    """Write a .safetensors file for `read_judge`. Raises: UsageError if it cannot be written."""
    arrays = {"weight": np.array(weight, np.float32), "bias": np.array([bias], np.float32)}
    _write(Path(file), arrays | ({} if threshold is None else {"threshold": np.array([threshold], np.float32)}))


def _read(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...], where: Path) -> np.ndarray:
    """float32 of this shape, all finite."""
    if name not in tensors:
        raise UsageError(f"{where} has no tensor {name}, which the head needs")
    tensor = tensors[name]
    if tensor.shape != shape:
        raise UsageError(f"{where} has {name} of shape {quote(list(tensor.shape))}, and it must be {list(shape)}")
    values = read_rows(tensor, 0, shape[0] if shape else 1).reshape(shape)
    if not np.isfinite(values).all():
        raise UsageError(f"{where} has numbers in {name} that are not finite")
    return values


def _refuse_others(tensors: Mapping[str, Tensor], used: set[str], where: Path) -> None:
    others = sorted(set(tensors) - used)
    if others:
        raise UsageError(f"{where} has {quote(others[0])}, which is no tensor of such a head; give the head's own file")


def _write(file: Path, arrays: dict[str, np.ndarray]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(file, arrays)
    except OSError as error:
        raise UsageError(f"{file} cannot be written ({error.strerror or error}); give another place") from error
