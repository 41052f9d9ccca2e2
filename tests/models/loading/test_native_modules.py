"""Targets whose files carry a module for multi-token prediction: loading, and drafting with the module."""

from __future__ import annotations

import json
import pickle

import dialects as d
import jax
import mtp_oracles as m
import numpy as np
import pytest
import quantized_files
from safetensors.numpy import load_file, save_file

import specjax
from specjax.catalog.defaults import NATIVE, defaults
from specjax.drafters.default import default_drafter
from specjax.drafters.heads.head_drafter import head_drafter
from specjax.errors import CheckpointWarning, UsageError
from specjax.models.loading import mtp_dialects
from specjax.models.loading.heads import load_head, read_head
from specjax.models.loading.mtp_dialects import BY_NAME, DIALECTS


@pytest.fixture(scope="module")
def mimo(tmp_path_factory):
    """Return the folder of a tiny MiMo with its module, the model in torch, and the oracle of the module."""
    return m.write_checkpoint(tmp_path_factory.mktemp("mimo"))


def test_qwen3_5_drafts_with_the_module_that_it_carries(tmp_path):
    """Recurrent layers cannot be rewound; the module's own cache is rebuilt from the accepted tokens."""
    import torch

    folder, model, oracle = m.write_checkpoint(tmp_path, "qwen3_5")
    target, _ = specjax.load(folder)
    loaded = read_head(NATIVE, target)
    assert loaded.dialect == "qwen3_5" and loaded.head.head.config.layer.attention_gate
    with torch.no_grad():
        hidden = model.model(torch.tensor(m.TEXT[None, :-1])).last_hidden_state[0].numpy()
        tables = model.model.embed_tokens.weight.numpy(), model.lm_head.weight.numpy()
    logits, features = m.run_head(loaded.head, target, m.TEXT, m.DRAFT)
    np.testing.assert_allclose(features, hidden, atol=1e-4)
    np.testing.assert_allclose(logits, oracle.logits(hidden, *tables), atol=1e-3)
    run = lambda drafter: specjax.decode(target, drafter, [[3, 4, 5, 3], [9]], key=0, max_new_tokens=8).to_lists()
    assert defaults(target, None, "cpu").head == NATIVE
    assert run(loaded.head) == run("autoregressive")


@pytest.fixture(scope="module")
def loaded(mimo):
    return specjax.load(mimo[0])[0]


def test_a_checkpoint_with_a_module_is_the_target_and_its_drafter(mimo, loaded, recwarn):
    import torch

    folder, model, oracle = mimo
    again, _ = specjax.load(folder)
    assert not recwarn.list, "its fields are known"
    assert (again.native.dialect, again.native.count, again.native.lacking) == ("mimo", 1, None)
    head = read_head(NATIVE, loaded)
    assert head.kind == "mtp" and head.dialect == "mimo" and head.unused == () and head.tensors == 16
    inputs_of_norm: list = []
    model.model.norm.register_forward_pre_hook(lambda _, inputs: inputs_of_norm.append(inputs[0]))
    with torch.no_grad():
        model.double().model(torch.tensor(m.TEXT[None, :-1]))
        hidden = inputs_of_norm[0][0].numpy()
        tables = model.model.embed_tokens.weight.numpy(), model.lm_head.weight.numpy()
    logits, features = m.run_head(head.head, loaded, m.TEXT, m.DRAFT)
    np.testing.assert_allclose(features, hidden, atol=1e-4)
    expected = oracle.logits(hidden, *tables)
    np.testing.assert_allclose(logits, expected, atol=1e-3)
    normed, _ = m.run_head(read_head(NATIVE, loaded, settings={"hidden": "normed"}).head, loaded, m.TEXT, m.DRAFT)
    assert np.abs(normed - expected).max() > 0.1, "the hidden state after the final norm must show"


def test_it_drafts_by_default_and_the_text_is_the_target_s(loaded):
    assert defaults(loaded, None, "cpu").head == defaults(loaded, None, "cpu", drafter="mtp").head == NATIVE
    assert defaults(loaded, None, "cpu", drafter="auto").head is None
    prompts = [[3, 4, 5, 3, 4, 5, 3], [9]]
    run = lambda drafter: specjax.decode(loaded, drafter, prompts, key=0, max_new_tokens=12).to_lists()
    plain = run("autoregressive")
    assert run(None) == plain
    by_name, _ = default_drafter(loaded, name="mtp", shipped=False)
    assert by_name.size.max_depth == 3 and by_name.params["fc"]["weight"].shape == (m.D, 2 * m.D)
    assert pickle.loads(pickle.dumps(loaded)).native == loaded.native
    other = specjax.Target(loaded.model, loaded.params)
    with pytest.raises(UsageError, match="no multi-token-prediction module that specjax can find"):
        load_head(NATIVE, other)


