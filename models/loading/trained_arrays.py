"""Files of small trained parts, such as Learn2PD's filter: the arrays of a NamedTuple under the names of its fields.

The header of the file has the kind of part and the settings that it was trained for. Readers of other small files, such
as those of a judge or of probes, share the checks here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np

from specjax.errors import UsageError
from specjax.files.atomic import write_tensors
from specjax.files.homes import in_home
from specjax.files.untrusted import guarded_read, quote
from specjax.models.loading.formats import hf
from specjax.models.loading.tensors.tensors import TensorLocation, read_rows

Part = TypeVar("Part", bound=tuple)


def save_arrays(file: str | Path, kind: str, part: Any, **settings: float) -> None:
    """Write the arrays of a NamedTuple to a .safetensors file, and replace an existing one.

    Args: kind: the name of the part, such as "filter". settings: settings of its training, for people.

    Raises: UsageError if it cannot be written.
    """
    arrays = {name: np.array(value, np.float32) for name, value in part._asdict().items()}
    write_arrays(file, arrays, {"format": "pt", "kind": kind, "settings": json.dumps(settings)})


def write_arrays(file: str | Path, arrays: Mapping[str, np.ndarray], metadata: dict[str, str] | None = None) -> None:
    """Write a .safetensors file, and replace an existing one.

    Raises: UsageError if it cannot be written, or values are not finite, as after a training that diverged.
    """
    path = in_home(file)
    if path.suffix != hf.SAFETENSORS_SUFFIX:
        raise UsageError(f"{file} must end in {hf.SAFETENSORS_SUFFIX}, the format of the file")
    for name, values in arrays.items():
        if not np.isfinite(values).all():
            raise UsageError(f"{name} has values that are not finite; train with a smaller learning rate or penalty")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(path, arrays, metadata)
    except OSError as error:
        raise UsageError(f"{file} cannot be written ({error.strerror or error}); choose another path") from error


def read_arrays(source: str | Path, kind: str, fields: type[Part]) -> Part:
    """Read the arrays of a part, float32 each. source: the file, or a folder with the file `{kind}.safetensors`.

    Raises: UsageError for a file that is missing or damaged, or that has other arrays.
    """
    path = in_home(source)
    file = path / f"{kind}{hf.SAFETENSORS_SUFFIX}" if path.is_dir() else path
    find_file(file, kind)
    names: tuple[str, ...] = fields._fields  # type: ignore[attr-defined]
    with guarded_read(file):
        tensors = hf.read_tensors(file)
        if set(tensors) != set(names):
            raise UsageError(f"{file} has {quote(sorted(tensors)[:8])}, and {kind} are {', '.join(names)}")
        return fields(*(jnp.asarray(read_array(tensors, name, file)) for name in names))


def find_file(source: str | Path, content: str) -> Path:
    """Return the path of an existing file of arrays. content: a noun for errors, such as "probes".

    Raises: UsageError for another suffix, or if there is no such file.
    """
    file = in_home(source)
    if file.suffix not in (hf.SAFETENSORS_SUFFIX, *hf.TORCH_SUFFIXES):
        raise UsageError(f"{source} is not a .safetensors, .pt or .bin file of {content}")
    if not file.is_file():
        raise UsageError(f'there is no file "{source}" of {content}; `specjax train` writes it')
    return file


def read_array(tensors: Mapping[str, TensorLocation], name: str, where: Path) -> np.ndarray:
    """Read a tensor as float32, in its shape. Raises: UsageError for values that are not finite."""
    shape = tensors[name].shape
    values = read_rows(tensors[name], 0, shape[0] if shape else 1).reshape(shape)
    if not np.isfinite(values).all():
        raise UsageError(f"{where} has values in {name} that are not finite")
    return values
