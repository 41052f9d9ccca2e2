"""gpt-oss as it is published: experts in MXFP4, the chat format of its own template, and trees across its window."""

import dataclasses
import json
import warnings

import jax
import numpy as np
import pytest
import quantized_files
from expert_models import fields_of, logits_of, make, torch
from hybrid_logits import whole_text_logits
from safetensors.numpy import save_file

import specjax
from specjax import models
from specjax.models.experts.routing import Routing
from specjax.models.loading.formats import hf
from specjax.models.loading.formats.writing import save_model
from specjax.models.loading.tensors.assembly import assemble, check_tensors
from specjax.models.loading.tensors.file_formats import with_file_formats

TOKENS = np.random.default_rng(0).integers(0, 64, (2, 24))
METHOD = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
    "quant_method": "mxfp4",
}  # fmt: skip
_logits = jax.jit(whole_text_logits, static_argnums=0)


def write_mxfp4(folder, **changes):
    """Write a folder with experts in MXFP4, and return the model of transformers with the same weights.

    Blocks are those of [out, in] matrices, whose even outputs are the gates.
    """
    model = make("gpt_oss", **changes)
    tensors = {}
    for name, parameter in model.state_dict().items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = parameter.numpy()
            continue
        parts = [quantized_files.mxfp4(x.T.numpy().astype(np.float64), ("blocks", "scales")) for x in parameter]
        tensors |= {f"{name}_{part}": np.stack([p[0][part] for p in parts]) for part in ("blocks", "scales")}
        parameter.data[:] = torch.tensor(np.stack([matrix.T for _, matrix, _ in parts]), dtype=torch.float32)
    folder.mkdir(exist_ok=True)
    save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, folder / "model.safetensors")
    fields = fields_of("gpt_oss", **changes) | {"quantization_config": METHOD}
    (folder / "config.json").write_text(json.dumps(fields))
    return model


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Return a checkpoint in the published form, and the logits of transformers."""
    folder = tmp_path_factory.mktemp("gpt_oss")
    expected = logits_of(write_mxfp4(folder / "model"), TOKENS)
    checkpoint = hf.read(folder / "model", dtype="float32", name="gpt_oss")
    check_tensors(checkpoint)
    return checkpoint, expected


def error(checkpoint, expected):
    """Return the largest difference of logits, divided by the tolerance of parity."""
    logits = _logits(models.make_model(checkpoint.config), assemble(checkpoint), TOKENS)
    return np.abs(np.asarray(logits) - expected).max() / (1e-5 * max(1.0, np.abs(expected).max()))


def test_experts_are_expanded(published):
    assert error(*published) < 1


def test_experts_stay_quantised(published):
    """The numbers of MXFP4 are exact in int8 with half the scale, so the logits are those of expanded experts."""
    checkpoint, expected = published
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantized = checkpoint._replace(config=with_file_formats(checkpoint, "cpu"))
    params = assemble(quantized)
    assert params["layers"][0]["mlp"]["expert_up"]["weight"].values.dtype == np.int8
    assert error(quantized, expected) < 1


def test_experts_in_mxfp4_are_saved(published, tmp_path):
    """They are written as whole numbers with scales, a tensor for each matrix of an expert."""
    checkpoint, expected = published
    quantized = checkpoint._replace(config=with_file_formats(checkpoint, "cpu"))
    save_model(tmp_path, specjax.Target(models.make_model(quantized.config), assemble(quantized)))
    again = hf.read(tmp_path, dtype="float32", name="gpt_oss")
    check_tensors(again)
    again = again._replace(config=with_file_formats(again, "cpu"))
    assert assemble(again)["layers"][0]["mlp"]["expert_up"]["weight"].scales.shape == (8, 64, 2)
    assert error(again, expected) < 1


def test_a_file_whose_gates_come_first_has_other_logits(published):
    checkpoint, expected = published
    gate, up = (f"layers.*.mlp.expert_{part}.weight" for part in ("gate", "up"))
    first = {gate: np.arange(64), up: np.arange(64, 128)}
    stored = {path: checkpoint.stored[path]._replace(order=order) for path, order in first.items()}
    assert error(checkpoint._replace(stored=checkpoint.stored | stored), expected) > 20


def test_the_bias_of_the_down_projection_is_weighted(published):
    """Another weight of an expert changes the part of its bias in the logits."""
    checkpoint, expected = published
    sizes = checkpoint.config.experts
    config = dataclasses.replace(checkpoint.config, experts=sizes._replace(routing=Routing(4, "softmax")))
    assert error(checkpoint._replace(config=config), expected) > 20
