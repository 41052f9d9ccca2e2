"""Transcription of audio by windows: each starts where the last finished segment of the one before ended."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.api import decode
from specjax.engine.packing import check_new_tokens
from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models import spectrograms
from specjax.models.loading import Tokenizer
from specjax.models.seq2seq.memory import Spectrogram
from specjax.numerics.sampling import fold_in, threefry
from specjax.speech.audio import count_frames, log_mel
from specjax.speech.settings import SpeechSettings, language_code
from specjax.speech.transcript import SpeechSegment, Transcript, cut_window
from specjax.types import Array, Model, PyTree, Target

DecodeWindow = Callable[[int, Spectrogram], Sequence[int]]
"""`decode_window(number, inputs)` returns the new tokens of a window, which may end with the end of the text."""


def transcribe(
    target: Target,
    tokenizer: Tokenizer,
    audio: np.ndarray,
    settings: SpeechSettings,
    drafter: Any = None,
    *,
    language: str | None = None,
    task: str | None = None,
    times: bool = False,
    max_new_tokens: int | None = None,
    key: Array | int = 0,
    **options: Any,
) -> Transcript:
    """Return the text of samples at 16 kHz.

    Guarantee: that of `decode`. Greedy text equals the text of plain decoding, in every window.

    Args:
      drafter: as in `decode`. options: further options of `decode`, such as temperature.
      language: a code such as "de", or a name such as "german"; None: that of the model's files, or else the
        detected one of those that the model knows. task: "transcribe", or "translate" to English; None: that of the
        model's files, or else "transcribe".
      times: segments with times. Audio that is longer than a window always has them.
      max_new_tokens: per window; None: as many as the model allows.

    Raises: UsageError for a language or task that the model does not know.
    """
    frames = log_mel(target.model.config, audio)
    times = times or frames.shape[1] > target.model.config.source_frames
    name, prompt = choose_prompt(target, settings, frames, language, task, times=times)
    length = limit_length(target, prompt, max_new_tokens)
    keys = threefry(key)
    processors = (*settings.processors(times=times), *options.pop("processors", ()))

    def decode_window(number: int, inputs: Spectrogram) -> Sequence[int]:
        result = decode(
            target, drafter, [prompt], key=fold_in(keys, jnp.array([number])), inputs=inputs, eos=settings.end,
            max_new_tokens=length, processors=processors, **options,
        )  # fmt: skip
        return result.to_lists()[0]

    return read_windows(
        target, tokenizer, settings, frames, decode_window, language=name, num_frames=count_frames(audio)
    )


def read_windows(
    target: Target,
    tokenizer: Tokenizer,
    settings: SpeechSettings,
    frames: np.ndarray,
    decode_window: DecodeWindow,
    *,
    language: str | None = None,
    num_frames: int | None = None,
    on_segments: Callable[[Sequence[SpeechSegment]], None] = lambda segments: None,
) -> Transcript:
    """Return the transcript of a spectrogram float32[bins, frames].

    Args:
      num_frames: frames of the recording; the others are silence that fills its only window. None: all.
      on_segments: called with the segments of each window.
    """
    size, total, begin = target.model.config.source_frames, frames.shape[1], 0
    segments: list[SpeechSegment] = []
    windows: list[tuple[int, ...]] = []
    text_of = lambda tokens: tokenizer.decode([token for token in tokens if token < settings.end])
    while begin < total:
        count = min(size, total - begin)
        tokens = list(decode_window(len(windows), window_at(frames, begin, size)))
        tokens = tokens[:-1] if tokens[-1:] == [settings.end] else tokens
        windows.append(tuple(tokens))
        audible = None if num_frames is None else min(max(num_frames - begin, 0), count)
        cut = cut_window(tokens, settings.first_time, begin, count, audible)
        new = [segment._replace(text=text_of(segment.tokens)) for segment in cut.segments]
        on_segments(new)
        segments += new
        begin += cut.advance
    text = text_of([token for segment in segments for token in segment.tokens])
    return Transcript(text, tuple(segments), tuple(windows), language)


def limit_length(target: Target, prompt: Sequence[int], max_new_tokens: int | None) -> int:
    """Return the number of new tokens of a window: the given one, but at most as many as the model allows.

    Raises: UsageError if there is no room for a token.
    """
    limit = target.model.max_positions
    if len(prompt) >= limit:
        raise UsageError(
            f"the model reads at most {limit} tokens, and the text begins with {len(prompt)}; raise max_positions"
        )
    room = limit - len(prompt)
    return room if max_new_tokens is None else min(check_new_tokens(max_new_tokens), room)


def window_at(frames: np.ndarray, begin: int, size: int) -> Spectrogram:
    """Return `size` frames from `begin`, with zeros after the end."""
    part = frames[:, begin : begin + size]
    return spectrograms([np.pad(part, ((0, 0), (0, size - part.shape[1])))])


def choose_prompt(
    target: Target, settings: SpeechSettings, frames: np.ndarray, language: str | None, task: str | None, *,
    times: bool,
) -> tuple[str | None, list[int]]:  # fmt: skip
    """Return the code of the language, and the tokens before the transcript.

    Raises: UsageError for a language or task that the model does not know.
    """
    if not settings.languages:
        if language is not None and language_code(language) != "en":
            raise UsageError(f"the speech model writes English only, not {quote(language)}; leave the language out")
        return None, settings.prompt(None, task, times=times)
    language = settings.default_language if language is None else language
    task = settings.default_task if task is None else task
    if language is not None:
        token = settings.language_of(language)
    else:
        stated = settings.forced[0] if settings.forced and task is None else None
        inputs = window_at(frames, 0, target.model.config.source_frames)
        token = detect_language(target, settings, inputs) if stated is None else stated
    code = next((code for code, value in settings.languages.items() if value == token), None)
    return code, settings.prompt(token, task, times=times)


def detect_language(target: Target, settings: SpeechSettings, inputs: Spectrogram) -> int:
    """Return the token of the likeliest language of a window."""
    logits = np.asarray(_first_logits(target.model, target.params, inputs, jnp.array([[settings.start]])))
    tokens = np.array(list(settings.languages.values()))
    return int(tokens[np.argmax(logits[tokens])])


@functools.partial(jax.jit, static_argnums=0)
def _first_logits(model: Model, params: PyTree, inputs: Spectrogram, token: Array) -> Array:
    """Return the logits float32[V] after the first token."""
    cache = model.init_cache(params, inputs, 1, 1)
    return model.forward(params, token, cache, positions=token * 0, mask=jnp.ones((1, 1, 1), bool))[0].logits[0, 0]
