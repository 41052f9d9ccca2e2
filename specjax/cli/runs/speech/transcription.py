"""The transcription of a recording: windows with drafts and, with --compare, the same windows by plain decoding."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import typer

from specjax import speech
from specjax.bench import measure, near_ties
from specjax.bench import records as report_of
from specjax.catalog import METHODS
from specjax.cli.options.drafter_flags import MethodOptions
from specjax.cli.output.console import Console, print_json
from specjax.cli.runs.decoding import Decoding, describe_uncompared, without_draft
from specjax.cli.runs.environment import peak_memory_bytes, stage
from specjax.cli.runs.run import describe_memory, print_table
from specjax.cli.runs.session import Session, provenance
from specjax.engine.prepare import Settings
from specjax.engine.results import StreamStep
from specjax.errors import UsageError
from specjax.models.seq2seq.memory import Spectrogram
from specjax.numerics.sampling import threefry
from specjax.speech import SpeechSegment, SpeechSettings, Transcript
from specjax.speech.audio import RATE, count_frames
from specjax.speech.fallback import PLAIN_RULES, WindowRules, WindowText
from specjax.speech.windows import WindowCall, limit_length, logprobs_form, window_at
from specjax.types import Drafter, Target


def check_draft(target: Target, draft: Target) -> None:
    """Check that a draft model reads the spectrograms of the target. Raises: UsageError if it does not."""
    if not speech.is_speech_model(draft):
        raise UsageError(f"--draft: {draft.model.name} does not read speech; give a Whisper model")
    form = lambda config: (config.mel_bins, config.source_frames)
    (bins, frames), (draft_bins, draft_frames) = form(target.model.config), form(draft.model.config)
    if (bins, frames) != (draft_bins, draft_frames):
        raise UsageError(
            f"--draft: {draft.model.name} reads spectrograms of {draft_bins} bins and {draft_frames} frames, and the "
            f"target those of {bins} and {frames}; choose a draft model of the same release"
        )


class Recording(NamedTuple):
    """The audio, and how it is transcribed."""

    path: Path
    samples: np.ndarray
    language: str | None
    task: str | None
    times: bool  # the segments are printed with their times
    rules: WindowRules = PLAIN_RULES

    @property
    def seconds(self) -> float:
        return len(self.samples) / RATE


class WindowRun(NamedTuple):
    """The windows of one pass over the recording."""

    transcript: Transcript
    run: report_of.MeasuredRun
    calls: list[WindowCall]  # one per attempt


class Transcription:
    """The transcription of a recording with a method."""

    def __init__(
        self, session: Session, settings: SpeechSettings, decoding: Decoding, method: str, options: MethodOptions,
        recording: Recording,
    ):  # fmt: skip
        self.session, self.tokens, self.decoding, self.recording = session, settings, decoding, recording
        self.method, self.drafter = METHODS[method], session.drafter(method, options)
        config = session.target.model.config
        start = time.perf_counter()
        self.frames = speech.log_mel(config, recording.samples)
        self.log_mel_seconds = time.perf_counter() - start
        self.times = recording.times or self.frames.shape[1] > config.source_frames
        self.language, self.prompt = speech.choose_prompt(
            session.target, settings, self.frames, recording.language, recording.task, times=self.times
        )
        base = session.settings(decoding, method, settings.processors(times=self.times))
        self.rules = recording.rules
        hottest = dataclasses.replace(decoding.settings, temperature=max(self.rules.temperatures))
        self.guarantee = dataclasses.replace(decoding, settings=hottest).guarantee(method)
        self.settings = dataclasses.replace(base, eos=(settings.end,), logprobs=logprobs_form(self.rules))

    def task(self, drafter: Drafter, settings: Settings, call: WindowCall) -> measure.DecodeTask:
        """Return an attempt with its key and settings."""
        length = limit_length(self.session.target, call.prompt, self.decoding.max_new_tokens)
        at = dataclasses.replace(settings, temperature=call.temperature)
        keys = call.keys(threefry(self.decoding.seed))
        return measure.DecodeTask(self.session.target, drafter, [call.prompt], keys, at, length, call.inputs)

    def compile(self, drafter: Drafter, settings: Settings) -> float:
        """Compile the programs of a window, those of greedy and of sampled attempts; return the seconds.

        Earlier text makes prompts longer and leaves less room for new tokens, so its buffers can have another size.
        """
        first = window_at(self.frames, 0, self.session.target.model.config.source_frames)
        prompts = [self.prompt]
        if self.rules.condition_on_prev_tokens and self.times:  # a text without times has one window
            prompts.append([*self.prompt[:1] * (self.session.target.model.max_positions // 2), *self.prompt])
        calls = [
            WindowCall(0, 0, first, prompt, temperature)
            for prompt in prompts
            for temperature in self.rules.temperatures
        ]
        by_program = {(len(call.prompt), call.temperature > 0): call for call in calls}
        return sum(measure.warm_stream(self.task(drafter, settings, call)) for call in by_program.values())

    def read(self, drafter: Drafter, settings: Settings, out: Console) -> WindowRun:
        """Decode all windows, and print their segments."""
        runs: list[report_of.MeasuredRun] = []
        calls: list[WindowCall] = []

        def decode_window(call: WindowCall) -> WindowText:
            logprobs: list[float] = []

            def on_step(step: StreamStep) -> None:
                if step.info.logprobs is not None:
                    logprobs.extend(np.asarray(step.info.logprobs)[0, : len(step.tokens[0])].tolist())

            runs.append(measure.run_stream(self.task(drafter, settings, call), on_step))
            calls.append(call)
            return WindowText(runs[-1].tokens[0], logprobs)

        def show(segments: Sequence[SpeechSegment]) -> None:
            for segment in segments:
                times = f"[{clock_time(segment.start)} - {clock_time(segment.end)}] " if self.times else ""
                out.print(f"{times}{segment.text.strip()}", soft_wrap=True)

        transcript = speech.read_windows(
            self.session.target, self.session.tokenizer, self.tokens, self.frames, decode_window,
            prompt=self.prompt, rules=self.rules, language=self.language,
            num_frames=count_frames(self.recording.samples), on_segments=show,
        )  # fmt: skip
        return WindowRun(transcript, report_of.merge(runs), calls)

    def execute(self, log: Console, *, compare: bool, as_json: bool) -> None:
        """Transcribe, compare and report.

        Raises: typer.Exit(1) if texts differ that must be equal.
        """
        plain = self.session.drafter("autoregressive") if compare else None
        plain_settings = without_draft(self.settings)
        with stage(log, "compiling", f"compiled {self.method.name}{' and plain decoding' if compare else ''}"):
            compile_seconds = self.compile(self.drafter, self.settings)
            if plain is not None:
                self.compile(plain, plain_settings)
        out = Console(quiet=as_json)
        ours = self.read(self.drafter, self.settings, out)
        theirs = None if plain is None else self.read(plain, plain_settings, Console(quiet=True))
        is_comparable = report_of.is_comparable(
            self.guarantee, self.drafter.traits.draws,
            all(call.temperature == 0 for run in (ours, theirs) if run is not None for call in run.calls),
            self.settings.sampling == "coupled",
        )  # fmt: skip
        is_compared = theirs is not None and is_comparable
        identical = ours.run.tokens == theirs.run.tokens if theirs is not None and is_comparable else None
        difference = self._difference(ours, theirs) if theirs is not None and identical is False else None
        record = report_of.record(
            self.method.name, self.guarantee, ours.run,
            None if theirs is None else theirs.run, identical=identical, compile_seconds=compile_seconds,
            peak_memory_bytes=peak_memory_bytes(),
        )  # fmt: skip
        if as_json:
            print_json(self._document(record, ours.transcript, difference))
        else:
            print_table(self._table(record, ours.transcript), out)
            for line in _verdict(record, difference, self.session.baseline) if theirs is not None else ():
                out.print(line, soft_wrap=True)
        if is_compared and difference is not None and not difference["near_tie"]:
            raise typer.Exit(1)

    def _difference(self, ours: WindowRun, theirs: WindowRun) -> dict[str, Any] | None:
        """Return the first difference of the windows as JSON. Later windows may start at other times."""
        target = self.session.target
        for text, plain, call in zip(ours.run.tokens, theirs.run.tokens, theirs.calls, strict=False):
            settings = dataclasses.replace(self.settings, temperature=call.temperature)
            key = None if settings.is_greedy else call.keys(threefry(self.decoding.seed))[0]
            origin = near_ties.TextOrigin(
                self.drafter.pass_widths(1, target), 1, tuple(settings.processors), settings.to_sampling(),
                key, Spectrogram(jnp.asarray(call.inputs.frames)),
            )  # fmt: skip
            difference = near_ties.find_difference(target, call.prompt, text, plain, origin)
            if difference is not None:
                return near_ties.difference_record(difference, self.session.tokenizer, window=call.number)
        return None

    def _document(self, record: dict, transcript: Transcript, difference: dict[str, Any] | None) -> dict[str, Any]:
        """Return the JSON document."""
        segments = [
            {"start": segment.start, "end": segment.end, "text": segment.text, "token_ids": list(segment.tokens)}
            for segment in transcript.segments
        ]
        return {
            **record, **provenance(self.session), "settings": self.decoding.record(),
            "file": str(self.recording.path), "audio_seconds": self.recording.seconds,
            "log_mel_seconds": self.log_mel_seconds, "language": transcript.language,
            "timestamps": self.times, "windows": len(transcript.windows), "text": transcript.text,
            "window_temperatures": list(transcript.temperatures), "skipped_windows": list(transcript.skipped),
            "segments": segments, "differences": [] if difference is None else [difference],
        }  # fmt: skip

    def _table(self, record: dict, transcript: Transcript) -> dict[str, str]:
        """Return the totals as lines of a table."""
        audio, seconds = self.recording.seconds, record["seconds"]
        lines = {
            "method": f"{record['method']} (guarantee: {record['guarantee']})",
            "audio": f"{audio:.1f} s in {seconds:.2f} s, {audio / seconds:.1f} times as fast as speech",
            "tokens": f"{record['tokens']}, {record['tokens_per_second']:.1f} per second",
            "tokens per target pass": f"{record['block_efficiency']:.2f}",
            "windows": self._describe_windows(record["prompts"], transcript),
            "log-mel spectrogram": f"{self.log_mel_seconds:.2f} s",
            "compilation": f"{record['compile_seconds']:.1f} s",
            "peak memory": describe_memory(record["peak_memory_bytes"]),
        }
        if self.language is not None:
            lines["language"] = self.language
        if record["baseline_tokens_per_second"] is not None:
            lines["plain decoding"] = f"{record['baseline_tokens_per_second']:.1f} tokens/s"
            lines["speed ratio"] = f"{record['speedup']:.2f}"
        return lines

    def _describe_windows(self, num_attempts: int, transcript: Transcript) -> str:
        """Return the number of windows, and the attempts at them, in words."""
        count, skipped = len(transcript.windows), len(transcript.skipped)
        again = f", {num_attempts} attempts" if num_attempts > count else ""
        return f"{count}{again}" + (f", {skipped} without speech" if skipped else "")


def _verdict(record: dict, difference: dict[str, Any] | None, baseline: str) -> list[str]:
    """Return the result of the comparison in words."""
    if record["identical"] is None:
        return [describe_uncompared(record["guarantee"])]
    if record["identical"]:
        return [f"outputs: identical to {baseline}"]
    if difference is None:
        return [f"outputs differ from {baseline} in the number of windows"]
    d = difference
    return [
        f"outputs differ: window {d['window'] + 1}, first at new token {d['position']}: {d['text']!r} instead of "
        f"{d['plain_text']!r}; {near_ties.describe_gap(d)}"
    ]


def clock_time(seconds: float) -> str:
    """Return seconds as minutes and seconds, such as 01:02.50."""
    hundredths = round(seconds * 100)
    return f"{hundredths // 6000:02d}:{hundredths // 100 % 60:02d}.{hundredths % 100:02d}"
