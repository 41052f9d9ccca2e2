"""Settings of speech models from their files: languages, tasks, the first token, and the audio that is refused."""

import json

import numpy as np
import pytest
from speech_models import END, ENGLISH, GENERATION, GERMAN, START, TRANSLATE, recording, save_whisper, write_ctranslate2

import specjax
from specjax import UsageError, speech
from specjax.processors import ban
from specjax.speech.audio import count_frames
from specjax.speech.fallback import WindowText

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Return the model of transformers, the target, its tokenizer and its folder."""
    folder = tmp_path_factory.mktemp("whisper")
    model = save_whisper(folder)
    return model, *specjax.load(str(folder)), folder


def settings_of(loaded, folder, **fields):
    """Return the settings of the loaded model with other fields in generation_config.json."""
    (folder / "generation_config.json").write_text(json.dumps(GENERATION | fields))
    return speech.read_settings(folder, *loaded[1:3])


def prompt_of(target, settings, language=None, task=None):
    """Return the tokens before the text of a recording."""
    frames = speech.log_mel(target.model.config, recording(0.3))
    return speech.choose_prompt(target, settings, frames, language, task, times=False)[1]


STATED = [
    {"language": "en", "task": "translate"}, {"language": "German", "task": "transcribe"}, {"task": "translate"},
    {"language": "<|en|>"}, {"language": ["en"]},
    {"language": "en", "forced_decoder_ids": [[1, GERMAN], [2, TRANSLATE]]},
]  # fmt: skip


@pytest.mark.parametrize("fields", STATED, ids=str)
def test_the_language_and_task_of_the_files_are_those_of_transformers(loaded, tmp_path, fields):
    model, target = loaded[:2]
    settings = settings_of(loaded, tmp_path, **fields)
    config = transformers.GenerationConfig.from_dict(GENERATION | fields | {"return_timestamps": False})
    frames = torch.tensor(speech.log_mel(target.model.config, recording(0.3)))[None]
    theirs = model._retrieve_init_tokens(frames, 1, config, model.config, 48, {})[0].tolist()
    assert prompt_of(target, settings) == theirs


def test_given_languages_and_tasks_win(loaded, tmp_path):
    settings = settings_of(loaded, tmp_path, language="de", task="translate")
    for name in ("en", "EN", "English", "<|en|>"):
        assert prompt_of(loaded[1], settings, name)[1:3] == [ENGLISH, TRANSLATE]
    assert prompt_of(loaded[1], settings, None, "transcribe")[1] == GERMAN
    for language in ("klingon", "lao", 5):
        with pytest.raises(UsageError, match="language"):
            prompt_of(loaded[1], settings, language)
    english = settings._replace(languages={}, tasks={}, default_language=None, default_task=None)
    assert prompt_of(loaded[1], english, "EN")[0] == START
    with pytest.raises(UsageError, match='English only, not "de"'):
        prompt_of(loaded[1], english, "de")
    with pytest.raises(UsageError, match="must be one language"):
        settings_of(loaded, tmp_path, language=["de", "en"])


def test_a_folder_of_ctranslate2_limits_the_first_time_to_a_second(loaded, tmp_path):
    write_ctranslate2(tmp_path, loaded[0])
    assert speech.read_settings(tmp_path, *loaded[1:3]).max_initial == 50
    (tmp_path / "without").mkdir()
    assert settings_of(loaded, tmp_path / "without", max_initial_timestamp_index=None).max_initial is None


def test_the_first_token_can_stand_in_generation_config_only(loaded, tmp_path):
    save_whisper(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(GENERATION | {"decoder_start_token_id": 48}))
    for names in ({"decoder_start_token_id": 7}, {}):
        config = json.loads((tmp_path / "config.json").read_text())
        config.pop("decoder_start_token_id", None)
        (tmp_path / "config.json").write_text(json.dumps(config | names))
        assert specjax.load(str(tmp_path))[0].model.config.text_start == (48,)


@pytest.mark.parametrize(
    "audio",
    [np.zeros(99, np.int16), np.zeros((9, 2)), np.zeros(0), np.array([np.nan]), "talk.wav", None],
    ids=["integers", "two channels", "empty", "not finite", "a path", "nothing"],
)
def test_audio_of_another_form_is_refused(loaded, audio):
    with pytest.raises(UsageError, match="audio"):
        speech.log_mel(loaded[1].model.config, audio)


def test_text_without_times_ends_with_the_recording(loaded, tmp_path):
    """The window of a short recording is filled with silence, where no text ends."""
    settings = settings_of(loaded, tmp_path)
    token = settings.first_time
    read = lambda tokens, seconds: [
        (segment.start, segment.end)
        for segment in speech.read_windows(
            loaded[1], loaded[2], settings, speech.log_mel(loaded[1].model.config, recording(seconds)),
            lambda call: WindowText(tokens), prompt=[START], num_frames=count_frames(recording(seconds)),
        ).segments
    ]  # fmt: skip
    assert read([5, 6, END], 0.1) == [(0.0, 0.1)]
    assert read([token, 5, token + 3, END], 0.1) == [(0.0, 0.06)]
    assert read([5, 6, END], 0.6) == [(0.0, 0.48), (0.48, 0.6)]
    options = {"max_new_tokens": 2, "processors": [ban(range(token, 81))]}
    transcript = speech.transcribe(*loaded[1:3], recording(0.1), settings, "autoregressive", **options)
    assert [(segment.start, segment.end) for segment in transcript.segments] == [(0.0, 0.1)]


def test_a_limit_of_no_tokens_is_refused(loaded, tmp_path):
    settings = settings_of(loaded, tmp_path)
    assert settings.end == END
    short, _ = specjax.load(str(loaded[3]), max_positions=3)
    with pytest.raises(UsageError, match="at most 3 tokens, and the text begins with 4; raise max_positions"):
        speech.transcribe(short, loaded[2], recording(0.1), settings, "autoregressive")
    with pytest.raises(UsageError, match="max_new_tokens must be at least 1, not 0"):
        speech.transcribe(*loaded[1:3], recording(0.1), settings, "autoregressive", max_new_tokens=0)
