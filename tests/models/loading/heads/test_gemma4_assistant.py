"""Folders of Gemma 4 assistants: those of transformers, and files that are refused."""

import json

import jax
import numpy as np
import pytest
import tokenizers
from gemma4_models import CHOSEN, CLUSTERS, FEW, assistant, gemma4, loaded, torch, transformers
from safetensors.numpy import load_file, save_file
from toy import tiny_llama

import specjax
from specjax import UsageError
from specjax.cli import main
from specjax.models.loading.heads import read_head, recognise, save_head
from specjax.models.loading.tokenizers.tokenizer import LibraryCodec, Tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder of an assistant."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("assistant")
    assistant().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    torch.manual_seed(0)
    return loaded(gemma4("small", **FEW), tmp_path_factory.mktemp("target"))


def changed(folder, place, *, fields=None, tensors=None):
    """Return a copy of the assistant with other fields, by their path, and other tensors; None removes one."""
    config, arrays = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    for path, value in (fields or {}).items():
        *parents, name = path.split(".")
        entry = config
        for parent in parents:
            entry = entry[parent]
        entry[name] = value
    place.mkdir()
    (place / "config.json").write_text(json.dumps(config))
    arrays |= tensors or {}
    save_file({name: x for name, x in arrays.items() if x is not None}, place / "model.safetensors")
    return place


def test_a_folder_of_transformers_is_read_and_written(folder, target, tmp_path):
    head = read_head(folder, target)
    assert recognise(folder) == (head.kind, head.dialect) == ("gemma4_assistant", "transformers")
    assert head.flags == {"centroids": CLUSTERS, "chosen": CHOSEN} and not head.warnings and not head.unused
    save_head(tmp_path / "again", head.head, target=target)
    again = read_head(tmp_path / "again", target)
    assert again.head.head.config == head.head.head.config and not again.warnings
    jax.tree.map(np.testing.assert_array_equal, again.head.params, head.head.params)
    reference = transformers.Gemma4AssistantForCausalLM.from_pretrained(tmp_path / "again")
    first, second = (x.state_dict() for x in (reference, type(reference).from_pretrained(folder)))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_an_output_layer_of_its_own_and_no_clusters(folder, target, tmp_path):
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    clusters = dict.fromkeys(("masked_embedding.centroids.weight", "masked_embedding.token_ordering"))
    plain = {"use_ordered_embeddings": False}
    untied = changed(
        folder, tmp_path / "own", fields=plain | {"tie_word_embeddings": False},
        tensors=clusters | {"lm_head.weight": table + 1},
    )  # fmt: skip
    tied = changed(folder, tmp_path / "tied", fields=plain, tensors=clusters | {"lm_head.weight": table + 1})
    lone = {"model.embed_tokens.weight": None, "lm_head.weight": table + 1}
    renamed = changed(folder, tmp_path / "renamed", fields=plain, tensors=clusters | lone)
    for place, expected in ((untied, table + 1), (tied, table), (renamed, table + 1)):
        head = read_head(place, target).head
        np.testing.assert_array_equal(head.params["head"]["weight"], expected)
        assert "clusters" not in head.params


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"backbone_hidden_size": 48}, "backbone_hidden_size 48, and the width of the target"),
        ({"text_config.vocab_size": 65}, "vocab_size 65, and the vocabulary of the target"),
        ({"text_config.num_key_value_heads": 2}, "local layers for 2 key/value heads of 16, and the target"),
        ({"text_config.per_layer_config": {"1": {"head_dim": 16}}}, "global layers for 1 key/value heads of 16, and"),
        ({"text_config.hidden_size_per_layer_input": 4, "text_config.vocab_size_per_layer_input": 4},
         "hidden_size_per_layer_input, which no assistant"),
        ({"text_config.use_double_wide_mlp": True}, "use_double_wide_mlp, which no assistant"),
        ({"num_centroids": 7}, "7 centroids, which must divide its 64 tokens"),
        ({"centroid_intermediate_top_k": 9}, "9 clusters, which must be from 1 to 8"),
        ({"use_ordered_embeddings": False}, "masked_embedding"),
        ({"tie_word_embeddings": False}, "has no tensor lm_head.weight"),
        ({"quantization_config": {"quant_method": "gptq"}}, "are quantised; use the original checkpoint"),
    ],
)  # fmt: skip
def test_files_of_another_target_and_broken_ones_are_refused(fields, words, folder, target, tmp_path):
    with pytest.raises(UsageError, match=words):
        read_head(changed(folder, tmp_path / "changed", fields=fields), target)


