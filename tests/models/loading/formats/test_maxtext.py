"""MaxText checkpoints: a real one with its logits, and its layout written from Hugging Face folders."""

import json
import shutil
import tracemalloc
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import specjax
from specjax.errors import UsageError
from specjax.models import load
from specjax.models.loading.formats import maxtext
from specjax.models.loading.heads import recognise

LLAMA31 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
KINDS = {
    "llama": dict(kind="llama"),
    "llama3.1": dict(kind="llama", rope_parameters=LLAMA31),
    "mistral": dict(kind="mistral", sliding_window=None),
    "qwen2": dict(kind="qwen2", tie_word_embeddings=True),
    "qwen3": dict(kind="qwen3", tie_word_embeddings=True),
}
NAMES = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "out"}
MLP = {"gate_proj": "wi_0", "up_proj": "wi_1", "down_proj": "wo"}
NORMS = {
    "input_layernorm": "pre_self_attention_layer_norm", "post_attention_layernorm": "post_self_attention_layer_norm",
}  # fmt: skip


def arrays_of(model, heads: int = 4, width: int = 8) -> dict:
    """Return the weights of a torch model in the layout of MaxText's converters: nested, with separate layers."""
    kind, tree = model.config.model_type, {}
    neighbours = (model.config.rope_parameters or {}).get("rope_type") == "llama3"

    def put(path: str, value) -> None:
        *names, last = path.split(".")
        node = tree
        for name in names:
            node = node.setdefault(name, {})
        node[last] = np.ascontiguousarray(value)

    def headed(x, name):  # [in, heads, width]
        x = x.T.reshape(x.shape[1], -1, width)
        if neighbours and name in ("q_proj", "k_proj"):
            x = np.stack(np.split(x, 2, -1), -1).reshape(x.shape)
        return x / np.float32(np.sqrt(width)) if name == "q_proj" and kind in ("llama", "mistral") else x

    for name, value in model.state_dict().items():
        x = value.float().numpy()
        if name == "model.embed_tokens.weight":
            put("token_embedder.embedding", np.pad(x, ((0, 32), (0, 0))))  # to a round number of rows
        elif name == "model.norm.weight":
            put("decoder.decoder_norm.scale", x)
        elif name == "lm_head.weight":
            if not model.config.tie_word_embeddings:
                put("decoder.logits_dense.kernel", np.pad(x.T, ((0, 0), (0, 32))))
        else:
            _, _, layer, *shared_part, part = name.split(".")
            at, device_part = f"decoder.layers_{layer}", shared_part[-1]
            if device_part in NORMS:
                put(f"{at}.{NORMS[device_part]}.scale", x)
            elif device_part in MLP:
                put(f"{at}.mlp.{MLP[device_part]}.kernel", x.T)
            elif device_part in ("q_norm", "k_norm"):
                put(f"{at}.self_attention.{'query' if device_part[0] == 'q' else 'key'}_norm.scale", x)
            elif part == "bias":
                put(f"{at}.self_attention.{NAMES[device_part]}.bias", x.reshape(-1, width))
            elif device_part == "o_proj":
                put(f"{at}.self_attention.out.kernel", x.T.reshape(heads, width, -1))
            else:
                put(f"{at}.self_attention.{NAMES[device_part]}.kernel", headed(x, device_part))
    return tree


def write(folder, tree: dict, scanned: bool, **beside) -> None:
    """Write a MaxText step folder with an optimizer state."""
    import orbax.checkpoint as ocp

    decoder = dict(tree["decoder"])
    if scanned:
        layers = [decoder.pop(name) for name in sorted(decoder) if name.startswith("layers_")]
        decoder["layers"] = jax.tree.map(lambda *x: np.stack(x, 1), *layers)
    params = {"params": {**tree, "decoder": decoder}}
    state = {"params": params, "opt_state": {"0": {"mu": params}}, "step": np.int32(3), **beside}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as writer:
        writer.save((folder / "items").absolute(), args=ocp.args.PyTreeSave(state))


def described(folder, place) -> None:
    """Copy config.json and tokenizer of a Hugging Face folder, without its weights."""
    place.mkdir(exist_ok=True)
    for file in folder.glob("*.json"):
        shutil.copy(file, place)


@pytest.fixture(scope="module", params=KINDS)
def models(request, tiny, tmp_path_factory):
    """Return (a Hugging Face folder, MaxText's arrays of the same model)."""
    model = tiny.model(**KINDS[request.param])
    return tiny.save(model, tmp_path_factory.mktemp("hf")), arrays_of(model)


