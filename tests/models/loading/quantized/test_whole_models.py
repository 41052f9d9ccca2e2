"""Tiny models that are saved in each format give the logits of the float model with the matrices of the packers."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import quantized_files as files

from specjax.errors import CheckpointWarning, UsageError
from specjax.models import load
from specjax.numerics.quantized_array import QuantizedArray

TOLERANCE = 1e-5  # of the largest logit

FORMATS = {
    "gptq": (files.gptq, dict(symmetric=True)),
    "gptq-3": (files.gptq, dict(bits=3, version="gptq_v2")),
    "awq": (files.awq, {}),
    "packed": (files.pack_quantized, dict(symmetric=False)),
    "int8": (files.int_quantized, {}),
    "float8": (files.float_quantized, {}),
    "fp8": (files.fp8, dict(block=(24, 16))),
    "fp8-of-large-blocks": (files.fp8, {}),
    "bnb-int8": (files.bnb_int8, {}),
    "mxfp4": (files.mxfp4, {}),
}
EXPANDED = {
    "nf4": (files.nf4, dict(twice=True)),
    "gptq-unsorted": (files.gptq, dict(order=True)),
}


def is_linear(name: str, module) -> bool:
    import torch

    return isinstance(module, torch.nn.Linear) and name != "lm_head"


def save_quantized(model, folder, make, options, tiny):
    """Save a torch model with its linear layers in a format, and give it their matrices. Return the folder."""
    import torch

    folder = tiny.save(model, folder)
    tensors, config = {name: value.numpy() for name, value in model.state_dict().items()}, {}
    for name, module in model.named_modules():
        if not is_linear(name, module):
            continue
        weight = tensors.pop(f"{name}.weight").astype(np.float64)
        if options.get("order") is not None:
            options = options | {"order": np.random.default_rng(3).permutation(np.arange(weight.shape[1]) // 16)}
        parts, matrix, config = make(weight, **options)
        tensors |= {f"{name}.{part}": value for part, value in parts.items()}
        module.weight.data = torch.tensor(matrix, dtype=torch.float32)
    files.write(folder / "model.safetensors", tensors)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": config}))
    return folder


def round_inputs(model, make, group):
    """Round the inputs of the linear layers of a torch model as the files' authors do."""
    import torch

    def hook(module, inputs):
        x = inputs[0]
        if make is files.int_quantized:
            scale = x.abs().amax(-1, keepdim=True) / 127
            return (x / scale).round() * scale
        y = x.unflatten(-1, (-1, min(group, x.shape[-1])))
        scale = y.abs().amax(-1, keepdim=True) / 448
        return ((y / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)

    for name, module in model.named_modules():
        if is_linear(name, module):
            module.register_forward_pre_hook(hook)


def check(target, model, texts, tiny):
    expected, _ = tiny.reference(model, texts)
    for ours, theirs in zip(tiny.ours(target, texts)[0], expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE * np.abs(theirs).max())


@pytest.fixture(params=FORMATS)
def saved(request, tiny, tmp_path):
    make, options = FORMATS[request.param]
    model = tiny.model("llama", intermediate_size=64)
    return save_quantized(model, tmp_path / "model", make, options, tiny), model, make, options


def test_expanded_matrices(saved, texts, tiny):
    check(load(saved[0], keep_quantized=False)[0], saved[1], texts, tiny)


def test_kept_matrices(saved, texts, tiny):
    folder, model, make, options = saved
    target = load(folder, keep_quantized=True)[0]
    layer = target.params["layers"][1]
    for leaf in (layer["mlp"]["down"]["weight"], layer["attention"]["k"]["weight"]):
        assert isinstance(leaf, QuantizedArray) and leaf.values.dtype.itemsize == 1
    assert not isinstance(target.params["head"]["weight"], QuantizedArray)
    assert layer["mlp_norm"]["weight"].dtype == jnp.float32
    if make in (files.int_quantized, files.float_quantized, files.fp8):
        round_inputs(model, make, options.get("block", (0, 128 if make is files.fp8 else 1 << 20))[1])
    check(target, model, texts, tiny)


@pytest.mark.parametrize("name", EXPANDED)
def test_matrices_that_products_cannot_use_are_expanded_with_a_note(name, texts, tiny, tmp_path):
    model = tiny.model("llama", intermediate_size=64)
    folder = save_quantized(model, tmp_path / "model", *EXPANDED[name], tiny)
    with pytest.warns(CheckpointWarning, match="14 with " + ("codes of nf4" if name == "nf4" else "groups of inputs")):
        target = load(folder, keep_quantized=True)[0]
    check(target, model, texts, tiny)


def test_zero_biases_that_a_writer_added(texts, tiny, tmp_path):
    from safetensors.numpy import load_file, save_file

    model = tiny.model("llama", intermediate_size=64)
    folder = save_quantized(model, tmp_path / "model", *FORMATS["gptq"], tiny)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.bias"
    save_file(tensors | {name: np.zeros(32, np.float16)}, folder / "model.safetensors")
    check(load(folder)[0], model, texts, tiny)
    save_file(tensors | {name: np.ones(32, np.float16)}, folder / "model.safetensors")
    with pytest.raises(UsageError, match=f"1 unexpected .{name}"):
        load(folder)


def test_joined_and_stacked_matrices(texts, tiny, tmp_path):
    model = tiny.model("llama", intermediate_size=64)
    folder = save_quantized(model, tmp_path / "model", *FORMATS["awq"], tiny)
    target = load(folder, keep_quantized=True, stacked=True, joined=True)[0]
    assert target.params["layers"]["attention"]["qkv"]["weight"].values.shape == (2, 64, 32)
    check(target, model, texts, tiny)
