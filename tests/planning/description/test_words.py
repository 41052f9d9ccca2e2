"""Words about layers, sizes and modules, and the command `specjax inspect` with a model."""

import json

import pytest

from specjax.planning.description.layers import Kind, LayerPattern
from specjax.planning.description.module import ModuleDescription
from specjax.planning.description.words import layers_in_words, module_in_words, size

A, G, C = Kind("attention", "gated"), Kind("gated_delta", "gated"), Kind("short_convolution", "gated")
M, F, N = Kind("mamba2", "none"), Kind("none", "relu2"), Kind("attention", "none")


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        ((G, G, G, A) * 8, "24 gated delta nets and 8 attention layers, in 8 groups of 3 + 1, each with a gated MLP"),
        ((A,) * 4, "4 attention layers, each with a gated MLP"),
        ((M,) * 2, "2 Mamba-2 layers, each without an MLP"),
        ((C, C, A, C), "3 short convolutions and 1 attention layer (layer 2, counted from 0), each with a gated MLP"),
        (
            (M, F, M, N, F, M),
            "3 Mamba-2 layers, 2 MLPs with squared ReLU and 1 attention layer, in an order that does not repeat",
        ),
        ((M, A), "1 Mamba-2 layer and 1 attention layer with a gated MLP (layer 1, counted from 0)"),
    ],
)
def test_layers_in_words(kinds, words):
    assert layers_in_words(LayerPattern(kinds)) == words


def test_sizes():
    assert [size(n) for n in (0, 9999, 32768, 1.18e6, 50331648, 8.41e9)] == [
        "0 bytes", "9,999 bytes", "32.8 kB", "1.18 MB", "50.3 MB", "8.41 GB",
    ]  # fmt: skip


def test_modules_that_cannot_draft():
    lacking = ModuleDescription("deepseek", "DeepSeek-V3", 1, False, "its layer has experts (MoE)")
    assert module_in_words(lacking).endswith("which cannot draft: its layer has experts (MoE)")
    assert module_in_words(None).startswith("no module in its files")


def test_the_command_describes_a_model(capsys):
    from specjax.cli import main

    def inspect(*arguments):
        with pytest.raises(SystemExit) as stop:
            main(["inspect", *arguments])
        return stop.value.code, *capsys.readouterr()

    code, out, _ = inspect("qwen3_5_0_8b", "--dtype", "bfloat16")
    assert code == 0 and "18 gated delta nets and 6 attention layers, in 6 groups of 3 + 1" in out
    assert "memory per token of a row: 12.3 kB, keys and values of 6 attention layers" in out
    assert "1 module of the form qwen3_5" in out and "it drafts by default" in out
    document = json.loads(inspect("qwen3_5_0_8b", "--dtype", "bfloat16", "--json")[1])
    assert (document["kind"], document["layers"]["groups"], document["memory"]["per_token"]) == ("model", 6, 12288)
    assert document["memory"]["per_row"] == document["memory"]["states"] + document["memory"]["windows"]
    assert document["layers"]["kinds"][1]["layers"] == [3, 7, 11, 15, 19, 23]
    code, _, error = inspect("qwen3_5_0_8b", "--target", "llama3_1b")
    assert code == 2 and "--target is for draft heads, and SOURCE qwen3_5_0_8b is none; leave it out" in error
