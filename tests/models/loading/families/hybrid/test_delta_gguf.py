"""GGUF files of Qwen3.5, Qwen3-Next and LFM2, against the classes of transformers."""

import jax
import numpy as np
import pytest
from hybrid_gguf import write
from hybrid_logits import whole_text_logits
from hybrid_models import MAKERS, torch, varied

from specjax import models
from specjax.models.loading.formats import gguf as reader
from specjax.models.loading.tensors.assembly import assemble, check_tensors


def logits_of(checkpoint, tokens):
    check_tensors(checkpoint)
    params, model = assemble(checkpoint), models.make_model(checkpoint.config)
    return jax.jit(whole_text_logits, static_argnums=0)(model, params, tokens)


@pytest.mark.parametrize("name", MAKERS)
def test_logits(name, tmp_path, recwarn):
    model = varied(MAKERS[name])
    checkpoint, _ = reader.read(write(model, tmp_path / "model.gguf"), dtype="float32")
    assert not [str(warning.message) for warning in recwarn if "not read" in str(warning.message)]
    tokens = np.random.default_rng(0).integers(0, 64, (2, 24))
    with torch.no_grad():
        expected = model(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(logits_of(checkpoint, tokens), expected, atol=1e-5 * max(1.0, np.abs(expected).max()))


def test_the_earlier_form_of_qwen3_next_has_the_same_parameters(tmp_path):
    """The matrix `ssm_in` has queries, keys, values and gates by key heads."""
    model = varied(MAKERS["qwen3_next"])
    read = lambda name, **form: reader.read(write(model, tmp_path / name, **form), dtype="float32")[0]
    earlier, later = read("earlier.gguf", earlier=True), read("later.gguf")
    check_tensors(earlier)
    assert "blk.0.ssm_in.weight" in earlier.tensors and "blk.0.ssm_in.weight" not in later.tensors
    jax.tree.map(np.testing.assert_array_equal, assemble(earlier), assemble(later))
