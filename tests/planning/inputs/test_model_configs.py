"""Built-in configs and other sources of shapes."""

from __future__ import annotations

import json
import warnings

import jax
import jax.numpy as jnp
import pytest
from toy import quantized, tiny_llama
from written_models import words

from specjax import UsageError, save_model
from specjax.errors import CheckpointWarning
from specjax.models import abstract_params
from specjax.models.loading import resolve
from specjax.models.storage import num_bytes
from specjax.planning.inputs.model_configs import builtin_configs, load_config, num_params
from specjax.planning.reports.fits import what_fits
from specjax.planning.workload import make_workload

# Parameters as the model cards and the safetensors files of the original checkpoints state them.
PARAMETERS = {
    "deepseek_v2_lite": 15_706_484_224,
    "dream_7b": 7_615_616_512,
    "gemma3_270m": 268_098_176,
    "llada_8b": 8_015_581_184,
    "llama3_1b": 1_235_814_400,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "qwen2_5_coder_0_5b": 494_032_768,
    "qwen2_5_coder_1_5b": 1_543_714_304,
    "qwen3_8b": 8_190_735_360,
    "sdar_4b": 4_411_424_256,
    "smollm2_135m": 134_515_008,
    # Hybrid models, text only. No file was at hand: these are the shapes of the configs, near the sizes in the names.
    "gpt_oss_20b": 20_914_757_184,
    "gemma4_e2b": 4_628_569_379,  # 2,348,810,240 of them in the table of layer inputs
    "lfm2_1_2b": 1_170_340_608,
    "mamba2_780m": 780_161_280,
    "qwen3_5_0_8b": 752_393_024,
    "qwen3_5_4b": 4_205_751_296,
    "qwen3_5_9b": 8_953_803_264,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_next_80b": 79_674_391_296,
}


def test_built_in_configs_have_the_published_sizes():
    parameters = {name: num_params(load_config(name, "bfloat16")) for name in builtin_configs()}
    assert parameters == PARAMETERS


def test_a_folder_needs_no_weights(tmp_path):
    fields = {
        "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 128, "max_position_embeddings": 512,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = load_config(tmp_path, "float32")
    assert (config.width, config.stacked, config.dtype, config.name) == (64, True, "float32", tmp_path.name)
    (tmp_path / "config.json").write_text(json.dumps(fields | {"quantization_config": {"bits": 4}}))
    with pytest.raises(UsageError, match=r"--draft.*quantised.*no \*.safetensors file.*--quantize"):
        load_config(tmp_path, "float32", "--draft")


@pytest.fixture(scope="module")
def rounded(tmp_path_factory):
    """A folder in the format of each scheme, by its name."""
    target = tiny_llama(vocab=96, width=64)
    folders = {scheme: tmp_path_factory.mktemp(scheme) for scheme in ("int8", "int4-weights")}
    for scheme, folder in folders.items():
        save_model(folder, quantized(target, scheme), words())
    return folders


@pytest.mark.parametrize(("scheme", "values"), [("int8", "int8"), ("int4-weights", "int4")])
def test_a_quantised_folder_has_the_formats_of_its_tensors(rounded, scheme, values):
    """The shapes are those of the model that `load` reads on a TPU; the sizes follow by hand."""
    shapes = abstract_params(load_config(rounded[scheme], "bfloat16"))
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(shapes)} == {values, "float32", "bfloat16"}
    expanded = load_config(rounded[scheme], "bfloat16", keep_quantized=False)
    assert expanded.quantized == () and expanded.stacked
    norms = 64 * 5  # two per layer and the last
    matrices = num_params(expanded) - norms
    scales = sum(leaf.size for leaf in jax.tree.leaves(shapes) if leaf.dtype == jnp.float32)
    assert num_bytes(shapes) == matrices * (1 if values == "int8" else 0.5) + 4 * scales + 2 * norms


def test_a_gguf_file_has_the_formats_of_its_tensors():
    file = resolve(None)  # SmolLM2, whose matrices have 32 weights per scale, most of them with offsets
    config = load_config(file, "bfloat16", platform="gpu")
    assert dict(config.quantized)["layers.*.mlp.down"].group == 32
    ratio = num_bytes(abstract_params(config)) / num_bytes(abstract_params(load_config("smollm2_135m", "bfloat16")))
    assert 0.4 < ratio < 0.45
    assert load_config(file, "bfloat16", keep_quantized=False).quantized == ()


def test_a_built_in_config_has_the_formats_of_its_files_on_request():
    """The experts of gpt-oss-20b are published in MXFP4, and everything else in bfloat16."""
    floats = load_config("gpt_oss_20b", "bfloat16")
    quantized = load_config("gpt_oss_20b", "bfloat16", keep_quantized=True)
    assert floats.quantized == () == load_config("gpt_oss_20b", "bfloat16", keep_quantized=False).quantized
    matrices = 24 * 32 * 3 * 2880 * 2880
    assert num_params(quantized) == num_params(floats)
    saved = num_bytes(abstract_params(floats)) - num_bytes(abstract_params(quantized))
    assert saved == matrices * (2 - 1 - 4 / 32), "int8 with a float32 scale for 32 inputs"
    work = make_workload("gpt_oss_20b", "v5e:2x2", expert=4, keep_quantized=True, draft="gpt_oss_20b")
    assert work.target == quantized and work.draft.quantized == ()
    assert make_workload("gpt_oss_20b", "v5e:2x2", expert=4).target == floats
    fits = what_fits("v5e:2x2", target="gpt_oss_20b", expert=4, keep_quantized=True)
    assert {fit.formats for fit in fits.models} == {"5 bits in groups of 32"}, "no scheme is proposed beside them"
    with pytest.raises(UsageError, match="of llama3-8b have no quantised weights; leave --keep-quantized out"):
        make_workload("llama3_8b", "v5e:2x2", keep_quantized=True)


LLAMA = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 128, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
}  # fmt: skip
SDAR = {**LLAMA, "model_type": "sdar", "head_dim": 16, "mask_token_id": 3, "block_size": 4}


@pytest.mark.parametrize("fields", [LLAMA, SDAR], ids=lambda fields: fields["model_type"])
def test_a_field_that_is_not_read_is_reported_as_by_other_commands(fields, tmp_path):
    read = lambda **more: (
        (tmp_path / "config.json").write_text(json.dumps(fields | more)), load_config(tmp_path, "float32")
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read(transformers_version="4.51.0", use_cache=True)
    with pytest.warns(CheckpointWarning, match=r"config.json has a field that is not read.*: residual_multiplier$"):
        read(residual_multiplier=0.22)


@pytest.mark.parametrize("source", ["llama3_9b", "org/name", "missing.gguf"])
def test_other_sources_are_refused_with_the_built_in_names(source):
    with pytest.raises(UsageError, match=r"--target.*llama3_8b"):
        load_config(source, "bfloat16")


def test_dtype_is_checked():
    with pytest.raises(UsageError, match="--dtype"):
        load_config("llama3_8b", "int4")


def test_plans_refuse_models_with_an_encoder(tmp_path):
    hf = {
        "model_type": "t5", "vocab_size": 128, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4,
        "decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(hf))
    with pytest.raises(
        UsageError, match=r"--target: plans .* of the encoder-decoder .* do not exist yet; choose a decoder-only model"
    ):
        make_workload(str(tmp_path), "v5e:1x1")
