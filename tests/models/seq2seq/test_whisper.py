"""Whisper beside `transformers`: logits, trees, greedy texts of drafts, saved and quantised models."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chunked_logits import logits_in_chunks
from jax.interpreters import partial_eval as pe
from scipy.io import wavfile
from speech_models import END, NO_TIMES, START, recording, save_whisper, write_ctranslate2

import specjax
from specjax import UsageError, speech
from specjax.cli import main
from specjax.models import sources, spectrograms

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("whisper")


@pytest.fixture(scope="module")
def pair(folder):
    model = save_whisper(folder)
    model.generation_config = transformers.GenerationConfig(eos_token_id=END, decoder_start_token_id=START)
    return model, specjax.load(str(folder))[0]


def frames(batch=2):
    return np.random.default_rng(1).normal(size=(batch, 6, 48)).astype(np.float32)


def texts_of(length, batch=2):
    rng = np.random.default_rng(0)
    return [[START, *rng.integers(0, 49, length - 1).tolist()] for _ in range(batch)]


def their_logits(model, texts):
    with torch.no_grad():
        return model(torch.tensor(frames()), decoder_input_ids=torch.tensor(texts)).logits.numpy()


def our_logits(target, texts, chunk):
    """Return the logits of texts that are read in chunks of tokens."""
    return logits_in_chunks(target, texts, spectrograms(frames()), chunk)


@pytest.mark.parametrize("chunk", [1, 7])
def test_logits_are_those_of_transformers(pair, chunk):
    model, target = pair
    texts = texts_of(30)
    np.testing.assert_allclose(our_logits(target, texts, chunk), their_logits(model, texts), atol=5e-4, rtol=0)


def test_siblings_of_a_tree_have_the_position_of_their_depth(pair):
    """Score a tree with two branches in one pass; each branch has the logits of its text."""
    model, target = pair
    texts = texts_of(12)
    cache = target.model.init_cache(target.params, spectrograms(frames()), 2, 64)
    forward = jax.jit(target.model.forward)
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((12, 12), bool)), (2, 12, 12))
    index = jnp.broadcast_to(jnp.arange(12), (2, 12))
    _, pending = forward(target.params, jnp.array(texts), cache, positions=index, mask=causal)
    cache = target.model.commit(cache, pending, index, jnp.array([12, 12]))
    branches = [[5, 6, 7], [8, 9, 10]]
    tokens = jnp.broadcast_to(jnp.array(branches).reshape(-1), (2, 6))
    mask = jnp.broadcast_to(np.kron(np.eye(2), np.tril(np.ones((3, 3)))).astype(bool), (2, 6, 6))
    depths = jnp.array([0, 1, 2, 0, 1, 2])
    run = lambda depths: (
        forward(target.params, tokens, cache, positions=jnp.broadcast_to(12 + depths, (2, 6)), mask=mask)[0].logits
    )
    for i, branch in enumerate(branches):
        theirs = their_logits(model, [text + branch for text in texts])[:, 12:]
        np.testing.assert_allclose(run(depths)[:, 3 * i : 3 * i + 3], theirs, atol=5e-4, rtol=0)
    assert np.abs(run(jnp.arange(6))[:, 3:] - theirs).max() > 0.1, "positions in the order of the nodes are wrong"


@pytest.mark.parametrize("method", ["prompt_lookup", "token_recycling", "auto"])
def test_greedy_text_is_that_of_transformers(pair, method):
    model, target = pair
    ours = specjax.decode(
        target, method, [[START]] * 2, key=0, inputs=spectrograms(frames()), max_new_tokens=40, eos=END
    ).to_lists()
    for row, text in zip(frames(), ours, strict=True):
        theirs = transformers.GenerationMixin.generate(
            model, torch.tensor(row)[None], decoder_input_ids=torch.tensor([[START]]), max_new_tokens=40,
            attention_mask=torch.ones(1, 48),
        )  # fmt: skip
        assert text == theirs[0, 1:].tolist()
    assert len({tuple(text) for text in ours}) == 2, "the texts depend on the speech"


def test_wrong_inputs_are_refused(pair, folder):
    target = pair[1]
    decode = lambda inputs: specjax.decode(target, "autoregressive", [[START]], key=0, max_new_tokens=2, inputs=inputs)
    for inputs, match in ((None, "needs inputs"), (sources([[3]]), "needs spectrograms")):
        with pytest.raises(UsageError, match=match):
            decode(inputs)
    with pytest.raises(UsageError, match="6 bins and 48 frames, not 6 and 40"):
        decode(spectrograms(frames(1)[:, :, :40]))
    for wrong in ([], frames()[:1] * np.nan, [[1.0]], [np.ones((6, 48)), np.ones((6, 40))]):
        with pytest.raises(UsageError, match="spectrogram"):
            spectrograms(wrong)


def test_a_limit_of_positions_keeps_the_table(folder, pair):
    limited, _ = specjax.load(str(folder), max_positions=32)
    texts = texts_of(6)
    np.testing.assert_array_equal(our_logits(limited, texts, 6), our_logits(pair[1], texts, 6))


def test_costs_count_the_parameters_of_a_pass(pair):
    """A pass of the decoder reads neither the encoder nor the projections of the source."""
    target = pair[1]
    text = jnp.zeros((2, 1), jnp.int32)
    cache = target.model.init_cache(target.params, spectrograms(frames()), 2, 8)
    of = lambda params: target.model.forward(params, text, cache, positions=text, mask=jnp.ones((2, 1, 1), bool))[0]
    jaxpr = jax.make_jaxpr(lambda params: of(params).logits)(target.params)
    closed, _ = pe.dce_jaxpr(jaxpr.jaxpr, [True])
    assert sum(x.size for x in jax.tree.leaves(target.pass_params)) == sum(var.aval.size for var in closed.invars)


def test_saved_and_quantised_models(pair, folder, tmp_path):
    """A saved model has the same parameters. In a quantised one the positions and convolutions stay."""
    target, tokenizer = specjax.load(str(folder))
    specjax.save_model(tmp_path, target, tokenizer)
    copy, _ = specjax.load(str(tmp_path))
    assert copy.model.config == dataclasses.replace(target.model.config, name=copy.model.config.name)
    jax.tree.map(np.testing.assert_array_equal, target.params, copy.params)
    theirs = transformers.WhisperForConditionalGeneration.from_pretrained(
        tmp_path, pad_token_id=None, bos_token_id=None, eos_token_id=None
    )
    np.testing.assert_allclose(their_logits(theirs, texts_of(4)), their_logits(pair[0], texts_of(4)), atol=1e-5)
    quantized, _ = specjax.load(str(folder), quantize="int8")
    texts = texts_of(6)
    ours, rounded = our_logits(target, texts, 6), our_logits(quantized, texts, 6)
    assert 0 < np.abs(ours - rounded).max() < 0.25 * np.abs(ours).max()
    for name in ("positions", "encoder_positions"):
        np.testing.assert_array_equal(quantized.params[name]["table"], target.params[name]["table"])


def test_ctranslate2_folders(pair, tmp_path):
    """The parameters are those of the original, rounded to float16, also where the file joins projections."""
    write_ctranslate2(tmp_path, pair[0])
    target, tokenizer = specjax.load(str(tmp_path))
    assert target.model.config == dataclasses.replace(pair[1].model.config, name=target.model.config.name)
    rounded = jax.tree.map(lambda x: x.astype(jnp.float16).astype(jnp.float32), pair[1].params)
    jax.tree.map(np.testing.assert_array_equal, target.params, rounded)
    settings = speech.read_settings(tmp_path, target, tokenizer)
    assert (settings.start, settings.end, settings.no_times) == (START, END, NO_TIMES)
    assert settings.suppressed == (5, 6, *range(50, 55)) and settings.suppressed_first == (3, END)


def test_a_folder_of_ctranslate2_drafts_and_is_named_where_it_cannot_run(pair, folder, tmp_path, capsys):
    write_ctranslate2(tmp_path, pair[0])
    wavfile.write(tmp_path / "a.wav", 16_000, recording(0.1))
    run = lambda *arguments: main([*arguments, "--max-new-tokens", "2", "--compare", "--num-draft-tokens", "2"])
    with pytest.raises(SystemExit) as end:
        run("transcribe", str(tmp_path / "a.wav"), "--target", str(folder), "--draft", str(tmp_path))
    assert not end.value.code and "identical to plain decoding" in capsys.readouterr().out
    for arguments in (["inspect", str(tmp_path)], ["plan", "--topology", "v5e:1x1", "--target", str(tmp_path)]):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 2 and "descriptions of the encoder-decoder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "error"),
    [({"version": 3}, "version 3"), ({"spec": "TransformerSpec"}, "TransformerSpec"), ({"kind": 1}, "weights of int8"),
     ({"kind": 2}, "weights of int16")],
)  # fmt: skip
def test_other_ctranslate2_files_are_refused(pair, tmp_path, options, error):
    write_ctranslate2(tmp_path, pair[0], **options)
    with pytest.raises(UsageError, match=error):
        specjax.load(str(tmp_path))


@pytest.mark.parametrize("name", ["model.bin", "vocabulary.txt"])
def test_incomplete_ctranslate2_folders_are_refused(pair, tmp_path, name):
    write_ctranslate2(tmp_path, pair[0])
    (tmp_path / name).unlink()
    with pytest.raises(UsageError, match="has a config of CTranslate2 and lacks"):
        specjax.load(str(tmp_path))


@pytest.mark.parametrize("name", ["decoder/layer_0/ffn/linear_0/weight", "encoder/position_encodings/encodings"])
def test_ctranslate2_files_without_a_matrix_are_refused(pair, tmp_path, name):
    write_ctranslate2(tmp_path, pair[0])
    contents = (tmp_path / "model.bin").read_bytes()
    (tmp_path / "model.bin").write_bytes(contents.replace(name.encode(), name[:-1].encode() + b"x"))
    with pytest.raises(UsageError, match=f"lacks the tensor {name}"):
        specjax.load(str(tmp_path))


def test_the_file_of_ctranslate2_is_downloaded(monkeypatch, pair, tmp_path):
    """A hub id gets the files of its patterns only."""
    (tmp_path / "all").mkdir()
    write_ctranslate2(tmp_path / "all", pair[0])

    def snapshot(repo, *, allow_patterns, **options):
        for file in (tmp_path / "all").iterdir():
            if any(file.match(pattern) for pattern in allow_patterns):
                shutil.copy(file, tmp_path)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert specjax.load("somebody/faster-whisper")[0].model.config.text_start == (START,)


def test_damaged_ctranslate2_files_are_refused(pair, tmp_path):
    write_ctranslate2(tmp_path, pair[0])
    contents = (tmp_path / "model.bin").read_bytes()
    for length in (0, 3, 40, len(contents) // 2, len(contents) - 200):
        (tmp_path / "model.bin").write_bytes(contents[:length])
        with pytest.raises(UsageError):
            specjax.load(str(tmp_path))
