"""Folders of hub repositories with the tables of their tensors, without the tensors.

A safetensors file begins with its table. Only the tables are downloaded. Each local file has the table and the size of
the whole file, and occupies little space, so readers of tables accept it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specjax.models.loading.formats import hf
from specjax.models.loading.quantized import is_quantized_folder

CONFIGS = "*config.json", "*.index.json", "special_tokens_map.json", "added_tokens.json"
"""Files beside the weights that describe a model. The names of tokens show diffusion models."""


@contextlib.contextmanager
def folder_of_tables(repo: str) -> Iterator[Path]:
    """Yield a folder with the configs and the tables of tensors of a hub repository. Its files are for reading tables.

    It is deleted after the block. A complete copy in the cache is used instead. Other repositories are downloaded
    completely: those without config.json or safetensors, and quantised ones, whose tensors show their formats.

    Raises: UsageError for a repository that cannot be downloaded.
    """
    local = _cached(repo)
    if local is not None:
        yield local
        return
    configs = hf.download(repo, CONFIGS)
    tables = _tables(repo, configs)
    if not tables:
        yield hf.download(repo)
        return
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / repo.rpartition("/")[2]
        folder.mkdir()
        for pattern in CONFIGS:
            for file in configs.glob(pattern):
                shutil.copyfile(file, folder / file.name)
        for name, table in tables.items():
            _write_table(folder / name, table)
        yield folder


def _cached(repo: str) -> Path | None:
    """Return the folder of a repository in the cache; None if the cache lacks any file of it."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(repo, allow_patterns=list(hf.DOWNLOADED_FILES), local_files_only=True))
        hf.weight_files(folder)
    except Exception:  # the library has several kinds for a repository that is not in the cache
        return None
    return folder


def _tables(repo: str, configs: Path) -> dict[str, Any]:
    """Return the tables of the safetensors files by file name; {} for a repository that needs complete files."""
    if not (configs / "config.json").is_file() or is_quantized_folder(hf.read_config(configs), configs):
        return {}
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        names = [name for name in api.list_repo_files(repo) if name.endswith(hf.SAFETENSORS_SUFFIX) and "/" not in name]
        return {name: api.parse_safetensors_file_metadata(repo, name) for name in names}
    except Exception as error:  # as in `hf.download`
        raise hf.download_error(repo, error) from error


def _write_table(file: Path, table: Any) -> None:
    """Write a file with the table of a safetensors file and its size, whose other bytes are zero."""
    entries: dict[str, Any] = {
        name: {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": list(tensor.data_offsets)}
        for name, tensor in table.tensors.items()
    }
    header = json.dumps({"__metadata__": table.metadata or {}, **entries}).encode()
    end = max((tensor.data_offsets[1] for tensor in table.tensors.values()), default=0)
    with open(file, "wb") as handle:
        handle.write(len(header).to_bytes(8, "little") + header)
        handle.truncate(8 + len(header) + end)
