"""Transcription of audio by windows: each starts where the last finished segment of the one before ended."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

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
from specjax.speech.fallback import (
    LOW_TEMPERATURE,
    PLAIN_RULES,
    Decision,
    WindowRules,
    WindowText,
    earlier_text,
    judge_window,
)
from specjax.speech.settings import SpeechSettings, language_code
from specjax.speech.transcript import SpeechSegment, Transcript, cut_window
from specjax.types import Array, Model, PyTree, Target


class WindowCall(NamedTuple):
    """An attempt to decode a window."""

    number: int  # of the window
    attempt: int  # from 0
    inputs: Spectrogram
    prompt: list[int]
    temperature: float

    def keys(self, key: Array) -> Array:
        """Return the keys [1] of this attempt."""
        keys = fold_in(key, jnp.array([self.number]))
        return fold_in(keys[0], jnp.array([self.attempt])) if self.attempt else keys


DecodeWindow = Callable[[WindowCall], WindowText]


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
    temperature: float | Sequence[float] = 0.0,
    compression_ratio_threshold: float | None = None,
    logprob_threshold: float | None = None,
    no_speech_threshold: float | None = None,
    condition_on_prev_tokens: bool | None = None,
    **options: Any,
) -> Transcript:
    """Return the text of samples at 16 kHz.

    Guarantee: that of `decode` at each temperature. Greedy text equals the text of plain decoding, in every window.

    Args:
      drafter: as in `decode`. options: further options of `decode`, such as top_p.
      language: a code such as "de", or a name such as "german"; None: that of the model's files, or else the
        detected one of those that the model knows. task: "transcribe", or "translate" to English; None: that of the
        model's files, or else "transcribe".
      times: segments with times. Audio that is longer than a window always has them.
      max_new_tokens: per window; None: as many as the model allows.
      temperature: one, or several that are tried in order while a text fails a test.
      compression_ratio_threshold: a text that zlib shortens by a larger factor fails, such as 1.35.
      logprob_threshold: a text whose mean log-probability is lower fails, such as -1.0.
      no_speech_threshold: a window whose text fails that test is left out if silence is likelier than this, such as
        0.6. The thresholds of None, and condition_on_prev_tokens, are those of the model's files, or else off.
      condition_on_prev_tokens: the prompt of a window contains the end of the text before it.

    Raises: UsageError for a language or task that the model does not know.
    """
    frames = log_mel(target.model.config, audio)
    times = times or frames.shape[1] > target.model.config.source_frames
    name, prompt = choose_prompt(target, settings, frames, language, task, times=times)
    rules = settings.rules.updated(
        temperature, compression_ratio_threshold=compression_ratio_threshold, logprob_threshold=logprob_threshold,
        no_speech_threshold=no_speech_threshold, condition_on_prev_tokens=condition_on_prev_tokens,
    )  # fmt: skip
    keys = threefry(key)
    processors = (*settings.processors(times=times), *options.pop("processors", ()))

    def decode_window(call: WindowCall) -> WindowText:
        result = decode(
            target, drafter, [call.prompt], key=call.keys(keys), inputs=call.inputs, eos=settings.end,
            max_new_tokens=limit_length(target, call.prompt, max_new_tokens), processors=processors,
            temperature=call.temperature, logprobs=logprobs_form(rules), **options,
        )  # fmt: skip
        tokens = result.to_lists()[0]
        logprobs = None if result.logprobs is None else np.asarray(result.logprobs)[0, : len(tokens)].tolist()
        return WindowText(tokens, logprobs)

    return read_windows(
        target, tokenizer, settings, frames, decode_window, prompt=prompt, rules=rules, language=name,
        num_frames=count_frames(audio),
    )  # fmt: skip


def logprobs_form(rules: WindowRules) -> Literal[False, "untempered"]:
    """Return the option `logprobs` of `decode` that the rules need."""
    return False if rules.logprob_threshold is None else "untempered"


def read_windows(
    target: Target,
    tokenizer: Tokenizer,
    settings: SpeechSettings,
    frames: np.ndarray,
    decode_window: DecodeWindow,
    *,
    prompt: Sequence[int],
    rules: WindowRules = PLAIN_RULES,
    language: str | None = None,
    num_frames: int | None = None,
    on_segments: Callable[[Sequence[SpeechSegment]], None] = lambda segments: None,
) -> Transcript:
    """Return the transcript of a spectrogram float32[bins, frames].

    Args:
      prompt: the tokens before the transcript. rules: those of attempts and of earlier text.
      num_frames: frames of the recording; the others are silence that fills its only window. None: all.
      on_segments: called with the segments of each window.
    """
    size, total, begin = target.model.config.source_frames, frames.shape[1], 0
    segments: list[SpeechSegment] = []
    windows: list[tuple[int, ...]] = []
    temperatures: list[float] = []
    skipped: list[int] = []
    text_of = lambda tokens: tokenizer.decode([token for token in tokens if token < settings.end])
    while begin < total:
        count = min(size, total - begin)
        is_condition = rules.condition_on_prev_tokens and all(value < LOW_TEMPERATURE for value in temperatures[-1:])
        earlier: list[int] = []
        if is_condition and segments:
            earlier = earlier_text(segments, settings.previous, settings.first_time, target.model.max_positions)
        call = WindowCall(len(windows), 0, window_at(frames, begin, size), [*earlier, *prompt], 0.0)
        answer, temperature, decision = _attempt(target, settings, call, rules, decode_window, len(earlier))
        temperatures.append(temperature)
        tokens = list(answer.tokens)
        tokens = tokens[:-1] if tokens[-1:] == [settings.end] else tokens
        windows.append(tuple(tokens))
        if decision == "skip":
            skipped.append(call.number)
            begin += count
            continue
        audible = None if num_frames is None else min(max(num_frames - begin, 0), count)
        cut = cut_window(tokens, settings.first_time, begin, count, audible)
        new = [segment._replace(text=text_of(segment.tokens)) for segment in cut.segments]
        on_segments(new)
        segments += new
        begin += cut.advance
    text = text_of([token for segment in segments for token in segment.tokens])
    return Transcript(text, tuple(segments), tuple(windows), language, tuple(temperatures), tuple(skipped))


def _attempt(
    target: Target, settings: SpeechSettings, call: WindowCall, rules: WindowRules, decode_window: DecodeWindow,
    num_before: int,
) -> tuple[WindowText, float, Decision]:  # fmt: skip
    """Decode a window until its text passes the tests; return the last text, its temperature and the decision.

    Args:
      num_before: number of tokens of earlier text in the prompt.
    """
    silence = functools.cache(lambda: silence_probability(target, settings, call.inputs, call.prompt[: num_before + 1]))
    for attempt, temperature in enumerate(rules.temperatures):
        text = decode_window(call._replace(attempt=attempt, temperature=temperature))
        decision = judge_window(rules, text, target.model.vocab_size, silence)
        if decision != "retry":
            break
    return text, temperature, decision


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
    logits = np.asarray(_last_logits(target.model, target.params, inputs, jnp.array([[settings.start]]), 0))
    tokens = np.array(list(settings.languages.values()))
    return int(tokens[np.argmax(logits[tokens])])


def silence_probability(
    target: Target, settings: SpeechSettings, inputs: Spectrogram, tokens: Sequence[int]
) -> float:  # fmt: skip
    """Return the probability that a window has no speech, by the logits after the token that starts its text.

    Args:
      tokens: the text of earlier windows, and the start.
    """
    padded = np.zeros((1, max(target.model.max_positions // 2, 1) + 1), np.int32)  # one size, and so one program
    padded[0, : len(tokens)] = tokens
    logits = _last_logits(target.model, target.params, inputs, jnp.asarray(padded), len(tokens) - 1)
    return float(jax.nn.softmax(logits)[settings.no_speech])


@functools.partial(jax.jit, static_argnums=0)
def _last_logits(model: Model, params: PyTree, inputs: Spectrogram, tokens: Array, last: Array) -> Array:
    """Return the logits float32[V] after token `last` int32[] of tokens int32[1, T]."""
    length = tokens.shape[1]
    place = jnp.arange(length, dtype=jnp.int32)[None]
    cache = model.init_cache(params, inputs, 1, length)
    output, _ = model.forward(params, tokens, cache, positions=place, mask=(place[:, None] <= place[..., None]))
    assert model.unembed is not None
    hidden = jax.lax.dynamic_slice_in_dim(output.hidden, last, 1, 1)
    return model.unembed(params, hidden)[0, 0].astype(jnp.float32)
