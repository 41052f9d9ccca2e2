"""Attempts at several temperatures, windows without speech and the text of earlier windows, beside transformers."""

import json
import zlib

import numpy as np
import pytest
from scipy.io import wavfile
from speech_models import END, FIRST_TIME, GENERATION, START, recording, save_whisper

import specjax
from specjax import UsageError, speech
from specjax.bench import measure
from specjax.cli import main
from specjax.speech import windows
from specjax.speech.fallback import PLAIN_RULES, WindowText, compression_ratio, earlier_text, judge_window

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

PREVIOUS = 48
OPTIONS = {"language": "de", "task": "transcribe"}


@pytest.fixture(autouse=True)
def one_thread():
    """Threads of torch wait for each other on busy cores, which takes longer than their tiny products."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Return the model of transformers, the target, its tokenizer, its settings and its folder."""
    folder = tmp_path_factory.mktemp("whisper")
    model = save_whisper(folder)
    model.generation_config.prev_sot_token_id = PREVIOUS
    (folder / "generation_config.json").write_text(json.dumps(GENERATION | {"prev_sot_token_id": PREVIOUS}))
    target, tokenizer = specjax.load(str(folder))
    return model, target, tokenizer, speech.read_settings(folder, target, tokenizer), folder


def their_windows(model, target, audio, **options):
    """Return the segments of transformers, and the text, mean log-probability and decision of each attempt."""
    attempts, averages = [], []
    judge, average = type(model)._need_fallback, type(model)._retrieve_avg_logprobs

    def record(self, tokens, *args):
        attempts.append((tokens.tolist(), args[-1], judge(self, tokens, *args)))
        return attempts[-1][-1]

    def record_average(*args):
        averages.append(float(average(*args)))
        return torch.tensor(averages[-1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "_need_fallback", record)
        patch.setattr(type(model), "_retrieve_avg_logprobs", staticmethod(record_average))
        frames = torch.tensor(speech.log_mel(target.model.config, audio))[None]
        result = model.generate(
            frames, return_segments=True, return_timestamps=True, top_k=0, **OPTIONS, **{"temperature": 0.0} | options
        )  # fmt: skip
    return [s["tokens"].tolist() for s in result["segments"][0]], attempts, averages


def our_windows(loaded, audio, method="prompt_lookup", **options):
    """Return the segments of a transcript, and the transcript."""
    transcript = speech.transcribe(*loaded[1:3], audio, loaded[3], method, **OPTIONS, **options)
    return [list(segment.tokens) for segment in transcript.segments], transcript


def test_earlier_text_is_that_of_transformers(loaded):
    """The prompts of later windows are cut to half of the 64 positions, and change the text."""
    audio = recording(2.5)
    ours, transcript = our_windows(loaded, audio, condition_on_prev_tokens=True)
    theirs, *_ = their_windows(*loaded[:2], audio, condition_on_prev_tokens=True)
    assert ours == theirs and len(transcript.windows) > 4
    assert sum(map(len, ours)) > 40
    assert ours != our_windows(loaded, audio)[0]
    assert ours == our_windows(loaded, audio, "autoregressive", condition_on_prev_tokens=True)[0]


def test_earlier_text_ends_with_one_time():
    at = lambda step: FIRST_TIME + step
    segment = lambda *tokens: speech.SpeechSegment(0.0, 1.0, tokens)
    text = segment(at(0), 7, at(2)), segment(at(2), 8, at(4), at(4))
    assert earlier_text(text, 9, FIRST_TIME, 64) == [9, at(0), 7, at(2), at(2), 8, at(4)]
    assert earlier_text(text, 9, FIRST_TIME, 8) == [9, at(2), 8, at(4)]
    assert earlier_text(text, 9, FIRST_TIME, 3) == [9]
    with pytest.raises(UsageError, match=r"needs the token <\|startofprev\|>"):
        earlier_text(text, None, FIRST_TIME, 64)


def thresholds(model, target, audio):
    """Return thresholds that about half of the greedy windows of a recording pass."""
    _, attempts, averages = their_windows(model, target, audio, logprob_threshold=-100.0)
    ratios = [compression_ratio(tokens, 81) for tokens, *_ in attempts]
    middle = lambda values: float(np.mean(sorted(set(values))[len(set(values)) // 2 - 1 :][:2]))
    return middle(averages), middle(ratios)


@pytest.mark.parametrize("condition", [False, True])
def test_decisions_are_those_of_transformers(loaded, condition):
    """The second temperature is so low that its draws are the greedy tokens, so each fallback has one outcome."""
    model, target = loaded[:2]
    audio = recording(2.0, 3)
    average, ratio = thresholds(model, target, audio)
    options = {
        "temperature": (0.0, 1e-4), "logprob_threshold": average, "compression_ratio_threshold": ratio,
        "condition_on_prev_tokens": condition,
    }  # fmt: skip
    theirs, attempts, _ = their_windows(model, target, audio, **options)
    ours, transcript = our_windows(loaded, audio, **options)
    last = [temperature for _, temperature, (again, _) in attempts if temperature or not again]
    assert ours == theirs and list(transcript.temperatures) == last
    assert {0.0, 1e-4} == set(last)


def test_windows_without_speech_are_those_of_transformers(loaded):
    model, target = loaded[:2]
    audio = recording(2.0, 3)
    average, _ = thresholds(model, target, audio)
    skips = set()
    for threshold in (1e-4, 0.002, 0.01, 0.05):
        options = {"logprob_threshold": average, "no_speech_threshold": threshold, "condition_on_prev_tokens": True}
        theirs, attempts, _ = their_windows(model, target, audio, **options)
        ours, transcript = our_windows(loaded, audio, **options)
        skipped = [number for number, (*_, (_, is_skipped)) in enumerate(attempts) if is_skipped]
        assert ours == theirs and list(transcript.skipped) == skipped
        skips.add(len(skipped))
    assert len(skips) > 1


def test_mean_log_probabilities_are_those_of_transformers(loaded, monkeypatch):
    """They are those after the processors, at temperature 1 and with the end of the text."""
    texts = []
    judge = lambda rules, text, *rest: texts.append(text) or judge_window(rules, text, *rest)
    monkeypatch.setattr(windows, "judge_window", judge)
    audio, options = recording(1.0, 1), {"temperature": (0.0, 1e-4), "logprob_threshold": 0.0}
    _, attempts, averages = their_windows(*loaded[:2], audio, **options)
    our_windows(loaded, audio, **options)
    assert [list(text.tokens) for text in texts] == [tokens for tokens, *_ in attempts]
    np.testing.assert_allclose([np.mean(text.logprobs) for text in texts], averages, atol=1e-4)
    assert min(averages) < -0.01


def test_the_ratio_is_that_of_zlib():
    tokens = [300, 7] * 50
    packed = np.array(tokens, "<u2").tobytes()
    assert compression_ratio(tokens, 51_865) == len(packed) / len(zlib.compress(packed)) > 5
    assert compression_ratio([1, 2, 3], 81) < 1


def test_tests_of_a_text():
    rules = PLAIN_RULES.updated((0.0, 0.5), logprob_threshold=-1.0, no_speech_threshold=0.6)
    judge = lambda rules, mean, silence, tokens=(1, 2): judge_window(
        rules, WindowText(tokens, [mean] * len(tokens)), 81, lambda: silence
    )
    assert judge(rules, -0.9, 0.9) == "accept"
    assert judge(rules, -1.1, 0.5) == "retry"
    assert judge(rules, -1.1, 0.7) == "skip"
    repeats = rules._replace(compression_ratio_threshold=2.0)
    assert judge(repeats, -0.9, 0.9, [5] * 60) == "retry"
    assert judge(repeats, -1.1, 0.7, [5] * 60) == "skip"
    assert judge(PLAIN_RULES, -9.0, 1.0) == "accept"


def test_text_of_high_temperatures_is_no_prompt(loaded):
    """A text of one window at 0.5 is left out once; it is in the prompts of later windows."""
    target, tokenizer, settings = loaded[1:4]
    rules = PLAIN_RULES.updated((0.0, 0.4, 0.5), logprob_threshold=-1.0, condition_on_prev_tokens=True)
    wanted = [0.0, 0.5, 0.4, 0.0]
    prompts = {}

    def decode_window(call):
        prompts[call.number] = list(call.prompt)
        return WindowText([10 + call.number, END], [-0.5 if call.temperature == wanted[call.number] else -2.0] * 2)

    frames = np.zeros((6, 4 * 48), np.float32)
    transcript = speech.read_windows(
        target, tokenizer, settings, frames, decode_window, prompt=[START], rules=rules
    )  # fmt: skip
    assert list(transcript.temperatures) == wanted
    assert prompts == {0: [START], 1: [PREVIOUS, 10, START], 2: [START], 3: [PREVIOUS, 10, 11, 12, START]}


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_each_attempt_is_that_of_plain_decoding(loaded, temperature):
    """Coupled draws make the text of a key the same with and without drafts, at each temperature of the attempts."""
    audio = recording(1.0, 2)
    options = {
        "temperature": (temperature, 0.9), "logprob_threshold": 0.0, "sampling": "coupled", "key": 4,
        "condition_on_prev_tokens": True,
    }  # fmt: skip
    plain, transcript = our_windows(loaded, audio, "autoregressive", **options)
    assert plain == our_windows(loaded, audio, "prompt_lookup", **options)[0]
    assert set(transcript.temperatures) == {0.9}
    assert plain != our_windows(loaded, audio, "autoregressive", **options | {"key": 5})[0]


def test_rules_of_the_files_are_read(loaded, tmp_path):
    fields = {"logprob_threshold": -1.5, "no_speech_threshold": 0.7, "condition_on_prev_tokens": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(GENERATION | fields))
    settings = speech.read_settings(tmp_path, *loaded[1:3])
    assert settings.rules == PLAIN_RULES._replace(**fields) and settings.previous == 53


def test_rules_of_files_that_need_another_one(loaded, tmp_path):
    """Files may state one threshold alone, and the call states the other one."""
    file, audio = tmp_path / "generation_config.json", recording(0.1)
    file.write_text(json.dumps(GENERATION | {"no_speech_threshold": 0.7}))
    settings = speech.read_settings(tmp_path, *loaded[1:3])
    text = speech.transcribe(*loaded[1:3], audio, settings, **OPTIONS, logprob_threshold=-9.0)
    assert set(text.temperatures) == {0.0} and text.skipped == ()
    with pytest.raises(UsageError, match="give logprob_threshold too"):
        speech.transcribe(*loaded[1:3], audio, settings, **OPTIONS)
    file.write_text(json.dumps(GENERATION | {"logprob_threshold": "low"}))
    with pytest.raises(
        UsageError, match=r'generation_config\.json has logprob_threshold "low", which must be a number'
    ):
        speech.read_settings(tmp_path, *loaded[1:3])


@pytest.mark.parametrize(
    "options, error",
    [
        ({"temperature": (0.0, 0.5)}, "several temperatures need a test"),
        ({"temperature": -1}, "must be numbers from 0"), ({"temperature": ()}, "must be numbers from 0"),
        ({"no_speech_threshold": 0.6}, "give logprob_threshold too"),
        ({"logprob_threshold": "low"}, "logprob_threshold must be a number"),
    ],
)  # fmt: skip
def test_wrong_rules_are_refused(loaded, options, error):
    with pytest.raises(UsageError, match=error):
        our_windows(loaded, recording(0.1), **options)


def transcribe(capsys, *arguments):
    """Return the exit code and both outputs of a command."""
    with pytest.raises(SystemExit) as end:
        main(["transcribe", *map(str, arguments)])
    return end.value.code, *capsys.readouterr()


def test_no_program_is_compiled_while_the_windows_are_timed(tmp_path, capsys, monkeypatch):
    """The texts of Whisper have 448 tokens, so half of them change the size of the buffers."""
    save_whisper(tmp_path, max_target_positions=448)
    (tmp_path / "generation_config.json").write_text(json.dumps(GENERATION | {"prev_sot_token_id": PREVIOUS}))
    wavfile.write(tmp_path / "a.wav", 16_000, recording(2.0, 3))
    sizes = {"warm_stream": set(), "run_stream": set()}

    def record(name):
        run = getattr(measure, name)

        def recorded(task, *args):
            sizes[name].add(task.job().tokens.shape)
            return run(task, *args)

        monkeypatch.setattr(measure, name, recorded)

    record("warm_stream"), record("run_stream")
    flags = ["--target", tmp_path, "--method", "prompt_lookup", "--language", "de", "--condition-on-prev-tokens"]
    assert not transcribe(capsys, tmp_path / "a.wav", *flags)[0]
    assert sizes["warm_stream"] >= sizes["run_stream"] and len(sizes["run_stream"]) > 1


def test_the_command_line_has_the_same_rules(loaded, tmp_path, capsys):
    audio = recording(1.0, 2)
    wavfile.write(tmp_path / "a.wav", 16_000, audio)
    base = [tmp_path / "a.wav", "--target", loaded[4], "--method", "prompt_lookup", "--language", "de"]
    flags = ["--fallback-temperatures", "0.8", "--logprob-threshold", 0, "--condition-on-prev-tokens"]
    code, out, _ = transcribe(capsys, *base, *flags, "--sampling", "coupled", "--compare", "--json")
    document = json.loads(out)
    options = {"temperature": (0.0, 0.8), "logprob_threshold": 0.0, "condition_on_prev_tokens": True}
    ours, transcript = our_windows(loaded, speech.read_wav(tmp_path / "a.wav"), **options, sampling="coupled")
    assert not code and document["identical"]
    assert [segment["token_ids"] for segment in document["segments"]] == ours
    assert document["window_temperatures"] == list(transcript.temperatures) and 0.8 in transcript.temperatures
    assert document["windows"] == len(transcript.windows) and document["skipped_windows"] == []
    for flags, error in (
        (["--fallback-temperatures", "0.2"], "--fallback-temperatures needs a test of the text; give --compression-"),
        (["--fallback-temperatures", "warm"], 'must be numbers such as 0.2,0.4,0.6, not "warm"'),
        (["--no-speech-threshold", "0.6"], "--no-speech-threshold reads only unlikely texts; give --logprob-threshold"),
        (["--temperature", "-1"], "--temperature"),
    ):
        code, _, err = transcribe(capsys, *base, *flags)
        assert code == 2 and error in err.splitlines()[-1]
