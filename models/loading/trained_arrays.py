"""Files of small trained parts, such as Learn2PD's filter: the arrays of a NamedTuple under the names of its fields.

The header of the file has the kind of part and the settings that it was trained for.
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
from specjax.files.untrusted import guarded_read, quote
from specjax.models.loading.formats import hf
from specjax.models.loading.tensors.tensors import read_rows

Part = TypeVar("Part", bound=tuple)


def save_arrays(file: str | Path, kind: str, part: Any, **settings: float) -> None:
    """Write the arrays of a NamedTuple to a .safetensors file, and replace an existing one.

    Args: kind: the name of the part, such as "filter". settings: settings of its training, for people.

    Raises: UsageError if it cannot be written.
    """
    arrays = {name: np.array(value, np.float32) for name, value in part._asdict().items()}
    write_arrays(file, arrays, {"format": "pt", "kind": kind, "settings": json.dumps(settings)})


def write_arrays(file: str | Path, arrays: Mapping[str, np.ndarray], metadata: dict[str, str] | None = None) -> None:
    """Write a .safetensors file, and replace an existing one. Raises: UsageError if it cannot be written."""
    path = Path(file).expanduser()
    if path.suffix != hf.SAFETENSORS_SUFFIX:
        raise UsageError(f"{file} must end in {hf.SAFETENSORS_SUFFIX}, the format of the file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(path, arrays, metadata)
    except OSError as error:
        raise UsageError(f"{file} cannot be written ({error.strerror or error}); choose another path") from error


def read_arrays(source: str | Path, kind: str, fields: type[Part]) -> Part:
    """Read the arrays of a part, float32 each. source: the file, or a folder with the file `{kind}.safetensors`.

    Raises: UsageError for a file that is missing or damaged, or that has other arrays.
    """
    path = Path(source).expanduser()
    file = path / f"{kind}{hf.SAFETENSORS_SUFFIX}" if path.is_dir() else path
    if file.suffix not in (hf.SAFETENSORS_SUFFIX, *hf.TORCH_SUFFIXES):
        raise UsageError(f"{source} is not a .safetensors, .pt or .bin file of {kind}")
    if not file.is_file():
        raise UsageError(f'there is no file "{file}" of {kind}; `specjax train` writes it')
    names: tuple[str, ...] = fields._fields  # type: ignore[attr-defined]
    with guarded_read(file):
        tensors = hf.read_tensors(file)
        if set(tensors) != set(names):
            raise UsageError(f"{file} has {quote(sorted(tensors)[:8])}, and {kind} are {', '.join(names)}")
        values = [read_rows(tensors[name], 0, (tensors[name].shape or (1,))[0]) for name in names]
        shaped = [value.reshape(tensors[name].shape) for name, value in zip(names, values, strict=True)]
        for name, value in zip(names, shaped, strict=True):
            if not np.isfinite(value).all():
                raise UsageError(f"{file} has values in {name} that are not finite")
    return fields(*map(jnp.asarray, shaped))