@pytest.fixture(scope="module")
def llama(tiny, tmp_path_factory):
    model = tiny.model("llama")
    return tiny.save(model, tmp_path_factory.mktemp("llama")), arrays_of(model)


def same(ours, theirs) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=0), ours.params, theirs.params)
    assert ours.model.config.name  # the rest of the configuration is of the same file


@pytest.mark.parametrize("stacked", [False, True], ids=["apart", "stacked"])
@pytest.mark.parametrize("scanned", [False, True], ids=["layers", "scanned"])
def test_the_weights_of_each_kind_are_those_of_its_hugging_face_folder(models, scanned, stacked, tmp_path):
    folder, tree = models
    described(folder, tmp_path)
    write(tmp_path, tree, scanned)
    same(load(tmp_path, stacked=stacked)[0], load(folder, stacked=stacked)[0])


def test_a_checkpoint_of_maxtext_gives_its_logits(data, tmp_path, monkeypatch):
    """MaxText 0.2.5 itself trained and saved it, with the frequencies of Llama 3.1, and computed the logits."""
    shutil.copytree(data / "maxtext", tmp_path / "it")
    monkeypatch.chdir(tmp_path)
    target, _ = load("it")  # Orbax takes no relative paths
    requests = np.load(data / "maxtext" / "logits.npz")
    tokens, theirs = requests["tokens"], requests["logits"]
    cache, width = target.model.init_cache(target.params, None, *tokens.shape), tokens.shape[1]
    mask = np.tril(np.ones((1, width, width), bool))
    out, _ = jax.jit(target.model.forward)(
        target.params, tokens, cache, positions=np.arange(width)[None], mask=jax.numpy.asarray(mask)
    )
    assert np.std(theirs) > 0.5
    np.testing.assert_allclose(out.logits, theirs, atol=1e-4)


def test_text_of_a_checkpoint_is_that_of_its_hugging_face_folder(llama, tmp_path):
    folder, tree = llama
    described(folder, tmp_path)
    write(tmp_path, tree, scanned=True)
    texts = [
        specjax.decode(
            load(place)[0], "prompt_lookup", [[5, 6, 7]], key=jax.random.key(0), max_new_tokens=12
        ).to_lists()
        for place in (tmp_path, folder)
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("stacked", [False, True], ids=["apart", "stacked"])
def test_each_array_of_the_model_is_read_once_and_no_other(llama, stacked, tmp_path, monkeypatch):
    folder, tree = llama
    described(folder, tmp_path)
    write(tmp_path, tree, scanned=True)
    read, full = [], maxtext._Store._read
    monkeypatch.setattr(maxtext._Store, "_read", lambda self, path: read.append(path) or full(self, path))
    load(tmp_path, stacked=stacked)
    assert len(read) == len(set(read)) == 12
    assert {path[:2] for path in read} == {("params", "params")}


@pytest.mark.parametrize(
    "part, shape",
    [("query", (256, 2, 8, 32)), ("out", (8, 2, 32, 256)), ("wi_0", (256, 2, 256)), ("wo", (256, 2, 256))],
)
def test_a_row_is_taken_without_a_copy_of_its_layer(part, shape):
    full = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    store = SimpleNamespace(folder="here", array=lambda path: full)
    array, config = maxtext.ArrayInfo((), shape), SimpleNamespace(head_dim=32, vocab_size=8)
    stored = maxtext._lazy_tensor(store, array, f"decoder.layers_1.{part}.kernel", 1, config, "qwen2")
    tracemalloc.start()
    row = stored.rows(5, 6)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_array_equal(row, full[:, 1].reshape(256, 256).T[5:6])
    assert peak < full[:, 1].nbytes / 4


def test_a_draft_model_may_be_a_checkpoint(llama, tmp_path):
    described(llama[0], tmp_path)
    write(tmp_path, llama[1], scanned=True)
    assert recognise(tmp_path) is None  # no head, but a whole model


def test_each_device_gets_its_part(llama, tmp_path):
    folder, tree = llama
    described(folder, tmp_path)
    write(tmp_path, tree, scanned=True)
    mesh = specjax.mesh(2, 2)
    ours, theirs = load(tmp_path, mesh=mesh)[0], load(folder, mesh=mesh)[0]
    same(ours, theirs)
    jax.tree.map(lambda a, b: a.sharding == b.sharding or pytest.fail(), ours.params, theirs.params)


def refused(place, *words) -> None:
    with pytest.raises(UsageError) as error:
        load(place)
    message = str(error.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_a_checkpoint_without_a_description(llama, tmp_path):
    write(tmp_path, llama[1], scanned=True)
    refused(tmp_path, "config.json", "MaxText", "tokenizer")
    refused(tmp_path / "items", "config.json", "MaxText")


def test_the_items_of_a_model_folder(llama, tmp_path):
    described(llama[0], tmp_path)
    write(tmp_path, llama[1], scanned=True)
    refused(tmp_path / "items", "config.json", f"give {tmp_path}")


@pytest.mark.parametrize("config", [False, True], ids=["alone", "described"])
@pytest.mark.parametrize("subfolder", ["run", "run/checkpoints"])
def test_a_run_of_many_steps(llama, subfolder, config, tmp_path):
    checkpoints = tmp_path / "run" / "checkpoints"
    for step in ("9", "10"):
        write(checkpoints / step, llama[1], scanned=True)
    if config:
        described(llama[0], tmp_path / subfolder)
    refused(tmp_path / subfolder, "one step", str(checkpoints / "10"), "config.json")


@pytest.mark.parametrize("name", ["items", "items.orbax-checkpoint-tmp-7"])
@pytest.mark.parametrize("config", [False, True], ids=["alone", "described"])
def test_a_checkpoint_that_is_half_written(llama, config, name, tmp_path):
    if config:
        described(llama[0], tmp_path)
    (tmp_path / name).mkdir()
    refused(tmp_path, "no complete checkpoint", "another step")


def test_two_sets_of_weights_in_one_folder(llama, tmp_path):
    shutil.copytree(llama[0], tmp_path / "both")
    write(tmp_path / "both", llama[1], scanned=True)
    refused(tmp_path / "both", "safetensors", "MaxText", "remove")


def test_a_kind_that_is_not_read(tiny, llama, tmp_path):
    described(tiny.save(tiny.model("olmo2"), tmp_path / "olmo"), tmp_path)
    write(tmp_path, llama[1], scanned=True)
    refused(tmp_path, '"olmo2"', "qwen3", "to_huggingface")


def test_a_configuration_of_another_model(llama, tmp_path):
    described(llama[0], tmp_path)
    write(tmp_path, llama[1], scanned=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3, "intermediate_size": 40}))
    refused(tmp_path, "decoder.layers_2.mlp.wi_0.kernel", "missing", "[48, 32], not [40, 32]")


