"""A real Whisper model beside transformers: tokens, times, word errors and seconds.

    espeak-ng -s 150 -w talk.wav -f talk.txt
    python benchmarks/speech_parity.py openai/whisper-tiny.en talk.wav other.wav

The model is a hub id or a folder of Hugging Face or CTranslate2; transformers reads a copy of the latter in its own
form. A text file beside a recording has its words. Short recordings run without and with times, and long ones also with
the text of earlier windows. Both libraries use float32. The seconds are the least of three calls after a first.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers

import specjax
from specjax import speech
from specjax.models.loading import resolve
from specjax.speech.audio import HOP, RATE


def reference(source: str, target: specjax.Target, tokenizer: Any, settings: speech.SpeechSettings) -> Any:
    """Return the model of transformers. A folder of another format is saved in its form first."""
    folder = resolve(source)
    if (folder / "generation_config.json").is_file():
        return transformers.WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    with tempfile.TemporaryDirectory() as copy:
        specjax.save_model(Path(copy) / "model", target, tokenizer)
        model = transformers.WhisperForConditionalGeneration.from_pretrained(Path(copy) / "model").eval()
    config = transformers.GenerationConfig(
        decoder_start_token_id=settings.start, eos_token_id=settings.end, pad_token_id=settings.end,
        bos_token_id=settings.end, max_length=target.model.max_positions, suppress_tokens=list(settings.suppressed),
        begin_suppress_tokens=list(settings.suppressed_first),
    )  # fmt: skip
    config.no_timestamps_token_id, config.is_multilingual = settings.no_times, bool(settings.languages)
    config.max_initial_timestamp_index, config.prev_sot_token_id = settings.max_initial, settings.previous
    if settings.languages:
        config.lang_to_id = {f"<|{code}|>": token for code, token in settings.languages.items()}
        config.task_to_id = dict(settings.tasks)
    model.generation_config = config
    return model


def words(text: str) -> list[str]:
    """Return the words of a text without case and punctuation."""
    return re.sub(r"[^a-z0-9 ]", "", re.sub(r"[\s-]+", " ", text.lower())).split()


def word_errors(wanted: list[str], answer: list[str]) -> int:
    """Return the smallest number of inserted, deleted and changed words."""
    row = np.arange(len(answer) + 1)
    for i, word in enumerate(wanted, 1):
        above, row = row, np.full(len(answer) + 1, i)
        for j, other in enumerate(answer, 1):
            row[j] = min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (word != other))
    return int(row[-1])


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of a call, and the least seconds of three calls after a first one."""
    run()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        result = run()
        times.append(time.perf_counter() - start)
    return result, min(times)


class Comparison(NamedTuple):
    """A model in both libraries."""

    target: specjax.Target
    tokenizer: Any
    settings: speech.SpeechSettings
    model: Any

    def row(self, audio: np.ndarray, method: str, options: dict[str, bool], wanted: list[str] | None) -> list[str]:
        """Return the columns of a recording: tokens, segments, word errors and both times."""
        frames = torch.tensor(speech.log_mel(self.target.model.config, audio))[None]
        theirs = {"return_timestamps" if name == "times" else name: value for name, value in options.items()}
        result, their_seconds = timed(lambda: self.model.generate(frames, return_segments=True, **theirs))
        ours, seconds = timed(
            lambda: speech.transcribe(self.target, self.tokenizer, audio, self.settings, method, **options)
        )
        segments = result["segments"][0]
        is_equal = [list(segment.tokens) for segment in ours.segments] == [s["tokens"].tolist() for s in segments]
        spans = [(segment["start"].item(), segment["end"].item()) for segment in segments]
        in_time = is_equal and np.allclose([(segment.start, segment.end) for segment in ours.segments], spans)
        errors = "" if wanted is None else f"{word_errors(wanted, words(ours.text))} of {len(wanted)}"
        state = lambda value: "equal" if value else "differ"
        spans_are = state(in_time) if options["times"] else ""
        return [state(is_equal), spans_are, errors, f"{their_seconds:.2f} s", f"{seconds:.2f} s"]


def main() -> None:
    """Print a row for each recording, kind of text and method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--methods", nargs="+", default=["autoregressive", "prompt_lookup"])
    arguments = parser.parse_args()
    target, tokenizer = specjax.load(arguments.model, dtype="float32")
    settings = speech.read_settings(arguments.model, target, tokenizer)
    comparison = Comparison(target, tokenizer, settings, reference(arguments.model, target, tokenizer, settings))
    titles = "recording", "text", "method", "tokens", "segments", "word errors", "transformers", "specjax"
    print(f"| {' | '.join(titles)} |", "| --- " * len(titles) + "|", sep="\n")
    for file in arguments.files:
        audio, stated = speech.read_wav(file), file.with_suffix(".txt")
        wanted = words(stated.read_text()) if stated.is_file() else None
        is_long = len(audio) > target.model.config.source_frames * HOP
        kinds: dict[str, dict[str, bool]] = {} if is_long else {"text": {"times": False}}
        kinds["times"] = {"times": True}
        if is_long:
            kinds["earlier text"] = {"times": True, "condition_on_prev_tokens": True}
        for kind, options in kinds.items():
            for method in arguments.methods:
                columns = comparison.row(audio, method, options, wanted)
                name = f"{file.name}, {len(audio) / RATE:.1f} s"
                print(f"| {' | '.join([name, kind, method, *columns])} |", flush=True)


if __name__ == "__main__":
    main()
