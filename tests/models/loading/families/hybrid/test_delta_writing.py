"""Saved models of Qwen3.5, Qwen3-Next and LFM2: transformers and specjax read them back."""

import json

import jax
import numpy as np
import pytest
from hybrid_models import MAKERS, torch, transformers, varied

from specjax import models
from specjax.models.loading.families.config_fields import ConfigFields
from specjax.models.loading.formats import hf
from specjax.models.loading.formats.writing import save_model
from specjax.models.loading.tensors.assembly import assemble
from specjax.types import Target


@pytest.mark.parametrize("name", MAKERS)
def test_saved_models_are_equal_to_the_bit(name, tmp_path):
    model = varied(MAKERS[name])
    model.save_pretrained(tmp_path / "original")
    loaded = hf.read(tmp_path / "original", dtype="float32", stacked=name == "qwen3_5")
    params = assemble(loaded)
    save_model(tmp_path / "saved", Target(models.make_model(loaded.config), params))
    again = hf.read(tmp_path / "saved", dtype="float32", stacked=name == "qwen3_5")
    assert again.config == loaded.config
    for first, second in zip(jax.tree.leaves(params), jax.tree.leaves(assemble(again)), strict=True):
        np.testing.assert_allclose(first, second, rtol=3e-7)  # decays are stored as logarithms
    tokens = torch.arange(12)[None]
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    with torch.no_grad():
        np.testing.assert_allclose(reference(tokens).logits, model(tokens).logits, atol=2e-6)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next"])
def test_a_stated_part_of_the_rotation_counts_before_that_of_the_family(name, tmp_path):
    """Files state the part in either place, or not at all."""
    model = MAKERS[name]()
    model.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    rope = fields.pop("rope_parameters")
    fields.pop("partial_rotary_factor", None)
    read = lambda changes: hf.parse_config(ConfigFields(fields | changes, "c"), dtype="float32")[0].rotary_dim
    assert read({"rope_parameters": rope | {"partial_rotary_factor": 0.5}}) == 8
    assert read({"partial_rotary_factor": 0.5}) == 8
    assert read({}) == read({"rope_parameters": rope | {"partial_rotary_factor": 0.25}}) == 4
