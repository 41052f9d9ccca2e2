"""`specjax.check_model` on a tiny model of each family, against transformers where the family's code is there."""

from __future__ import annotations

import hybrid_families
import jax
import numpy as np
import pytest
from expert_models import PUBLISHED, logits_of, save
from written_models import VARIANTS, drawn

from specjax import check_model, models
from specjax.models.loading.formats import hf
from specjax.models.loading.tensors.assembly import assemble


def _check(folder, model, name):
    """Check the model in a folder. Its logits must be those of the model of transformers too."""
    checkpoint = hf.read(folder, dtype="float32", name=name)
    shape = lambda tokens: jax.ShapeDtypeStruct((*tokens.shape, checkpoint.config.vocab_size), np.float32)
    call = lambda tokens: logits_of(model, np.asarray(tokens))
    reference = lambda params, tokens: jax.pure_callback(call, shape(tokens), tokens)
    return check_model(models.make_model(checkpoint.config), assemble(checkpoint), reference=reference)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", hybrid_families.FAMILIES)
def test_hybrid_families(name, tmp_path):
    model = hybrid_families.FAMILIES[name]()
    model.save_pretrained(tmp_path)
    report = _check(tmp_path, model, name)
    assert report and report.promises[0].name == "reference", report


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PUBLISHED)
def test_mixtures(name, tmp_path):
    model = save(name, tmp_path)
    report = _check(tmp_path, model, name)
    assert report and report.promises[0].name == "reference", report


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", VARIANTS)
def test_attention_decoders(name):
    target = drawn(VARIANTS[name])
    report = check_model(target.model, target.params)
    assert report, report


@pytest.mark.exhaustive
def test_weights_of_another_model_are_found(tmp_path):
    model = hybrid_families.FAMILIES["lfm2"]()
    model.save_pretrained(tmp_path)
    model.model.embed_tokens.weight.data.mul_(1.5)
    report = _check(tmp_path, model, "lfm2")
    assert not report and report.promises[-1].name == "reference", report
