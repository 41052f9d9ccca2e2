"""Folders of quantised models in the format compressed-tensors, against its definition in plain NumPy."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from written_models import words

import specjax
from specjax import Target, UsageError, save_model
from specjax.models import LlamaConfig, init_params, make_model
from specjax.models.loading.formats.compressed_writing import common_format, pack
from specjax.models.storage import SCHEMES, quantized_config, with_quantized
from specjax.numerics.quantized_array import FLOAT8, QuantizedArray, WeightFormat, as_float_weights

SHAPES = dict(
    vocab_size=96, width=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, mlp_width=160, max_positions=64,
    name="tiny",
)  # fmt: skip
CONFIGS = {
    "tied": LlamaConfig(**SHAPES),
    "stacked": LlamaConfig(**SHAPES, tied=False, stacked=True, qkv_bias=True),
    "joined": LlamaConfig(**SHAPES, joined=("qkv", "gate_up")),
    "phi3": LlamaConfig(**SHAPES | {"head_dim": 16}, rotary_dim=12, window=7),
}


def quantised(config, scheme, platform="cpu"):
    config = quantized_config(config, scheme, platform)
    return Target(make_model(config), init_params(config, jax.random.key(0)))


DTYPES = {"F32": "float32", "I8": "int8", "I32": "int32", "I64": "int64", "F8_E4M3": FLOAT8}


def read(folder):
    """Return the tensors of a file by name. The library cannot read float8 with NumPy."""
    contents = (folder / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(contents[:8], "little")
    entries = json.loads(contents[8:start])
    entries.pop("__metadata__")
    part = lambda entry: contents[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]]
    array = lambda entry: np.frombuffer(part(entry), jnp.dtype(DTYPES[entry["dtype"]])).reshape(entry["shape"])
    return {name: array(entry) for name, entry in entries.items()}


def expanded(tensors, module, bits):
    """Return the matrix of a module by the definition of the format, in float64."""
    scales = tensors[f"{module}.weight_scale"].astype(np.float64)
    if f"{module}.weight" in tensors:
        values = tensors[f"{module}.weight"].astype(np.float64)
    else:
        outputs, inputs = tensors[f"{module}.weight_shape"]
        words = tensors[f"{module}.weight_packed"].astype(np.int64)
        assert words.shape[0] == outputs and tensors[f"{module}.weight_packed"].dtype == np.int32
        per_word = 32 // bits
        values = np.stack([words >> bits * i & (1 << bits) - 1 for i in range(per_word)], -1)
        values = values.reshape(outputs, -1)[:, :inputs] - 2.0 ** (bits - 1)
    return values * np.repeat(scales, values.shape[1] // scales.shape[1], 1)


FORMATS = {
    "int8": ("int-quantized", 8, None), "int8-weights": ("pack-quantized", 8, None),
    "int4-weights": ("pack-quantized", 4, 32), "fp8": ("float-quantized", 8, None),
}  # fmt: skip


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_file_has_the_values_of_the_model(name, scheme, tmp_path):
    target = quantised(CONFIGS[name], scheme)
    save_model(tmp_path, target)
    kind, bits, group = FORMATS[scheme]
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    settings = config["config_groups"]["group_0"]
    assert (config["quant_method"], config["format"]) == ("compressed-tensors", kind)
    assert settings["targets"] == ["Linear", "Embedding"] and not config["ignore"]
    weights = settings["weights"]
    assert (weights["num_bits"], weights["group_size"], weights["symmetric"]) == (bits, group, True)
    assert weights["strategy"] == ("group" if group else "channel")
    assert weights["type"] == ("float" if scheme == "fp8" else "int")
    inputs = settings["input_activations"]
    assert inputs is None if scheme != "int8" else (inputs["dynamic"], inputs["strategy"]) == (True, "token")
    tensors, params = read(tmp_path), specjax.models.storage.split_projections(target.params, target.model.config)
    modules = {"model.embed_tokens": params["embed"]["weight"]}
    for i in range(2):
        layer = jax.tree.map(lambda x, i=i: x[i], params["layers"]) if CONFIGS[name].stacked else params["layers"][i]
        down, o = layer["mlp"]["down"]["weight"], layer["attention"]["o"]["weight"]
        prefix = f"model.layers.{i}"
        modules |= {f"{prefix}.mlp.down_proj": down, f"{prefix}.self_attn.o_proj": o}
        if name == "phi3":
            parts = [layer["attention"][part]["weight"].expand() for part in "qkv"]
            modules[f"{prefix}.self_attn.qkv_proj"] = np.concatenate(parts)
        else:
            modules[f"{prefix}.self_attn.k_proj"] = layer["attention"]["k"]["weight"]
    for module, matrix in modules.items():
        wanted = matrix.expand() if isinstance(matrix, QuantizedArray) else matrix
        np.testing.assert_array_equal(expanded(tensors, module, bits).astype(np.float32), wanted)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("inputs", [32, 35])
def test_words_are_those_of_the_library(bits, inputs):
    library = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(0).integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (6, inputs)).astype(np.int8)
    wanted = library.pack_to_int32(torch.tensor(values), bits)
    np.testing.assert_array_equal(pack(values, bits), wanted.numpy())


def test_mixed_formats_get_one_that_has_all_values():
    four, eight = WeightFormat(4, "int4", 32), WeightFormat(6, "int8", 16)
    assert common_format([four, four], [64, 96], "m")[1:3] == (4, 32)
    assert common_format([four, eight], [64, 96], "m")[1:3] == (8, 16)
    assert common_format([four, WeightFormat()], [64, 48], "m")[1:3] == (8, 16)
    for forms, reason in (
        ([WeightFormat(4, "uint4", 32, True)], "an offset per group"),
        ([four, WeightFormat(8, FLOAT8)], "kinds of numbers or products differ"),
        ([WeightFormat(), WeightFormat(inputs="int8")], "kinds of numbers or products differ"),
    ):
        with pytest.raises(UsageError, match=rf"m has matrices .*{reason}"):
            common_format(forms, [64], "m")


def test_a_model_that_cannot_be_written_leaves_no_file(tmp_path):
    form = WeightFormat(4, "int8", 32, True)
    config = dataclasses.replace(CONFIGS["tied"], quantized=(("layers.*", form),))
    params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), specjax.models.abstract_params(config))
    with pytest.raises(UsageError, match=r"tiny has matrices with an offset per group"):
        save_model(tmp_path / "out", Target(make_model(config), params))
    assert not (tmp_path / "out").exists()


def test_modules_that_stay_floats_are_ignored(tmp_path):
    config = with_quantized(CONFIGS["tied"], (("layers.*", SCHEMES["int8"]),), "cpu")
    save_model(tmp_path, Target(make_model(config), init_params(config, jax.random.key(0))))
    written = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert written["ignore"] == ["model.embed_tokens"]
    assert written["config_groups"]["group_0"]["targets"] == ["Linear"]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", CONFIGS)
def test_load_keeps_the_same_matrices(name, scheme, tmp_path):
    target = quantised(CONFIGS[name], scheme)
    save_model(tmp_path, target, words())
    options = {"stacked": CONFIGS[name].stacked, "joined": bool(CONFIGS[name].joined)}
    actual = specjax.load(tmp_path, keep_quantized=True, **options)[0]
    is_matrix = lambda leaf: isinstance(leaf, QuantizedArray)
    matrices = [
        [leaf for leaf in jax.tree.leaves(params, is_leaf=is_matrix) if is_matrix(leaf)]
        for params in (actual.params, target.params)
    ]
    assert len(matrices[0]) == len(matrices[1]) > 0
    for ours, wanted in zip(*matrices, strict=True):
        np.testing.assert_array_equal(ours.values, wanted.values)
        np.testing.assert_array_equal(ours.expand(), wanted.expand())
        assert ours.inputs == wanted.inputs
    floats = specjax.load(tmp_path, keep_quantized=False, **options)[0]
    jax.tree.map(np.testing.assert_array_equal, floats.params, as_float_weights(target.params))
