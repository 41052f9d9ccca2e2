"""GGUF files of Mamba-2 and its hybrids, against the classes of transformers."""

import jax
import numpy as np
import pytest
from hybrid_logits import whole_text_logits
from hybrid_models import torch, varied
from mamba_gguf import gguf, write
from mamba_models import FORMS, make
from tiers import those

from specjax import models
from specjax.errors import UsageError
from specjax.models.loading.formats import gguf as reader
from specjax.models.loading.tensors.assembly import assemble, check_tensors

BOTH_FORMS = [
    form for form in FORMS if "limit" not in form and "before" not in form and form != "granite with rotation"
]
"""Forms that a GGUF file can express."""
QUICK = {"mamba2", "bamba", "nemotron_h", "granite without rotation", "falcon_h1"}


@pytest.mark.parametrize("form", those(QUICK, BOTH_FORMS))
def test_logits(form, tmp_path, recwarn):
    model = varied(make(form))
    checkpoint, _ = reader.read(write(model, tmp_path / "model.gguf"), dtype="float32")
    assert not [str(warning.message) for warning in recwarn if "not read" in str(warning.message)]
    check_tensors(checkpoint)
    params, ours = assemble(checkpoint), models.make_model(checkpoint.config)
    tokens = np.random.default_rng(0).integers(0, 64, (2, 24))
    logits = jax.jit(whole_text_logits, static_argnums=0)(ours, params, tokens)
    with torch.no_grad():
        expected = model(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(logits, expected, atol=1e-5 * max(1.0, np.abs(expected).max()))


def test_files_that_do_not_fit(tmp_path):
    file = write(varied(make("granite without rotation")), tmp_path / "model.gguf")
    for change, message in {
        "head_count_kv": "attention.head_count_kv .* must be one number in all layers with attention",
        "time_step_rank": "ssm.inner_size 64, which must be a multiple of granitehybrid.ssm.time_step_rank, 5",
        "kind": "must have one of ssm_in, attn_q in its layer 0, but has 0",
    }.items():
        with pytest.raises(UsageError, match=message):
            read_changed(file, change)


def read_changed(file, change):
    """Parse the metadata and the shapes of a file with one change."""
    meta, tensors = reader.read_header(file)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    if change == "head_count_kv":
        meta["granitehybrid.attention.head_count_kv"] = [1, 2, 0]
    elif change == "time_step_rank":
        meta["granitehybrid.ssm.time_step_rank"] = 5
    else:
        shapes.pop("blk.0.ssm_in.weight")
    family = reader.registry.by_gguf("granitehybrid", "file")
    return family.config_from_gguf(reader.ConfigFields(meta, "file", "granitehybrid."), shapes, {}, dtype="float32")


def test_architectures_that_are_refused_by_reason(tmp_path):
    for arch, reason in {"mamba": "Mamba-1 layers", "nemotron_h_moe": "a mixture of experts"}.items():
        writer = gguf.GGUFWriter(str(tmp_path / arch), arch)
        writer.add_block_count(1)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        with pytest.raises(UsageError, match=reason):
            reader.read(tmp_path / arch, dtype="float32")
