"""BART beside `transformers`: logits with padded sources, and greedy texts after the forced token."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

import specjax
from specjax import UsageError
from specjax.cli import main
from specjax.models import sources
from specjax.processors import forced

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 61, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 20, "decoder_ffn_dim": 24, "max_position_embeddings": 64,
    "decoder_start_token_id": 2, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "forced_bos_token_id": 0,
    "forced_eos_token_id": None, "dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
SOURCES = [list(range(3, 43)), [7, 8, 9, 10, 11]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("bart")


@pytest.fixture(scope="module")
def pair(folder):
    torch.manual_seed(0)
    model = transformers.BartForConditionalGeneration(transformers.BartConfig(**SIZES)).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            is_norm = "norm" in key and key.endswith("weight")
            weight.copy_(torch.randn_like(weight) * 0.35 + (1.0 if is_norm else 0.0))
        model.final_logits_bias.normal_()
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())  # published ones state the forced token there
    (folder / "config.json").write_text(json.dumps(config | {"forced_bos_token_id": 0}))
    words = {"<s>": 0, "<pad>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, 61)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return model, specjax.load(str(folder))[0]


def test_logits_are_those_of_transformers(pair):
    model, target = pair
    texts = [[2, *np.random.default_rng(row).integers(3, 61, 19).tolist()] for row in range(2)]
    ids = torch.tensor([source + [1] * (40 - len(source)) for source in SOURCES])
    with torch.no_grad():
        theirs = model(input_ids=ids, attention_mask=(ids != 1).long(), decoder_input_ids=torch.tensor(texts)).logits
    cache = target.model.init_cache(target.params, sources(SOURCES), 2, 32)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((20, 20), bool)), (2, 20, 20))
    positions = jnp.broadcast_to(jnp.arange(20), (2, 20))
    output, _ = jax.jit(target.model.forward)(target.params, jnp.array(texts), cache, positions=positions, mask=mask)
    np.testing.assert_allclose(output.logits, theirs.numpy(), atol=5e-4, rtol=0)
    best = target.model.best(target.params, output.hidden, 3)
    np.testing.assert_array_equal(best.tokens, jax.lax.top_k(output.logits, 3)[1])
    np.testing.assert_allclose(best.total, jax.nn.logsumexp(output.logits, -1), rtol=1e-5)


def test_greedy_text_is_that_of_transformers(pair):
    """The first token is forced, so it belongs to the prompt."""
    model, target = pair
    start = target.model.config.text_start
    assert start == (2, 0)
    ours = specjax.decode(
        target, "token_recycling", [start] * 2, key=0, inputs=sources(SOURCES), max_new_tokens=24, eos=2
    ).to_lists()
    for source, text in zip(SOURCES, ours, strict=True):
        theirs = model.generate(torch.tensor([source]), max_new_tokens=25, forced_bos_token_id=0)[0].tolist()
        assert [2, 0, *text] == theirs


@pytest.mark.parametrize("length", [5, 14])
def test_texts_of_the_maximum_length_end_as_those_of_transformers(pair, length):
    """Both tokens that the files force are processors here, so the prompt is the first token only."""
    model, target = pair
    rules = [forced({0: 0, length - 1: 2})]
    ours = specjax.decode(
        target, "prompt_lookup", [[2]] * 2, key=0, inputs=sources(SOURCES), max_new_tokens=length, eos=2,
        processors=rules,
    ).to_lists()  # fmt: skip
    forces = {"forced_bos_token_id": 0, "forced_eos_token_id": 2}
    for source, text in zip(SOURCES, ours, strict=True):
        theirs = model.generate(torch.tensor([source]), max_new_tokens=length, **forces)[0].tolist()
        assert [2, *text] == theirs and text[-1] == 2
    free = specjax.decode(
        target, "prompt_lookup", [[2, 0]] * 2, key=0, inputs=sources(SOURCES), max_new_tokens=length - 1, eos=2
    ).to_lists()
    assert any(text[-1] != 2 for text in free)


def test_the_token_that_ends_texts_is_read(pair, folder, tmp_path, capsys):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps(generation | {"forced_eos_token_id": 2}))
    assert specjax.load(str(tmp_path))[0].model.config.last_token == 2
    assert pair[1].model.config.last_token is None
    flags = ["--method", "prompt_lookup", "--max-new-tokens", "4", "--compare", "--json"]
    with pytest.raises(SystemExit) as end:
        main(["generate", "w4 w5 w6", "--target", str(tmp_path), *flags])
    record = json.loads(capsys.readouterr().out)
    assert not end.value.code and record["results"][0]["token_ids"][-1] == 2


def test_saved_models(pair, folder, tmp_path):
    target, tokenizer = specjax.load(str(folder))
    specjax.save_model(tmp_path, target, tokenizer)
    copy, _ = specjax.load(str(tmp_path))
    assert copy.model.config == dataclasses.replace(target.model.config, name=copy.model.config.name)
    jax.tree.map(np.testing.assert_array_equal, target.params, copy.params)


def test_the_forced_token_can_stand_in_generation_config_only(pair, folder, tmp_path):
    """transformers 5 saves it there. It counts before the one of config.json."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    for field in ({"forced_bos_token_id": 9}, {}):
        (tmp_path / "config.json").write_text(json.dumps(config | {"forced_bos_token_id": None} | field))
        (tmp_path / "generation_config.json").write_text(json.dumps(generation | {"forced_bos_token_id": 7}))
        assert specjax.load(str(tmp_path))[0].model.config.text_start == (2, 7)


def test_sources_that_are_too_long_are_refused(pair):
    with pytest.raises(UsageError, match="reads 64 tokens"):
        specjax.decode(pair[1], "autoregressive", [[2]], key=0, inputs=sources([[3] * 70]), max_new_tokens=2)


def test_the_command_line(pair, folder, capsys):
    with pytest.raises(SystemExit) as end:
        main(["generate", "w4 w5 w6", "--target", str(folder), "--method", "prompt_lookup", "--max-new-tokens", "6",
              "--compare"])  # fmt: skip
    assert not end.value.code and "identical to plain decoding" in capsys.readouterr().out
