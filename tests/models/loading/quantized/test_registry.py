"""Quantised matrices of every method against the float64 matrices of the packers, and refusals."""

import json

import numpy as np
import pytest
import quantized_files as files
from hostile import attacks, changed_bytes, changed_json, survives
from ml_dtypes import float8_e5m2, float8_e8m0fnu

from specjax.errors import UsageError
from specjax.files.untrusted import guarded_read
from specjax.models.loading.families.config_fields import ConfigFields
from specjax.models.loading.formats.hf import PARTS, read_safetensors
from specjax.models.loading.quantized import as_matrices, method_of
from specjax.models.loading.quantized.packing import signed, unpack
from specjax.models.loading.tensors.tensors import LazyTensor, QuantizedTensor, read_rows

RANDOM = np.random.default_rng(0)
WEIGHT = RANDOM.standard_normal((40, 64))
ORDER = RANDOM.permutation(np.arange(64) // 16)
STEPS = np.arange(64) // 16


def read(folder, tensors, config, name="a.b"):
    """Read one matrix from a file with these tensors."""
    file = files.write(folder / "model.safetensors", {f"{name}.{part}": array for part, array in tensors.items()})
    fields = ConfigFields({"quantization_config": config}, "config.json")
    matrices = as_matrices(read_safetensors(file, PARTS), method_of(fields, folder))
    assert not list(fields.unread())
    return matrices.pop(f"{name}.weight")


CASES = {
    **{f"gptq-{bits}": (files.gptq, dict(bits=bits)) for bits in (2, 3, 4, 8)},
    **{f"gptq-v2-{bits}": (files.gptq, dict(bits=bits, version="gptq_v2")) for bits in (3, 4)},
    "gptq-symmetric": (files.gptq, dict(symmetric=True)),
    "gptq-symmetric-v2": (files.gptq, dict(symmetric=True, version="gptq_v2", bits=8)),
    "gptq-symmetric-that-stores-8": (files.gptq, dict(symmetric=True, stored_zero=8)),
    "gptq-one-group": (files.gptq, dict(group=-1, bits=3)),
    "gptq-that-leaves-modules-out": (files.gptq, dict(symmetric=True, dynamic={"-:lm_head": {}})),
    "gptq-order-of-equal-groups": (files.gptq, dict(order=STEPS)),
    "awq": (files.awq, {}),
    "awq-one-group": (files.awq, dict(group=-1)),
    **{f"packed-{bits}": (files.pack_quantized, dict(bits=bits)) for bits in (2, 3, 4, 8)},
    **{f"packed-offsets-{bits}": (files.pack_quantized, dict(bits=bits, symmetric=False)) for bits in (3, 4, 8)},
    "packed-channel": (files.pack_quantized, dict(group=-1, symmetric=False)),
    "packed-order-of-equal-groups": (files.pack_quantized, dict(order=STEPS)),
    "packed-order-of-no-calibration": (files.pack_quantized, dict(order=None)),
    "int8": (files.int_quantized, {}),
    "int8-offsets": (files.int_quantized, dict(symmetric=False)),
    "int8-tensor": (files.int_quantized, dict(strategy="tensor", activations=None)),
    "float8-channel": (files.float_quantized, {}),
    "float8-tensor": (files.float_quantized, dict(strategy="tensor", form="naive-quantized")),
    "float8-block": (files.float_quantized, dict(strategy="block")),
    "fp8": (files.fp8, {}),
    "fp8-partial-rows": (files.fp8, dict(block=(32, 32))),
    "fp8-partial-inputs": (files.fp8, dict(block=(16, 48))),
    "fp8-e8m0": (files.fp8, dict(block=(16, 16), scale_dtype=float8_e8m0fnu)),
    "fp8-e5m2": (files.fp8, dict(dtype=float8_e5m2)),
    "bnb-int8": (files.bnb_int8, {}),
    "mxfp4": (files.mxfp4, {}),
    "mxfp4-compressed": (files.mxfp4_compressed, {}),
}
EXPANDED = {
    "gptq-unsorted": (files.gptq, dict(order=ORDER)),
    "gptq-unsorted-3": (files.gptq, dict(order=ORDER, bits=3, symmetric=True)),
    "packed-unsorted": (files.pack_quantized, dict(order=ORDER, symmetric=False)),
    "nf4": (files.nf4, {}),
    "nf4-twice": (files.nf4, dict(twice=True)),
    "fp4": (files.nf4, dict(kind="fp4")),
}


@pytest.mark.parametrize("case", [*CASES, *EXPANDED])
def test_rows_equal_the_matrix_of_the_packer(case, tmp_path):
    """Rows are read from any start, also where words and bytes contain rows of other chunks."""
    make, options = (CASES | EXPANDED)[case]
    tensors, matrix, config = make(WEIGHT, **options)
    assert np.corrcoef(matrix.reshape(-1), WEIGHT.reshape(-1))[0, 1] > 0.8, "the packer is wrong"
    tensor = read(tmp_path, tensors, config)
    assert isinstance(tensor, LazyTensor if case in EXPANDED else QuantizedTensor) and tensor.shape == (40, 64)
    for start, stop in ((0, 40), (0, 1), (5, 7), (31, 40), (37, 38)):
        rows = read_rows(tensor, start, stop)
        assert rows.dtype == np.float32
        np.testing.assert_allclose(rows, matrix[start:stop], rtol=2e-6, atol=2e-6)


def set_to(part, value, index=(0, 0)):
    """Return a change of one number of a tensor."""

    def change(tensors, config):
        array = np.array(tensors[part])
        array[index] = value
        tensors[part] = array

    return change


def cut(part):
    """Return a change that leaves out the last row of a tensor."""
    return lambda tensors, config: tensors.update({part: tensors[part][:-1]})


def without(part):
    return lambda tensors, config: tensors.pop(part)


def fields(**changes):
    return lambda tensors, config: config.update(changes)


def scheme(**changes):
    return lambda tensors, config: config["config_groups"]["group_0"].update(changes)


def weights(**changes):
    return lambda tensors, config: config["config_groups"]["group_0"]["weights"].update(changes)


def second_scheme(tensors, config):
    first = config["config_groups"]["group_0"]
    config["config_groups"]["group_1"] = first | {"weights": first["weights"] | {"num_bits": 8}}


STATIC = files.INT8_PER_TOKEN | {"dynamic": False, "strategy": "tensor"}
STATE = "weight.quant_state.bitsandbytes__nf4"
REFUSALS = {
    "quark": (files.gptq, fields(quant_method="quark"), 'the method "quark", which specjax does not read .only gptq, '),
    "modelopt": (files.gptq, fields(quant_method="modelopt"), 'the method "modelopt"'),
    "no method": (files.gptq, fields(quant_method=None), 'the method "unnamed"'),
    "gptq: marlin": (files.gptq, fields(checkpoint_format="marlin"), 'checkpoint_format "marlin"'),
    "gptq: bits": (files.gptq, fields(bits=5), "GPTQ of 5 bits; supported are 2, 3, 4 and 8"),
    "gptq: group": (files.gptq, fields(group_size=0), "group_size 0, which must be"),
    "gptq: mixed bits": (files.gptq, fields(bits=8), "which are 32 inputs of 8 bits, and .* mixed bits are not read"),
    "gptq: dynamic bits": (files.gptq, fields(dynamic={"+:x": {"bits": 8}}), "bits of their own .dynamic."),
    "gptq: groups": (files.gptq, fields(group_size=24), "groups of 24 inputs, which do not divide its 64 inputs"),
    "gptq: no zeros": (files.gptq, without("qzeros"), '"a.b" lacks the tensor qzeros'),
    "gptq: scales": (files.gptq, cut("scales"), r"scales of shape \[3, 40\], which must be \[4, 40\]"),
    "gptq: zeros": (files.gptq, cut("qzeros"), r"qzeros of shape \[3, 5\], which must be \[4, 5\]"),
    "gptq: NaN": (files.gptq, set_to("scales", np.nan), "NaN or infinity in scales"),
    "gptq: infinity": (files.gptq, set_to("scales", -np.inf), "NaN or infinity in scales"),
    "gptq: order": (files.gptq, set_to("g_idx", 4, 5), "has 4 in g_idx, which must be a group from 0 to 3"),
    "gptq: negative order": (files.gptq, set_to("g_idx", -1, 5), "has -1 in g_idx, which must be a group from 0 to 3"),
    "gptq: order of floats": (
        files.gptq, lambda t, c: t.update(g_idx=np.zeros(64, np.float32)), 'g_idx stored as "F32"',
    ),
    "awq: gemv": (files.awq, fields(version="gemv"), 'AWQ in the version "gemv", which has another layout'),
    "awq: bits": (files.awq, fields(bits=3), "AWQ of 3 bits"),
    "awq: no zeros": (files.awq, fields(zero_point=False), "AWQ without zero points"),
    "awq: groups": (files.awq, fields(group_size=48), "groups of 48 inputs, which do not divide"),
    "awq: NaN": (files.awq, set_to("scales", np.nan), "NaN or infinity in scales"),
    "compressed: nvfp4": (files.pack_quantized, fields(format="nvfp4-pack-quantized"), '"nvfp4-pack-quantized"'),
    "compressed: sparse": (
        files.pack_quantized, fields(sparsity_config={"format": "sparse-24-bitmask"}), "sparse weights in the format",
    ),
    "compressed: rotations": (files.pack_quantized, fields(transform_config={"a": {}}), "transform_config"),
    "compressed: cache": (files.pack_quantized, fields(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
    "compressed: no groups": (files.pack_quantized, fields(config_groups={}), "no config_groups"),
    "compressed: mixed bits": (files.pack_quantized, second_scheme, "several bits or scales; files with mixed bits"),
    "compressed: other bits": (files.pack_quantized, weights(num_bits=8), "words .* of 8 bits; files with mixed bits"),
    "compressed: strategy": (files.pack_quantized, weights(strategy="tensor_group"), 'strategy "tensor_group"'),
    "compressed: groups": (files.pack_quantized, weights(group_size=48), "groups of 48 inputs, which do not divide"),
    "compressed: static": (files.int_quantized, scheme(input_activations=STATIC), "static activation scales"),
    "compressed: int4 activations": (
        files.int_quantized, scheme(input_activations=files.INT8_PER_TOKEN | {"num_bits": 4}), "to int4 per token;",
    ),
    "compressed: zero points of activations": (
        files.int_quantized, scheme(input_activations=files.INT8_PER_TOKEN | {"symmetric": False}), "with zero points;",
    ),
    "compressed: outputs": (files.int_quantized, scheme(output_activations=STATIC), "rounds outputs"),
    "compressed: input_scale": (
        files.int_quantized, lambda t, c: t.update(input_scale=np.ones(1, np.float32)), "static activation scales .inp",
    ),
    "compressed: no scale": (files.float_quantized, without("weight_scale"), "lacks the tensor weight_scale"),
    "compressed: scales": (files.int_quantized, cut("weight_scale"), r"weight_scale of shape \[39, 1\], which must be"),
    "compressed: NaN": (files.int_quantized, set_to("weight_scale", np.nan), "NaN or infinity in weight_scale"),
    "compressed: floats": (
        files.int_quantized, lambda t, c: t.update(weight=np.ones((40, 64), np.float32)), 'weight stored as "F32"',
    ),
    "fp8: no scale": (files.fp8, without("weight_scale_inv"), "is float8 without its scale"),
    "fp8: static": (files.fp8, fields(activation_scheme="static"), 'the activation_scheme "static"'),
    "fp8: input_scale": (
        files.fp8, lambda t, c: t.update(input_scale=np.ones(1, np.float32)), "static activation scales .input_scale.",
    ),
    "fp8: scales": (files.fp8, fields(weight_block_size=[16, 16]), r"of shape \[1, 1\], which must be \[3, 4\]"),
    "fp8: block": (files.fp8, fields(weight_block_size=[16]), r"weight_block_size \[16\], which must be"),
    "fp8: infinity": (files.fp8, set_to("weight_scale_inv", np.inf), "NaN or infinity in weight_scale_inv"),
    "bitsandbytes: no state": (files.nf4, without(STATE), "has codes without a quant_state"),
    "bitsandbytes: no scales": (files.nf4, without("weight.absmax"), "lacks the tensor weight.absmax"),
    "bitsandbytes: scales": (files.nf4, cut("weight.absmax"), r"weight.absmax of shape \[39\], which must be \[40\]"),
    "bitsandbytes: codes": (files.nf4, cut("weight"), "has 1279 bytes of codes, which must be 1280"),
    "bitsandbytes: NaN": (files.nf4, set_to("weight.absmax", np.nan, 3), "NaN or infinity in weight.absmax"),
    "bitsandbytes: no SCB": (files.bnb_int8, without("SCB"), "lacks the tensor SCB"),
    "bitsandbytes: order": (files.bnb_int8, set_to("weight_format", 2, ()), "in the order of a GPU"),
    "mxfp4: NaN": (files.mxfp4, set_to("weight_scales", 255), "NaN in weight_scales"),
    "mxfp4: scales": (files.mxfp4, cut("weight_scales"), r"weight_scales of shape \[39, 2\], which must be \[40, 2\]"),
    "mxfp4: no scales": (files.mxfp4, without("weight_scales"), "lacks the tensor weight_scales"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_name_the_reason(case, tmp_path):
    make, change, message = REFUSALS[case]
    tensors, _, config = make(WEIGHT)
    change(tensors, config)
    with pytest.raises(UsageError, match=message):
        read(tmp_path, tensors, config)


def test_numbers_that_belong_to_no_matrix(tmp_path):
    """A float8 tensor in a file of another method, whole numbers, and a matrix that occurs twice."""
    tensors, _, config = files.gptq(WEIGHT)
    method = method_of(ConfigFields({"quantization_config": config}, "config.json"), tmp_path)
    all_tensors = {f"a.{part}": array for part, array in tensors.items()}
    float8 = files.fp8(WEIGHT)[0]["weight"]
    for name, array, message in (
        ("b.weight", float8, '"b.weight" of F8_E4M3, without its scale'),
        ("b.ids", np.arange(3), '"b.ids" of I64, which is no part of a quantised matrix'),
        ("a.weight", WEIGHT.astype(np.float32), '"a.weight" both as floats and quantised'),
    ):
        file = files.write(tmp_path / "model.safetensors", all_tensors | {name: array})
        with pytest.raises(UsageError, match=message):
            as_matrices(read_safetensors(file, PARTS), method)


def test_settings_in_a_file_of_their_own(tmp_path):
    tensors, matrix, config = files.gptq(WEIGHT, symmetric=True)
    config.pop("quant_method")
    (tmp_path / "quantize_config.json").write_text(json.dumps(config))
    file = files.write(tmp_path / "model.safetensors", {f"a.{part}": array for part, array in tensors.items()})
    method = method_of(ConfigFields({}, "config.json"), tmp_path)
    tensor = as_matrices(read_safetensors(file, PARTS), method)["a.weight"]
    np.testing.assert_allclose(read_rows(tensor, 0, 40), matrix, rtol=2e-6)
    (tmp_path / "quantize_config.json").unlink()
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    with pytest.raises(UsageError, match=r'hf_quant_config.json has .* the method "modelopt"'):
        method_of(ConfigFields({}, "config.json"), tmp_path)


def test_three_bits_span_words(tmp_path):
    """The tenth number has two bits in the first word and one in the second, as in the authors' packing."""
    words = np.zeros((1, 3), np.uint32)
    words[0, 0], words[0, 1] = 0b11 << 30 | 0b101, 0b1 | 0b110 << 1
    numbers = unpack(words.view(np.int32), 3, 32)
    assert numbers[0, [0, 1, 10, 11, 12]].tolist() == [5, 0, 7, 6, 0]


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
def test_packing_of_compressed_tensors(bits):
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    torch = pytest.importorskip("torch")
    numbers = np.random.default_rng(1).integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (5, 37))
    words = helpers.pack_to_int32(torch.tensor(numbers, dtype=torch.int8), bits).numpy()
    np.testing.assert_array_equal(files.packed(numbers + 2 ** (bits - 1), bits), words)
    np.testing.assert_array_equal(signed(unpack(words, bits, 37), bits), numbers)


def test_mxfp4_of_transformers():
    """The blocks of the packer, as the library expands them in bfloat16, which has all values of the format."""
    torch = pytest.importorskip("torch")
    library = pytest.importorskip("transformers.integrations.mxfp4")
    tensors, matrix, _ = files.mxfp4(WEIGHT)
    parts = [torch.tensor(tensors[name])[None] for name in ("weight_blocks", "weight_scales")]
    expanded = library.convert_moe_packed_tensors(*parts)[0].float().numpy()
    np.testing.assert_array_equal(expanded.T, matrix)


@pytest.mark.parametrize(("rng", "count"), attacks(4, 4_000))
@pytest.mark.parametrize(
    "case", ["gptq", "awq", "pack_quantized", "float_quantized", "fp8", "nf4", "bnb_int8", "mxfp4"]
)
def test_hostile_settings_and_headers(case, rng, count, tmp_path):
    tensors, _, config = getattr(files, case)(WEIGHT)
    contents = files.write(tmp_path / "a.safetensors", {f"a.{k}": v for k, v in tensors.items()}).read_bytes()
    length = int.from_bytes(contents[:8], "little")
    for number in range(count):
        document = changed_json(rng, config) if number % 2 else config
        changed = contents if number % 2 else changed_bytes(rng, contents, 8 + length)
        (tmp_path / "a.safetensors").write_bytes(changed)

        def use(document=document):
            with guarded_read(tmp_path):
                method = method_of(ConfigFields({"quantization_config": document}, "config.json"), tmp_path)
                if method is not None:
                    matrices = as_matrices(read_safetensors(tmp_path / "a.safetensors", PARTS), method)
                    [read_rows(tensor, 0, min(2, tensor.shape[0])) for tensor in matrices.values() if tensor.shape]

        survives(use, (case, document))
