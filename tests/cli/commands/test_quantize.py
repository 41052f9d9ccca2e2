"""`specjax quantize` on a tiny folder."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from written_models import VARIANTS, drawn, words

import specjax
from specjax.training import save_denoiser_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    specjax.save_model(folder, drawn(VARIANTS["qwen3"]), words())
    return folder


def test_a_folder_is_written_and_measured(cli, folder, tmp_path):
    (tmp_path / "text").write_text("w5 w7 w9 " * 30)
    out = tmp_path / "out"
    result = cli("quantize", folder, out, "--evaluate", tmp_path / "text", "--window", 32, "--json")
    assert result.code == 0, result.err
    document = json.loads(result.out)
    written, (plain, eight) = document["written"], document["evaluation"]
    assert written["name"] == eight["model"] == f"{folder.name} (int8)" and written["scheme"] == "int8"
    assert written["weights_bytes"] == eight["num_bytes"] < 0.5 * plain["num_bytes"]
    assert plain["ratio"] == 1 and eight["tokens"] == plain["tokens"] == 90 - 3
    assert {file.name for file in out.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert "quantization_config" in json.loads((out / "config.json").read_text())
    assert "wrote" in result.err and f"measured {folder.name}" in result.err


def test_several_schemes_are_measured(cli, folder, tmp_path):
    (tmp_path / "text").write_text("w5 w7 w9 " * 5)
    flags = ("--scheme", "int8-weights", "--scheme", "fp8", "--max-tokens", 10)
    result = cli("quantize", "--evaluate", tmp_path / "text", folder, *flags)
    assert result.code == 0, result.err
    assert all(words in result.out for words in ("perplexity", "ratio", "(int8-weights)", "(fp8)"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "OUT is missing; name the folder of the quantised model, or add --evaluate"),
        (("OUT", "--scheme", "int3"), '--scheme must be one of int8, int8-weights, int4-weights, fp8, not "int3"'),
        (("OUT", "--scheme", "int8", "--scheme", "fp8"), "--scheme is given for 2"),
        (("OUT", "--max-tokens", "5"), "--max-tokens is about the text of --evaluate"),
        (("OUT", "--dtype", "int8"), '--dtype must be float32 or bfloat16, not "int8"'),
        (("--evaluate", "missing"), "--evaluate: cannot read missing"),
        (("--evaluate", "EMPTY"), "--evaluate: the text has 0 tokens"),
        (("--evaluate", "TEXT", "--window", "900"), "--window must be from 2 to 128"),
        (("MODEL",), "is the folder of MODEL; name another folder"),
        (("TEXT",), "OUT: .* is no folder"),
        (("FULL",), "OUT: .* has other.safetensors, weights of another model"),
    ],
)
def test_bad_input_is_refused(refused, folder, tmp_path, arguments, message):
    import re

    (tmp_path / "empty").write_text("")
    (tmp_path / "text").write_text("w5 w7")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "other.safetensors").write_text("")
    names = {"MODEL": folder, "OUT": tmp_path / "out", **{n.upper(): tmp_path / n for n in ("empty", "text", "full")}}
    line = refused("quantize", folder, *(names.get(argument, argument) for argument in arguments))
    assert re.search(message, line), line


def test_a_missing_model_is_refused(refused, tmp_path):
    assert "MODEL: no file or folder" in refused("quantize", tmp_path / "nothing.gguf", tmp_path / "out")


def test_a_diffusion_model_is_written_with_its_settings(cli, refused, tmp_path):
    """The folder is read as the denoiser that `load_denoiser` rounds itself."""
    target = drawn(VARIANTS["qwen3"])
    source, out, text = tmp_path / "in", tmp_path / "out", tmp_path / "text"
    denoiser = specjax.Denoiser(target.model, target.params, 3, attention="block_causal", block=4)
    save_denoiser_model(source, denoiser, words())
    result = cli("quantize", source, out, "--scheme", "int8-weights", "--json")
    assert result.code == 0, result.err
    written, _ = specjax.load_denoiser(out, keep_quantized=True)
    rounded, _ = specjax.load_denoiser(source, quantize="int8-weights")
    assert jax.tree.all(jax.tree.map(np.array_equal, written.params, rounded.params))
    assert (written.mask_token, written.block) == (3, 4)
    text.write_text("w5 w7")
    assert "is a diffusion model; leave --evaluate out" in refused("quantize", source, "--evaluate", text)
