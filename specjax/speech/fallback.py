"""Rules for windows that were decoded badly, and for the text of earlier windows, as in transformers.

A window is decoded again at the next temperature if its text repeats itself or is unlikely. A window that is unlikely
and silent is skipped. The prompt of a window can contain the text of the windows before it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.speech.transcript import SpeechSegment

LOW_TEMPERATURE = 0.5
"""After a text of this temperature, or of a higher one, the prompt of the next window has no earlier text."""
THRESHOLDS = "compression_ratio_threshold", "logprob_threshold", "no_speech_threshold"

Decision = Literal["accept", "retry", "skip"]
"""What happens to a decoded window: it is used, decoded at the next temperature, or left out as silence."""


class WindowRules(NamedTuple):
    """Rules of windows. The names are those of `generate` in transformers. A threshold of None has no effect."""

    temperatures: tuple[float, ...] = (0.0,)  # those of the attempts, in order
    compression_ratio_threshold: float | None = None  # a text that zlib shortens by a larger factor repeats itself
    logprob_threshold: float | None = None  # a text whose mean log-probability is lower is unlikely
    no_speech_threshold: float | None = None  # an unlikely text is left out if silence has a larger probability
    condition_on_prev_tokens: bool = False  # the prompt contains the text of earlier windows

    def updated(self, temperature: float | Sequence[float], **values: Any) -> WindowRules:
        """Return rules with these temperatures, and with the values that are not None.

        Raises: UsageError for values that are no numbers, and for rules that lack what they read.
        """
        stated = {name: value for name, value in values.items() if value is not None}
        temperatures = tuple(temperature) if isinstance(temperature, Sequence) else (temperature,)
        rules = self._replace(temperatures=temperatures, **stated)
        for name in THRESHOLDS:
            value = getattr(rules, name)
            if value is not None and not (_is_number(value) and math.isfinite(value)):
                raise UsageError(f"{name} must be a number, not {quote(value)}")
        if not temperatures or not all(_is_number(value) and 0 <= value < math.inf for value in temperatures):
            raise UsageError(f"temperature must be numbers from 0, not {quote(temperature)}; 0 is greedy")
        if rules.no_speech_threshold is not None and rules.logprob_threshold is None:
            raise UsageError("no_speech_threshold reads only unlikely texts; give logprob_threshold too, such as -1.0")
        tests = rules.compression_ratio_threshold, rules.logprob_threshold
        if len(temperatures) > 1 and tests == (None, None):
            raise UsageError(
                "several temperatures need a test of the text; give compression_ratio_threshold or logprob_threshold"
            )
        return rules


PLAIN_RULES = WindowRules()
"""Rules that decode each window once, without earlier text."""


class WindowText(NamedTuple):
    """The new tokens of a window, with the end of the text if it was reached."""

    tokens: Sequence[int]
    logprobs: Sequence[float] | None = None  # of the tokens after the processors, at temperature 1


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def compression_ratio(tokens: Sequence[int], vocab_size: int) -> float:
    """Return the factor by which zlib shortens the ids of tokens. Repeated text has a large one."""
    size = int(math.log2(vocab_size) / 8) + 1
    packed = b"".join(int(token).to_bytes(size, "little") for token in tokens)
    return len(packed) / len(zlib.compress(packed))


def judge_window(
    rules: WindowRules, text: WindowText, vocab_size: int, silence: Callable[[], float]
) -> Decision:  # fmt: skip
    """Decide about a decoded window.

    Args:
      silence: returns the probability that the window has no speech. It is called for unlikely texts only.
    """
    limit, is_unlikely = rules.compression_ratio_threshold, False
    repeats = limit is not None and compression_ratio(text.tokens, vocab_size) > limit
    if rules.logprob_threshold is not None:
        assert text.logprobs is not None
        is_unlikely = float(np.mean(np.asarray(text.logprobs, np.float32))) < rules.logprob_threshold
    if is_unlikely and rules.no_speech_threshold is not None and silence() > rules.no_speech_threshold:
        return "skip"
    return "retry" if repeats or is_unlikely else "accept"


def earlier_text(
    segments: Sequence[SpeechSegment], previous: int | None, first_time: int, max_positions: int
) -> list[int]:
    """Return the tokens before the prompt of a window: its token, and the end of the text so far.

    They fill at most half of the positions. Of two times that end a segment, the second one is left out.

    Args:
      previous: the token before earlier text. first_time: the token of time 0.

    Raises: UsageError if the files state no such token.
    """
    if previous is None:
        raise UsageError(
            "condition_on_prev_tokens needs the token <|startofprev|>, which the files of the model do not state; "
            "add prev_sot_token_id to generation_config.json"
        )
    ends_twice = lambda tokens: len(tokens) > 2 and tokens[-2] >= first_time
    tokens = [
        token
        for segment in segments
        for token in (segment.tokens[:-1] if ends_twice(segment.tokens) else segment.tokens)
    ]
    room = max(max_positions // 2 - 1, 0)
    return [previous, *tokens[max(len(tokens) - room, 0) :]]
