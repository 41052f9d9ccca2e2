"""Sizes of a text's memory against bytes counted by hand, and modules in the files of models."""

import json

import pytest

import specjax
from specjax.planning.description.layers import Kind
from specjax.planning.description.words import describe_in_lines

DELTA, ATTENTION = Kind("gated_delta", "gated"), Kind("attention", "gated")


def test_the_memory_of_a_qwen3_5_is_that_of_its_states_and_attention_layers():
    model = specjax.describe_model("qwen3_5_4b", dtype="bfloat16")
    assert model.layers.counts == {DELTA: 24, ATTENTION: 8}
    assert model.layers.group == ((DELTA, 3), (ATTENTION, 1)) and model.layers.num_groups == 8
    memory, channels = model.memory, 2 * 16 * 128 + 32 * 128
    assert memory.states == 24 * 32 * 128 * 128 * 4
    assert memory.windows == 24 * 3 * channels * 2
    assert memory.per_token == 8 * 2 * 4 * 256 * 2
    assert memory.total(1000) == memory.states + memory.windows + 1000 * memory.per_token
    updates = channels * 2 + (16 * 128 + 32 * 128 + 4 * 32) * 4  # inputs of the convolution; keys, values, decays
    assert memory.per_node == 24 * updates + memory.per_token + 4  # and a position
    module = model.module
    assert (module.dialect, module.count, module.drafts_by_default, module.output_layer) == (
        "qwen3_5", 1, True, "target",
    )  # fmt: skip
    layer = 16 * 256 * 2560 * 3 + 2 * 4 * 256 * 2560 + 3 * 2560 * 9216 + 2 * 256  # with the output gate
    assert module.parameters == layer + 2 * 2560 * 2560 + 5 * 2560


def test_models_without_attention_and_without_recurrence():
    mamba = specjax.describe_model("mamba2_780m", dtype="float32")
    assert mamba.memory.per_token == 0 and mamba.memory.states == 48 * 48 * 64 * 128 * 4
    assert mamba.memory.windows == 48 * 3 * (48 * 64 + 2 * 128) * 4 and mamba.module is None
    dense = specjax.describe_model("gemma3_270m", dtype="bfloat16")
    assert dense.memory.per_row == 0 and dense.memory.per_token == 18 * 2 * 256 * 2 == dense.memory.per_node - 4
    assert [length for _, length in dense.layers.group] == [5, 1] and dense.layers.count_attention() == 18
    halved = specjax.describe_model("gemma3_270m", dtype="bfloat16", quantize="int8-weights")
    assert halved.weights_bytes < 0.6 * dense.weights_bytes and halved.formats == "int8-weights"
    assert specjax.describe_model("llada_8b").kind == "diffusion"


def test_layers_of_gemma_4_differ_in_windows_and_heads_and_share_keys():
    model = specjax.describe_model("gemma4_e2b", dtype="bfloat16")
    local, full = Kind("windowed_attention", "gated"), Kind("attention", "gated")
    shared = {kind._replace(shares_keys=True): count for kind, count in ((local, 16), (full, 4))}
    assert model.layers.counts == {local: 12, full: 3} | shared
    assert model.layers.count_attention() == 15
    assert model.memory.per_token == 2 * 2 * (12 * 256 + 3 * 512)  # keys and values of one head
    sizes = lambda head_dim, rotated, window: {
        "heads": 8, "kv_heads": 1, "head_dim": head_dim, "rotated": rotated, "window": window, "output_gate": False,
        "sinks": False,
    }  # fmt: skip
    assert model.sizes == {"windowed_attention": sizes(256, 256, 512), "attention": sizes(512, 128, None)}
    lines = "\n".join(describe_in_lines(model))
    assert "4 attention layers with the keys of an earlier layer" in lines
    assert "sliding-window attention: 8 heads of 256 numbers" in lines and "128 numbers rotated" in lines
    assert "18.4 kB, keys and values of 15 attention layers" in lines


def test_the_module_in_a_folder_and_a_folder_without_weights(tmp_path):
    mtp_oracles = pytest.importorskip("mtp_oracles")
    folder, model, _ = mtp_oracles.write_checkpoint(tmp_path, "qwen3_5")
    description = specjax.describe_model(folder)
    assert description.parameters == sum(p.numel() for p in model.parameters())
    module = description.module
    assert (module.dialect, module.hidden, module.hidden_first, module.chained) == (
        "qwen3_5", "normed", False, "normed",
    )  # fmt: skip
    target = specjax.load(folder)[0]
    head = specjax.load_head("native", target)
    assert module.parameters == sum(leaf.size for leaf in _leaves(head.params)) and module.reason is None
    (folder / "model.safetensors").unlink()
    stated = specjax.describe_model(folder)
    assert stated.module.dialect is None and stated.module.count == 1 and not stated.module.drafts_by_default
    assert stated.memory == description.memory
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | {"x": 1}))
    with pytest.warns(specjax.errors.CheckpointWarning, match="x"):
        specjax.describe_model(folder)


def _leaves(params):
    import jax

    return jax.tree.leaves(params)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nothing", 'no file or folder "nothing" exists'),
        (3, "source must be a hub id, a folder or a file, not 3"),
        ("qwen3-5-4c", "built-in configs are deepseek_v2_lite, dream_7b"),
    ],
)
def test_sources_that_are_no_models(source, message):
    with pytest.raises(specjax.UsageError, match=message):
        specjax.describe_model(source)


def test_wrong_options():
    with pytest.raises(specjax.UsageError, match="dtype"):
        specjax.describe_model("llama3_1b", dtype="float8")
    with pytest.raises(specjax.UsageError, match="quantize"):
        specjax.describe_model("llama3_1b", quantize="int7")
