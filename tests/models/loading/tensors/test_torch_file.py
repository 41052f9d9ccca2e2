"""Weights saved by PyTorch are read without PyTorch, and no code in the file is run."""

import collections
import os
import pickle
import zipfile

import jax
import numpy as np
import pytest
from hostile import attacks, changed_bytes, survives

from specjax import UsageError
from specjax.models import load
from specjax.models.loading.tensors import torch_file
from specjax.models.loading.tensors.tensors import read_rows

torch = pytest.importorskip("torch")


@pytest.fixture
def saved(tmp_path):
    def save(contents, name="pytorch_model.bin"):
        torch.save(contents, tmp_path / name)
        return tmp_path / name

    return save


def test_every_kind_of_entry(saved):
    weights = collections.OrderedDict(
        a=torch.arange(12.0).reshape(3, 4), half=torch.ones(5, dtype=torch.bfloat16) / 3, step=7,
        parameter=torch.nn.Parameter(torch.rand(2, 3)), part=torch.arange(20.0).reshape(5, 4)[2:],
    )  # fmt: skip
    tensors = torch_file.read(saved(weights))
    assert set(tensors) == {"a", "half", "parameter", "part"}
    for name, tensor in tensors.items():
        actual = read_rows(tensor, 0, tensor.shape[0])
        np.testing.assert_array_equal(actual, weights[name].detach().float().numpy())


def test_state_of_a_module_with_its_metadata(saved):
    module = torch.nn.Linear(3, 4)
    assert set(torch_file.read(saved(module.state_dict()))) == {"weight", "bias"}


@pytest.mark.parametrize("sharded", [False, True])
def test_a_folder_loads_as_it_does_from_safetensors(sharded, tiny, tmp_path):
    model = tiny.model("llama")
    folder = tiny.save(model, tmp_path)
    expected, _ = load(folder)
    (folder / "model.safetensors").unlink()
    state = model.state_dict()
    names = sorted(state)
    if sharded:
        shards = {"a.bin": names[:3], "b.bin": names[3:]}
        for shard, stored in shards.items():
            torch.save({name: state[name] for name in stored}, folder / shard)
        table = {name: shard for shard, stored in shards.items() for name in stored}
        (folder / "pytorch_model.bin.index.json").write_text(str({"weight_map": table}).replace("'", '"'))
    else:
        torch.save(state, folder / "pytorch_model.bin")
    actual, _ = load(folder)
    jax.tree.map(np.testing.assert_array_equal, actual.params, expected.params)


class Runs:
    """A pickle that would run code."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({"a": torch.rand(3, 4).T}, "in a transposed or sliced view"),
        ({"a": torch.rand(3, 4).expand(2, 3, 4)}, "in a transposed or sliced view"),
        ([1, 2], "no table of weights"),
        (torch.nn.Linear(2, 2), "contains code"),
        ({"a": torch.arange(3)}, "I64, which specjax cannot read"),
    ],
)
def test_what_is_no_table_of_weights_is_named(contents, message, saved):
    with pytest.raises(UsageError, match=message):
        torch_file.read(saved(contents))


def test_nothing_in_a_pickle_is_run(saved, tmp_path):
    for contents in ({"a": Runs(tmp_path / "ran")}, Runs(tmp_path / "ran")):
        with pytest.raises(UsageError, match=r"contains code .*mkdir.*, which specjax never runs"):
            torch_file.read(saved(contents))
    assert not (tmp_path / "ran").exists()


def with_pickle(file, contents: bytes) -> None:
    """Return the file with another description of its tensors."""
    with zipfile.ZipFile(file) as archive:
        entries = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, contents if name.endswith("data.pkl") else data)


def test_attributes_that_a_pickle_sets_change_nothing(saved):
    """BUILD sets attributes of any object on the stack, functions and classes included."""
    file = saved({"a": torch.rand(2)})
    for target in (b"ccollections\nOrderedDict\n", b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch\nFloatStorage\n"):
        with_pickle(file, b"\x80\x02" + target + b"}X\x01\x00\x00\x00xK\x01sb.")
        assert survives(lambda: torch_file.read(file)) is not None
    assert not hasattr(torch_file._rebuild, "x")
    with_pickle(file, b"\x80\x02}r\xff\xff\xff\x7f.")  # a memo of two thousand million places
    assert survives(lambda: torch_file.read(file)) is None


def test_files_of_before_zip_are_named(tmp_path):
    (tmp_path / "old.bin").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(UsageError, match="load it in PyTorch and save it again"):
        torch_file.read(tmp_path / "old.bin")


@pytest.mark.parametrize(("rng", "count"), attacks(300))
def test_damaged_files_are_refused_in_a_sentence(rng, count, saved):
    file = saved({"a.weight": torch.rand(4, 3), "b": torch.ones(5, dtype=torch.float16)})
    full = file.read_bytes()
    with zipfile.ZipFile(file) as archive:
        described = archive.read("pytorch_model/data.pkl")
    refused = 0
    for case in range(count):
        file.write_bytes(full)
        if case % 2:
            with_pickle(file, changed_bytes(rng, described))
        else:
            file.write_bytes(changed_bytes(rng, full))

        def use():
            for tensor in torch_file.read(file).values():
                if tensor.shape:
                    read_rows(tensor, 0, tensor.shape[0])

        refused += survives(use, case) is not None
    assert count // 4 < refused < count


def test_tables_by_nested_tuples_end(saved):
    """The hash of tuples with shared parts takes as long as without sharing, and no interrupt ends it."""
    file = saved({"a": torch.rand(2)})
    nested = b"\x80\x02}(" + b")" + b"q\x00h\x00\x86" * 60 + b"K\x01u."
    with_pickle(file, nested)
    assert "keys other than names" in survives(lambda: torch_file.read(file))


def test_compressed_entries_are_refused(saved):
    """Compressed entries, whose stated sizes may be wrong, are refused."""
    file = saved({"a": torch.rand(2)})
    with zipfile.ZipFile(file) as archive:
        entries = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    assert "compressed or damaged" in survives(lambda: torch_file.read(file))