def test_a_module_of_another_kind_of_layer_is_refused_by_name(mimo, tmp_path):
    folder, *_ = mimo
    tensors = load_file(folder / "model.safetensors")
    layer = {name for name in tensors if ".mtp_layers." in name}
    changed = {name: value for name, value in tensors.items() if name not in layer}
    first = "model.layers.2."
    changed |= {f"{first}{part}.weight": np.zeros((4, 4), np.float32) for part in (
        "eh_proj", "enorm", "hnorm", "shared_head.norm", "self_attn.indexer.wk", "self_attn.g_proj",
    )}  # fmt: skip
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(changed, tmp_path / "model.safetensors")
    target, _ = specjax.load(tmp_path)
    assert target.native.dialect == "deepseek"
    reason = (
        r"form deepseek, whose layer has sparse attention with an indexer \(DSA\) and a gate per attention head, which"
    )
    with pytest.raises(UsageError, match=reason):
        load_head(NATIVE, target)
    assert defaults(target, None, "cpu").head is None, "the target decodes without its module"


def copied(folder, to):
    """Copy a checkpoint, and return its tensors."""
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return load_file(folder / "model.safetensors")


def test_a_module_with_an_unknown_tensor_does_not_draft(mimo, tmp_path):
    tensors, name = copied(mimo[0], tmp_path), "model.mtp_layers.0.self_attn.o_proj.bias"
    save_file(tensors | {name: np.zeros(m.D, np.float32)}, tmp_path / "model.safetensors")
    target, _ = specjax.load(tmp_path)
    assert defaults(target, None, "cpu").head is None, "the target decodes without its module"
    with pytest.raises(UsageError, match=f'whose layer has the tensor "{name}", which specjax does not have in heads'):
        load_head(NATIVE, target)


def test_a_quantised_module_is_read(mimo, tmp_path):
    tensors, matrices = {}, {}
    for name, x in copied(mimo[0], tmp_path).items():
        if ".mtp_layers." in name and x.ndim == 2:
            parts, matrices[name], method = quantized_files.gptq(x.astype(np.float64))
            tensors |= {name.removesuffix("weight") + part: value for part, value in parts.items()}
        else:
            tensors[name] = x
    quantized_files.write(tmp_path / "model.safetensors", tensors)
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": method}
    (tmp_path / "config.json").write_text(json.dumps(config))
    target, _ = specjax.load(tmp_path)
    assert target.native.lacking is None and target.native.count == 1
    params, first = load_head(NATIVE, target).params, "model.mtp_layers.0"
    np.testing.assert_allclose(params["fc"]["weight"], matrices[f"{first}.input_proj.weight"], atol=1e-6)
    layer = next(iter(params["stack"].values()))
    np.testing.assert_allclose(layer["mlp"]["up"]["weight"], matrices[f"{first}.mlp.up_proj.weight"], atol=1e-6)


def test_two_modules_draft_two_tokens_by_default(mimo, tmp_path):
    tensors = copied(mimo[0], tmp_path)
    first = {name: x for name, x in tensors.items() if ".mtp_layers.0." in name}
    second = {name.replace("layers.0", "layers.1", 1): x for name, x in first.items()}
    save_file(tensors | second, tmp_path / "model.safetensors")
    target, _ = specjax.load(tmp_path)
    assert target.native.count == 2
    assert defaults(target, None, "cpu", drafter="mtp").options == {"num_tokens": 2}
    assert defaults(target, None, "gpu", drafter="mtp").tree == "top:4x2"
    assert defaults(target, None, "gpu", drafter="eagle").tree == "eagle2:8x6x60", "its modules limit no other head"
    head = load_head(NATIVE, target)
    assert head_drafter(head).size.max_depth == default_drafter(target, name="mtp")[0].size.max_depth == 2