def test_a_vocabulary_that_is_no_padded_one(llama, tmp_path):
    described(llama[0], tmp_path)
    rows = np.zeros((2000, 32), np.float32)
    head = llama[1]["decoder"] | {"logits_dense": {"kernel": rows.T}}
    write(tmp_path, {"token_embedder": {"embedding": rows}, "decoder": head}, scanned=True)
    refused(tmp_path, "token_embedder.embedding is [2000, 32]", "decoder.logits_dense.kernel is [2000, 32]")


def test_heads_of_another_width_whose_matrices_are_of_the_same_shape(llama, tmp_path):
    described(llama[0], tmp_path)
    write(tmp_path, llama[1], scanned=True)
    config = json.loads((tmp_path / "config.json").read_text())
    heads = {name: 2 * config[name] for name in ("num_attention_heads", "num_key_value_heads")}
    (tmp_path / "config.json").write_text(json.dumps(config | heads | {"head_dim": 4}))
    refused(tmp_path, "heads", "width 8", "4", "config.json")


def test_frequencies_that_maxtext_does_not_have(llama, tmp_path):
    described(llama[0], tmp_path)
    write(tmp_path, llama[1], scanned=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_parameters": LLAMA31 | {"factor": 32.0}}))
    refused(tmp_path, "Llama 3.1", "factor 8", "8192")


def test_weights_that_nobody_asked_for(llama, tmp_path):
    folder, tree = llama
    described(folder, tmp_path)
    write(tmp_path, tree | {"adapter": {"kernel": np.ones((2, 2), np.float32)}}, scanned=True)
    refused(tmp_path, "adapter.kernel", "unexpected")


def test_another_folder_of_orbax(llama, tmp_path):
    import orbax.checkpoint as ocp

    described(llama[0], tmp_path)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as writer:
        writer.save((tmp_path / "items").absolute(), args=ocp.args.PyTreeSave({"weights": np.ones(3)}))
    refused(tmp_path, "not a MaxText checkpoint")


@pytest.mark.parametrize("damaged", ["ocdbt.process_0/d/*", "d/*", "_METADATA"])
def test_a_damaged_checkpoint(llama, damaged, tmp_path):
    folder, tree = llama
    described(folder, tmp_path)
    write(tmp_path, tree, scanned=True)
    files = list((tmp_path / "items").glob(damaged))
    assert files
    for file in files:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 3])
    refused(tmp_path, "items", "copy")
