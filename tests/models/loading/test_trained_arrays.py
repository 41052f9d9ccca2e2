"""Files of filters: what is written is read back, and other files are refused by name."""

from typing import NamedTuple

import numpy as np
import pytest
from safetensors.flax import save_file

from specjax import UsageError, adaptive
from specjax.adaptive.dynamax import Probes, dynamax
from specjax.controllers.spec_kv import read_spec_kv
from specjax.diffusion.methods.learn2pd import above, read_filter
from specjax.models.loading.decision_heads import read_judge
from specjax.models.loading.trained_arrays import save_arrays

FILTER = above(0.5, 8)


def test_what_is_written_is_read_back_from_a_file_or_its_folder(tmp_path):
    file = tmp_path / "filter.safetensors"
    save_arrays(file, "filter", FILTER, block=8)
    for source in (file, tmp_path):
        result = read_filter(source)
        assert type(result) is type(FILTER)
        for x, y in zip(result, FILTER, strict=True):
            np.testing.assert_array_equal(x, y)


class Other(NamedTuple):
    weight: np.ndarray


def test_other_files_are_refused(tmp_path):
    file = tmp_path / "filter.safetensors"
    with pytest.raises(UsageError, match=r'there is no file ".*filter.safetensors" of filter; `specjax train`'):
        read_filter(tmp_path)
    save_arrays(file, "other", Other(np.ones(3)))
    with pytest.raises(UsageError, match=r"weight.*, and filter are weight1, bias1"):
        read_filter(file)
    save_file(FILTER._asdict() | {"bias2": np.full(8, np.nan, np.float32)}, file)
    with pytest.raises(UsageError, match="has values in bias2 that are not finite"):
        read_filter(file)
    file.unlink()
    with pytest.raises(UsageError, match="bias2 has values that are not finite; train with a smaller learning rate"):
        save_arrays(file, "filter", FILTER._replace(bias2=np.full(8, np.nan)))
    assert not file.exists()
    with pytest.raises(UsageError, match="must end in"):
        save_arrays(tmp_path / "filter.npz", "filter", FILTER)
    (tmp_path / "x.txt").write_text("")
    with pytest.raises(UsageError, match="bin file of filter"):
        read_filter(tmp_path / "x.txt")


@pytest.mark.parametrize(
    ("read", "content"),
    [
        (adaptive.read_probes, "probes of layers"), (adaptive.read_corrections, "corrections of layers"),
        (read_judge, "a judge's weight and bias"), (read_filter, "filter"), (read_spec_kv, "SpecKV's network"),
    ],
)  # fmt: skip
def test_all_readers_refuse_other_paths_in_the_same_words(tmp_path, read, content):
    with pytest.raises(UsageError, match=rf"x\.npz is not a \.safetensors, \.pt or \.bin file of {content}"):
        read(tmp_path / "x.npz")
    with pytest.raises(UsageError, match=rf'there is no file "{tmp_path}/x\.pt" of {content}; `\w+.*` writes it'):
        read(tmp_path / "x.pt")


def test_probes_of_other_layers_are_refused():
    """An untrained probe gives 1/2 and would never let a token exit."""
    weight = np.zeros((4, 8), np.float32)
    weight[1] = 1
    dynamax(Probes(weight, np.zeros(4)), every=2)
    with pytest.raises(UsageError, match="every=1 tests layer 0, but the probes are of the layers 1; give the value"):
        dynamax(Probes(weight, np.zeros(4)), every=1)