def test_a_checkpoint_that_lost_its_module_is_a_target(mimo, tmp_path):
    tensors = copied(mimo[0], tmp_path)
    save_file({name: x for name, x in tensors.items() if ".mtp_layers." not in name}, tmp_path / "model.safetensors")
    assert specjax.load(tmp_path)[0].native is None
    del tensors["model.mtp_layers.0.input_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match=r"unexpected \(model.mtp_layers.0.final_layernorm.weight"):
        specjax.load(tmp_path)


def test_a_whole_model_with_a_module_is_no_head(mimo):
    from specjax.models.loading.heads import recognise

    assert recognise(mimo[0]) is None, "--draft FOLDER stays a draft model"


def test_the_module_of_a_gguf_file_is_no_layer_of_its_target(tmp_path):
    import transformers
    from gguf_files import write

    oracle = m.Oracle(m.FAMILIES["gguf"])
    oracle.config.num_hidden_layers, oracle.config.vocab_size = 3, 96
    oracle.config.layer_types = ["full_attention"] * 3
    model = transformers.Qwen2ForCausalLM(oracle.config).eval()
    part = oracle.parts[0]
    model.model.layers[2].load_state_dict(part["layer"].state_dict())
    names = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "norm": "shared_head_norm"}
    nextn = {f"blk.2.nextn.{name}.weight": part[key].weight.detach().float().numpy() for key, name in names.items()}
    target, _ = specjax.load(write(model, tmp_path / "model.gguf", modules=nextn))
    assert target.model.capabilities.num_layers == 2 and target.native.dialect == "gguf"
    logits, features = m.run_head(load_head(NATIVE, target), target, m.TEXT, m.DRAFT)
    tables = model.model.embed_tokens.weight.detach().numpy(), model.lm_head.weight.detach().numpy()
    np.testing.assert_allclose(logits, oracle.logits(features, *tables), atol=1e-3)
    with pytest.warns(CheckpointWarning, match="is left out, because it is in a GGUF file"):
        specjax.save_model(tmp_path / "saved", target)
    assert not [name for name in load_file(tmp_path / "saved" / "model.safetensors") if "nextn" in name]


@pytest.mark.parametrize("scheme", [None, "int8"])
def test_a_written_model_keeps_its_module(loaded, mimo, scheme, tmp_path):
    """The module is not quantised, and quantization_config names its matrices for other libraries."""
    target = loaded if scheme is None else specjax.load(mimo[0], quantize=scheme)[0]
    specjax.save_model(tmp_path, target, mimo[0])
    again = specjax.load(tmp_path)[0]
    assert again.native.dialect == "mimo" and again.native.source == str(tmp_path.resolve())
    jax.tree.map(np.testing.assert_array_equal, load_head(NATIVE, again).params, load_head(NATIVE, loaded).params)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert fields["num_nextn_predict_layers"] == 1
    if scheme is not None:
        assert "model.mtp_layers.0.self_attn.q_proj" in fields["quantization_config"]["ignore"]


NAMES = {
    "deepseek": "model.layers.61.eh_proj.weight model.layers.61.enorm.weight",
    "step": "model.layers.45.eh_proj.weight model.layers.45.transformer.shared_head.norm.weight",
    "mimo": "model.mtp_layers.0.input_proj.weight",
    "mimo_v2": "model.mtp.layers.2.eh_proj.weight model.mtp.layers.2.pre_mlp_layernorm.weight",
    "longcat": "model.mtp.layers.0.eh_proj.weight model.mtp.layers.0.enorm.m.weight",
    "qwen3_5": "mtp.fc.weight mtp.layers.0.self_attn.q_proj.weight",
    "ernie": "model.mtp_linear_proj.0.weight model.mtp_block.0.self_attn.q_proj.weight",
    "nemotron": "mtp.layers.0.eh_proj.weight mtp.layers.1.final_layernorm.weight",
}


def test_each_form_is_known_by_its_tensors():
    assert NAMES.keys() == {dialect.name for dialect in DIALECTS}
    for name, text in NAMES.items():
        of_target = [f"model.layers.{i}.self_attn.q_proj.weight" for i in range(3)]
        layers = 45 if name == "step" else 61
        names = [*of_target, *text.split()]
        dialect = mtp_dialects.find_dialect(names, layers)
        assert dialect is BY_NAME[name]
        assert list(filter(mtp_dialects.owner(dialect, layers), names)) == text.split()
        assert all(mtp_dialects.rename(dialect, x, 0).startswith("modules.") for x in text.split())
        assert mtp_dialects.find_dialect(of_target, 3) is None


PARTS = (
    "eh_proj.weight",
    "enorm.weight",
    "layers.0.self_attn.q_proj.weight",
    "layers.0.post_attention_layernorm.weight",
)


@pytest.mark.parametrize("name", [*NAMES, "gguf"])
def test_names_in_files_are_those_that_are_read(name):
    """Each part of a module has a name in the family's files, and no internal name."""
    row, number = BY_NAME[name], 1 if name in ("qwen3_5", "nemotron") else 61
    first = number if BY_NAME[name].numbered_as_layers else 0
    for part in PARTS:
        internal = f"modules.0.{part}.weight"
        stored = mtp_dialects.name_in_files(row, internal, first)
        assert not stored.startswith("modules.") and mtp_dialects.rename(row, stored, first) == internal


def test_a_missing_tensor_of_a_module_has_its_name_in_the_files(mimo, tmp_path):
    for name in ("self_attn.q_proj", "mlp.down_proj"):
        tensors = copied(mimo[0], tmp_path)
        del tensors[f"model.mtp_layers.0.{name}.weight"]
        save_file(tensors, tmp_path / "model.safetensors")
        target = specjax.load(tmp_path)[0]
        with pytest.raises(UsageError, match=rf"model\.mtp_layers\.0\.{name}\.weight") as error:
            load_head(NATIVE, target)
        assert "modules.0" not in str(error.value)


def test_the_module_of_a_trained_folder_is_read_with_its_flags(loaded, tmp_path):
    head = load_head(NATIVE, loaded)
    specjax.save_head(tmp_path, head, target=loaded)
    again = read_head(tmp_path, loaded)
    assert again.head.head.config.hidden_first and again.dialect == "specjax" and not again.unread
    jax.tree.map(np.testing.assert_array_equal, again.head.params, head.params)
    config = json.loads((tmp_path / "config.json").read_text())
    d.write(tmp_path, config | {"mtp": config["mtp"] | {"hidden": "some"}}, load_file(tmp_path / "model.safetensors"))
    with pytest.raises(UsageError, match=r'mtp.hidden "some"; it must be normed or raw'):
        read_head(tmp_path, loaded)
