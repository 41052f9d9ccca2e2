"""Transcripts: segments with times, and the rules that cut the tokens of a window into segments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from specjax.speech.audio import FRAMES_PER_SECOND

FRAMES_PER_STEP = 2
"""Frames of a spectrogram per step of a time."""


class SpeechSegment(NamedTuple):
    """A part of a transcript."""

    start: float  # seconds
    end: float
    tokens: tuple[int, ...]  # with their times
    text: str = ""


class Transcript(NamedTuple):
    """The text of a recording."""

    text: str
    segments: tuple[SpeechSegment, ...]
    windows: tuple[tuple[int, ...], ...]  # the new tokens of each window, without the end
    language: str | None = None  # None: the model writes English only
    temperatures: tuple[float, ...] = ()  # that of each window
    skipped: tuple[int, ...] = ()  # numbers of windows without speech


class Cut(NamedTuple):
    """The segments of a window, and the frames until the next window."""

    segments: list[SpeechSegment]
    advance: int


def cut_window(
    tokens: Sequence[int], first_time: int, begin: int, num_frames: int, num_audible: int | None = None
) -> Cut:
    """Cut the tokens of a window at pairs of times, by the rules of transformers.

    A pair ends one segment and starts the next. The text after the last pair is unfinished, and the next window starts
    at that time. If the window ends with a single time after text, nothing was spoken after it.

    Args:
      first_time: the token of time 0. begin, num_frames: the frames of the audio in this window.
      num_audible: frames of the recording among them, where text without times ends; None: all.
    """
    is_time = [token >= first_time for token in tokens]
    pairs = [i + 1 for i in range(len(tokens) - 1) if is_time[i] and is_time[i + 1]]
    is_finished = is_time[-2:] == [False, True]
    steps_to_seconds = lambda steps: (begin + steps * FRAMES_PER_STEP) / FRAMES_PER_SECOND
    at = lambda token: steps_to_seconds(token - first_time)
    if not pairs:
        times = [token for token in tokens if token >= first_time]
        end = (num_frames if num_audible is None else num_audible) // FRAMES_PER_STEP
        if times and times[-1] != first_time:
            end = times[-1] - first_time
        return Cut([SpeechSegment(begin / FRAMES_PER_SECOND, steps_to_seconds(end), tuple(tokens))], num_frames)
    ends = [*pairs, len(tokens)] if is_finished else [*pairs[:-1], pairs[-1] + 1]
    segments, start = [], 0
    for number, end in enumerate(ends):
        part = tuple(tokens[start:end])
        has_next_start = number == len(ends) - 1 and not is_finished
        segments.append(SpeechSegment(at(part[0]), at(part[-2 if has_next_start else -1]), part))
        start = end
    last = (tokens[ends[-1] - 2] - first_time) * FRAMES_PER_STEP
    return Cut(segments, num_frames if is_finished else max(last, 1))
