"""Transcripts beside those of `transformers`: windows, segments, prompts, drafts, audio files and the command line."""

import json

import numpy as np
import pytest
from scipy.io import wavfile
from speech_models import (
    ENGLISH,
    FIRST_TIME,
    GENERATION,
    GERMAN,
    NO_TIMES,
    START,
    TRANSCRIBE,
    TRANSLATE,
    recording,
    save_whisper,
)

import specjax
from specjax import UsageError, speech
from specjax.cli import main
from specjax.speech.transcript import cut_window

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def one_thread():
    """Threads of torch wait for each other on busy cores, which takes longer than their tiny products."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("whisper")


@pytest.fixture(scope="module")
def loaded(folder):
    """Return the model of transformers, the target, its tokenizer and its settings."""
    model = save_whisper(folder)
    target, tokenizer = specjax.load(str(folder))
    return model, target, tokenizer, speech.read_settings(folder, target, tokenizer)


def their_transcript(model, target, audio, **options):
    """Return the segments of transformers: start, end and tokens."""
    frames = torch.tensor(speech.log_mel(target.model.config, audio))[None]
    result = model.generate(frames, return_segments=True, **options)
    return [(s["start"].item(), s["end"].item(), s["tokens"].tolist()) for s in result["segments"][0]]


def test_long_audio_is_that_of_transformers(loaded):
    """Windows start at the last finished segment, so each depends on the times of the one before."""
    model, target, tokenizer, settings = loaded
    for seed in range(2):
        audio = recording(1.0, seed)
        ours = speech.transcribe(target, tokenizer, audio, settings, "prompt_lookup", language="de", task="translate")
        theirs = their_transcript(
            model, target, audio, return_timestamps=True, language="de", task="translate"
        )  # fmt: skip
        assert [list(segment.tokens) for segment in ours.segments] == [tokens for *_, tokens in theirs]
        times = [(segment.start, segment.end) for segment in ours.segments]
        np.testing.assert_allclose(times, [times for *times, _ in theirs], atol=1e-9)
        assert ours.language == "de" and 2 < len(ours.windows) < 12 and len(ours.segments) > 3


def test_short_audio_is_that_of_transformers(loaded):
    """The language is detected, and the audio is padded to a window."""
    model, target, tokenizer, settings = loaded
    for seed in range(2):
        audio = recording(0.3, seed)
        ours = speech.transcribe(target, tokenizer, audio, settings, "autoregressive", task="transcribe")
        theirs = their_transcript(model, target, audio, return_timestamps=False, task="transcribe")
        assert [list(segment.tokens) for segment in ours.segments] == [tokens for *_, tokens in theirs]
        assert ours.language in ("de", "en")


def test_windows_are_cut_at_pairs_of_times():
    """The four kinds of ends: unfinished text, a single time, one segment only, and no times."""
    at = lambda step: FIRST_TIME + step
    cut = lambda *tokens: cut_window(tokens, FIRST_TIME, 100, 48)
    spans = lambda result: [(segment.start, segment.end) for segment in result.segments]
    unfinished = cut(at(0), 7, at(5), at(5), 8, at(9), at(9), 4)
    np.testing.assert_allclose(spans(unfinished), [(1.0, 1.1), (1.1, 1.18)])
    assert unfinished.advance == 18
    finished = cut(at(0), 7, at(5), at(5), 8, at(9))
    np.testing.assert_allclose(spans(finished), [(1.0, 1.1), (1.1, 1.18)])
    assert finished.advance == 48
    np.testing.assert_allclose(spans(cut(at(0), 7, 8, at(5))), [(1.0, 1.1)])
    np.testing.assert_allclose(spans(cut(7, 8)), [(1.0, 1.48)])
    assert cut().advance == 48


def test_prompts(loaded, folder):
    settings = loaded[3]
    assert settings.prompt(GERMAN, None, times=True) == [START, GERMAN, TRANSCRIBE]
    assert settings.prompt(ENGLISH, "translate", times=False) == [START, ENGLISH, TRANSLATE, NO_TIMES]
    old = settings._replace(forced=(None, TRANSLATE))
    assert old.prompt(ENGLISH, None, times=True) == [START, ENGLISH, TRANSLATE]
    english = settings._replace(languages={}, tasks={})
    assert english.prompt(None, None, times=False) == [START, NO_TIMES]
    with pytest.raises(UsageError, match="English only"):
        english.prompt(None, "translate", times=True)
    with pytest.raises(UsageError, match='does not know the language "fr"; it knows de, en'):
        settings.language_of("fr")


@pytest.mark.parametrize(
    "field",
    [{"suppress_tokens": ["a"]}, {"lang_to_id": {"<|en|>": -1}}, {"forced_decoder_ids": [[2, 3]]},
     {"no_timestamps_token_id": 90}],
)  # fmt: skip
def test_damaged_settings_are_refused(loaded, tmp_path, field):
    (tmp_path / "generation_config.json").write_text(json.dumps(GENERATION | field))
    with pytest.raises(UsageError):
        speech.read_settings(tmp_path, loaded[1], loaded[2])


@pytest.mark.parametrize("kind", [np.int16, np.int32, np.uint8, np.float32])
def test_audio_files(kind, tmp_path):
    """Samples of all types and rates are the same sound, and channels are averaged."""
    audio = recording(0.2)
    scale, offset = {np.int16: (1 << 15, 0), np.int32: (1 << 31, 0), np.uint8: (128, 128), np.float32: (1, 0)}[kind]
    stored = np.stack([audio * 0.5, audio * 1.5], 1) * scale + offset
    wavfile.write(tmp_path / "a.wav", 16_000, stored.astype(kind))
    np.testing.assert_allclose(speech.read_wav(tmp_path / "a.wav"), audio, atol=2e-2 if kind == np.uint8 else 1e-4)
    wavfile.write(tmp_path / "b.wav", 8_000, stored[::2].astype(kind))
    assert len(speech.read_wav(tmp_path / "b.wav")) == len(audio)


def transcribe(capsys, *arguments):
    """Return the exit code and both outputs of a command."""
    with pytest.raises(SystemExit) as end:
        main(["transcribe", *map(str, arguments)])
    return end.value.code, *capsys.readouterr()


def test_the_command_line(loaded, folder, tmp_path, capsys):
    """A draft model reads the same audio, and the text is that of plain decoding."""
    save_whisper(tmp_path, seed=1)
    audio = recording(1.2)
    wavfile.write(tmp_path / "a.wav", 16_000, audio)
    flags = ["--target", folder, "--draft", tmp_path, "--num-draft-tokens", 2, "--language", "en", "--compare"]
    code, out, _ = transcribe(capsys, tmp_path / "a.wav", *flags, "--json")
    document = json.loads(out)
    target, tokenizer, settings = loaded[1:]
    plain = speech.transcribe(target, tokenizer, audio, settings, "autoregressive", language="en")
    assert not code and document["identical"] and document["drafted"] > 0 and document["language"] == "en"
    assert [tuple(segment["token_ids"]) for segment in document["segments"]] == [s.tokens for s in plain.segments]
    assert document["text"] == plain.text and document["timestamps"] and document["windows"] > 1
    assert document["log_mel_seconds"] > 0


def test_text_with_times(loaded, folder, tmp_path, capsys):
    wavfile.write(tmp_path / "a.wav", 16_000, recording(0.3))
    flags = ["--target", folder, "--method", "autoregressive", "--timestamps", "--language", "en"]
    code, out, _ = transcribe(capsys, tmp_path / "a.wav", *flags)
    assert not code and out.startswith("[00:00.") and "0.3 s in" in out


def test_wrong_inputs_are_one_sentence(loaded, folder, tmp_path, capsys):
    (tmp_path / "text.wav").write_text("no sound")
    wavfile.write(tmp_path / "empty.wav", 16_000, np.zeros(0, np.int16))
    wavfile.write(tmp_path / "a.wav", 16_000, recording(0.2))
    cases = [
        (["text.wav"], "is not a WAV file"), (["missing.wav"], "cannot be read (No such file"),
        (["empty.wav"], "has no samples"), (["a.wav", "--language", "xx"], 'does not know the language "xx"'),
        (["a.wav", "--task", "sing"], "--task must be transcribe or translate"),
    ]  # fmt: skip
    for (name, *flags), error in cases:
        code, _, err = transcribe(capsys, tmp_path / name, "--target", folder, "--method", "autoregressive", *flags)
        assert code == 2 and error in err.splitlines()[-1] and "Traceback" not in err
    (tmp_path / "other").mkdir()
    save_whisper(tmp_path / "other", num_mel_bins=8)
    flags = ["--target", folder, "--draft", tmp_path / "other"]
    assert "--draft: other reads spectrograms of 8 bins" in transcribe(capsys, tmp_path / "a.wav", *flags)[2]
    assert "--target is missing" in transcribe(capsys, tmp_path / "a.wav")[2]


def test_other_commands_name_transcribe(loaded, folder, capsys):
    for command in ("generate", "explain"):
        with pytest.raises(SystemExit) as end:
            main([command, "w3", "--target", str(folder)])
        assert end.value.code == 2 and "specjax transcribe" in capsys.readouterr().err
