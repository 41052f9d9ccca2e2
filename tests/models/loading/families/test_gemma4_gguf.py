"""Gemma 4 in GGUF files, written with the tensor names of the package gguf, against the folders of transformers."""

import dataclasses

import jax
import numpy as np
import pytest
from gemma4_models import gemma4, torch, write_gguf

from specjax.errors import UsageError
from specjax.models.loading.formats import gguf, hf
from specjax.models.loading.tensors.assembly import assemble
from specjax.models.rotary import RopeScaling


@pytest.mark.parametrize("form", ["small", "large"])
def test_a_file_has_the_config_and_the_parameters_of_the_folder(form, tmp_path):
    torch.manual_seed(0)
    model = gemma4(form)
    model.save_pretrained(tmp_path / "folder")
    expected = hf.read(tmp_path / "folder", dtype="float32", stacked=False)
    file, _ = gguf.read(write_gguf(model, tmp_path / "model.gguf"), dtype="float32", stacked=False)
    eps = file.config.norm_eps  # the file has it in float32
    assert file.config == dataclasses.replace(expected.config, norm_eps=eps) and eps == pytest.approx(1e-6, rel=1e-6)
    assert file.config.of_layer(1).rope_scaling == RopeScaling("proportional", 1.0, share=0.25)
    jax.tree.map(np.testing.assert_array_equal, assemble(file), assemble(expected))


UNEQUAL = [1, 1, 2, 1, 1, 1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention.head_count_kv": UNEQUAL}, "head_count_kv .1, 1, 2, 1, 1, 1., which must be from 1 to"),
        ({"attention.head_count_kv": [0] * 6}, "which must be from 1 to"),
        ({"attention.sliding_window_pattern": [True] * 6}, "has a last layer with a window"),
        ({"attention.shared_kv_layers": 3}, "has MLPs of .* hidden units, which must be equal in all layers, or twice"),
        ({"rope.dimension_count": 8}, "rope.dimension_count 8, and heads of 32 numbers"),
        ({"attention.key_length": 16, "rope.dimension_count": 16}, "rope_freqs.weight, whose divisors are not 8 num"),
        ({"expert_count": 4}, "mixture of 4 experts"),
        ({"attention.sliding_window": None}, "sliding_window"),
    ],
)  # fmt: skip
def test_other_files_are_refused(changes, words, model, tmp_path):
    with pytest.raises(UsageError, match=words):
        gguf.read(write_gguf(model, tmp_path / "model.gguf", **changes), dtype="float32")


@pytest.fixture(scope="module")
def model():
    return gemma4("small")


def test_a_file_without_optional_fields_has_the_values_of_published_models(model, tmp_path):
    left_out = dict.fromkeys(
        ("rope.freq_base", "rope.freq_base_swa", "rope.dimension_count", "rope.dimension_count_swa")
    )
    config = gguf.read(write_gguf(model, tmp_path / "model.gguf", **left_out), dtype="float32")[0].config
    assert (config.rope_base, config.of_layer(1).rope_base) == (1e4, 1e6)
    assert [kind.keys_of for kind in config.kinds] == [None, None, None, None, 2, 3]
