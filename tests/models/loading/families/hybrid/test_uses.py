"""Uses of a checkpoint of a hybrid family: all options of `load`, quantised and saved models, meshes.

The folder, the reference logits and the compiled programs of a family serve all of its tests.
"""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from hybrid_families import LARGER, TOKENS, logits_of_target, write_gguf
from hybrid_gguf import gguf
from hybrid_models import torch, transformers
from mamba_models import without_own_limit
from tiers import those
from written_models import words

import specjax
from specjax.cli import main
from specjax.models.loading.tokenizers.writing import write_tokenizer
from specjax.numerics.quantized_array import QuantizedArray

BY_FAMILY = pytest.mark.parametrize("family", those({"qwen3_5"}, LARGER))
FLOAT32, BFLOAT16 = 1e-5, 0.05  # tolerances relative to the largest logit
PROMPT = "w3 w4 w5 w3 w4 w5 w3"


@functools.cache
def model_of(family):
    """Return the torch model of a family, and its logits."""
    model = LARGER[family]()
    with torch.no_grad():
        return model, model(torch.tensor(TOKENS)).logits.numpy()


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Return a function that writes the folder of a family with a tokenizer, once."""

    @functools.cache
    def write(family):
        folder = tmp_path_factory.mktemp(family) / "model"
        model_of(family)[0].save_pretrained(folder)
        write_tokenizer(folder, words())
        return folder

    return write


def load(source, **options):
    return specjax.load(source, **options)[0]


def distance(logits, expected):
    """Return the largest difference of logits, relative to the largest logit."""
    return np.abs(logits - expected).max() / np.abs(expected).max()


def num_quantized(target):
    is_matrix = lambda x: isinstance(x, QuantizedArray)
    return sum(map(is_matrix, jax.tree.leaves(target.params, is_leaf=is_matrix)))


@BY_FAMILY
@pytest.mark.parametrize(
    "options", [{}, {"stacked": True}, {"joined": True, "stacked": True}, {"dtype": "bfloat16", "stacked": True}]
)
def test_storage(family, options, folder_of):
    logits = logits_of_target(load(folder_of(family), **options))
    assert distance(logits, model_of(family)[1]) < (BFLOAT16 if "dtype" in options else FLOAT32)


@BY_FAMILY
def test_keys_and_values_in_int8(family, folder_of):
    target = load(folder_of(family), cache_dtype="int8")
    assert distance(logits_of_target(target), model_of(family)[1]) < BFLOAT16
    cache = target.model.init_cache(target.params, None, 1, 8)
    assert all(layer.dtype == "int8" for layer in cache.attention.k)
    assert all(state.state is None or state.state.dtype == "float32" for state in cache.recurrent)


@BY_FAMILY
@pytest.mark.parametrize("scheme", those({"int4-weights"}, ["int8", "int8-weights", "int4-weights", "fp8"]))
def test_a_quantised_folder_is_the_model_that_was_rounded_while_loading(family, scheme, folder_of, tmp_path):
    rounded = load(folder_of(family), quantize=scheme)
    assert num_quantized(rounded) > len(rounded.model.config.kinds)
    logits = logits_of_target(rounded)
    tolerance = {"int4-weights": 1.0, "fp8": 0.3}.get(scheme, 0.1)  # of so small a model
    assert FLOAT32 < distance(logits, model_of(family)[1]) < tolerance
    with pytest.raises(SystemExit, match="0"):
        main(["quantize", str(folder_of(family)), str(tmp_path / "out"), "--scheme", scheme])
    packed = load(tmp_path / "out", keep_quantized=True)
    assert num_quantized(packed) == num_quantized(rounded)
    assert distance(logits_of_target(packed), logits) < FLOAT32


@BY_FAMILY
def test_a_saved_folder_is_read_by_transformers(family, folder_of, tmp_path):
    target = load(folder_of(family), stacked=True)
    specjax.save_model(tmp_path, target, folder_of(family))
    again = load(tmp_path)
    changes = {"name": "", "stacked": True, "cache_bits": again.model.config.cache_bits}
    same = lambda config: dataclasses.replace(config, **changes)
    assert same(again.model.config) == same(target.model.config)
    reference, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, dtype=torch.float32
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    if family == "nemotron_h":
        without_own_limit(reference)
    with torch.no_grad():
        logits = reference.eval()(torch.tensor(TOKENS)).logits.numpy()
    assert distance(logits, model_of(family)[1]) < FLOAT32


@BY_FAMILY
@pytest.mark.parametrize("shape", those({(1, 4)}, [(1, 4), (2, 2)]))
def test_meshes(family, shape, folder_of):
    """Attention has 4 heads. Heads of recurrent layers that 4 does not divide are replicated."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(shape), ("data", "model"))
    for options in ({}, {"quantize": "int8-weights", "stacked": True}):
        target = load(folder_of(family), mesh=mesh, **options)
        expected = logits_of_target(load(folder_of(family), **options)) if options else model_of(family)[1]
        assert distance(logits_of_target(target), expected) < FLOAT32


@BY_FAMILY
@pytest.mark.parametrize("kind", those({"Q4_0"}, ["Q8_0", "Q4_0"]))
def test_gguf_files_that_stay_quantised(family, kind, tmp_path):
    file = write_gguf(family, model_of(family)[0], tmp_path / "model.gguf", kind)
    expanded, packed = (load(file, keep_quantized=keep, stacked=keep) for keep in (False, True))
    assert num_quantized(expanded) == 0 and num_quantized(packed) > 4
    expected = logits_of_target(expanded)
    assert distance(logits_of_target(packed), expected) < FLOAT32
    assert FLOAT32 < distance(expected, model_of(family)[1]) < 1.0
    assert {tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors} == {kind, "F32"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", LARGER)
def test_the_command_line(family, folder_of, capsys):
    arguments = ["generate", PROMPT, "--target", str(folder_of(family)), "--max-new-tokens", "12", "--no-cache"]
    with pytest.raises(SystemExit, match="0"):
        main([*arguments, "--json", "--compare", "--method", "suffix"])
    assert json.loads(capsys.readouterr().out)["identical"]


def test_adapters_are_refused(folder_of, tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    (tmp_path / "config.json").write_bytes((folder_of("qwen3_5") / "config.json").read_bytes())
    with pytest.raises(specjax.UsageError, match="has an adapter, not a model; merge it into its base model"):
        load(tmp_path)
