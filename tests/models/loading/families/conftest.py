"""Checkpoints of hybrid families, written by transformers with random weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hybrid_logits import whole_text_logits

from specjax import models
from specjax.models.loading.families.unread_fields import describe_unread
from specjax.models.loading.formats import hf
from specjax.models.loading.tensors.assembly import assemble, check_tensors

LENGTH, ROWS = 24, 2


@pytest.fixture
def check_parity(tmp_path):
    """Return a function that saves a model of transformers, and compares its logits with those of the loaded one."""
    pytest.importorskip("transformers")
    from hybrid_models import torch, varied  # skips without torch

    def check(make, *, stacked: bool = False, atol: float = 2e-6):
        reference = varied(make)
        reference.save_pretrained(tmp_path)
        fields = hf.read_config(tmp_path)
        checkpoint = hf.read(tmp_path, fields, dtype="float32", stacked=stacked)
        assert describe_unread(fields) == ()
        check_tensors(checkpoint)
        params, model = assemble(checkpoint), models.make_model(checkpoint.config)
        tokens = np.random.default_rng(0).integers(0, model.vocab_size, (ROWS, LENGTH))
        logits = jax.jit(whole_text_logits, static_argnums=0)(model, params, jnp.asarray(tokens))
        with torch.no_grad():
            expected = reference(torch.tensor(tokens)).logits.numpy()
        np.testing.assert_allclose(logits, expected, atol=atol * max(1.0, np.abs(expected).max()))
        return checkpoint.config, params, expected, jnp.asarray(tokens)

    return check