def test_an_order_that_repeats_or_lacks_tokens_is_refused(folder, target, tmp_path):
    name = "masked_embedding.token_ordering"
    for order, words in (
        (np.zeros(64, np.int64), "leads to id 0 64 times"),
        (np.arange(63), "not of 64 whole numbers"),
    ):
        with pytest.raises(UsageError, match=words):
            read_head(changed(folder, tmp_path / str(len(order)), tensors={name: order}), target)
    with pytest.raises(UsageError, match=f"has no tensor {name}"):
        read_head(changed(folder, tmp_path / "without", tensors={name: None}), target)


@pytest.fixture
def cli(capsys, monkeypatch):
    monkeypatch.setenv("SPECJAX_NO_CACHE", "1")

    def run(*arguments):
        with pytest.raises(SystemExit) as stop:
            main([*map(str, arguments)])
        return stop.value.code, *capsys.readouterr()

    return run


def words(count):
    """Return a tokenizer of the library whose token i is the word `wi`."""
    model = tokenizers.models.WordLevel({f"w{i}": i for i in range(count)}, unk_token="w0")
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return backend


@pytest.fixture
def small_model(monkeypatch):
    """Load a tiny Llama for each name of a model."""
    tokenizer = Tokenizer(LibraryCodec(words(259)), tuple(f"w{i}" for i in range(259)), (1,))
    monkeypatch.setattr(specjax, "load", lambda *args, **options: (tiny_llama(259), tokenizer), raising=False)


@pytest.mark.parametrize("arguments", [("inspect", "HEAD"), ("generate", "w2 w3", "--draft", "HEAD")])
def test_the_command_line_refuses_another_target(arguments, folder, small_model, cli):
    code, out, error = cli(*(folder if argument == "HEAD" else argument for argument in arguments))
    [line] = [line for line in error.splitlines() if line.startswith("specjax: ")]
    assert code == 2 and "shares no keys of its cache, which gemma4_assistant needs" in line
    assert "Traceback" not in out + error


@pytest.mark.exhaustive
def test_the_command_line_generates_and_inspects(cli, tmp_path):
    torch.manual_seed(0)
    gemma4("small", **FEW | {"vocab_size": 259, "vocab_size_per_layer_input": 259}).save_pretrained(tmp_path / "target")
    words(259).save(str(tmp_path / "target" / "tokenizer.json"))
    assistant(clusters=7, vocab_size=259).save_pretrained(tmp_path / "assistant")
    models = ("--target", tmp_path / "target", "--dtype", "float32")
    code, out, error = cli("inspect", tmp_path / "assistant", *models, "--json")
    document = json.loads(out)
    assert code == 0 and (document["kind"], document["flags"]["centroids"]) == ("gemma4_assistant", 7), error
    for more in ((), ("--method", "gemma4_assistant"), ("--num-draft-tokens", 2), ("--tree", "top:2x1")):
        code, out, error = cli(
            "generate", "w2 w3", *models, "--draft", tmp_path / "assistant", "--max-new-tokens", 12, "--compare",
            "--json", *more,
        )  # fmt: skip
        document = json.loads(out)
        assert code == 0 and document["identical"] is True and document["head"] == "gemma4_assistant", error


def test_settings_of_the_user(folder, target):
    assert read_head(folder, target, settings={"chosen": "8"}).head.head.config.chosen == CLUSTERS
    for value, words in (("9", "from 1 to 8"), ("0", "from 1 to 8")):
        with pytest.raises(UsageError, match=words):
            read_head(folder, target, settings={"chosen": value})


def test_a_target_without_shared_keys_is_refused_by_name(folder):
    with pytest.raises(UsageError, match="shares no keys of its cache, which gemma4_assistant needs; use the Gemma 4"):
        read_head(folder, tiny_llama())
