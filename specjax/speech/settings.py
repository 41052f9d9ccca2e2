"""Tokens of a speech model: its prompt, the suppressed tokens and the times, from the files of its folder."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specjax.errors import UsageError, optional_import
from specjax.files.untrusted import quote, read_json_object
from specjax.models.loading import Tokenizer, resolve
from specjax.models.loading.families.config_fields import POSITIONS, ConfigFields
from specjax.models.loading.formats import ctranslate2
from specjax.models.seq2seq.config import WhisperConfig
from specjax.processors import ban, min_length, timestamps
from specjax.speech.fallback import PLAIN_RULES, THRESHOLDS, WindowRules
from specjax.types import Processor, Target

TASKS = "transcribe", "translate"
CODE = re.compile(r"<\|([a-z]{2,3})\|>")
FIRST_MULTILINGUAL = 51_865
"""Models with at least this many tokens know several languages, where no file states it."""
MAX_INITIAL = 50
"""Steps of 20 milliseconds: the first time is at most one second."""


class SpeechSettings(NamedTuple):
    """Token ids of a speech model."""

    start: int  # the text begins with it
    no_times: int  # turns times off; the tokens after it are times
    end: int
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()  # not the first token after the prompt
    max_initial: int | None = None  # steps of the first time; None: any
    languages: Mapping[str, int] = {}  # by code; empty for a model of English only
    tasks: Mapping[str, int] = {}
    forced: tuple[int | None, ...] = ()  # tokens after the start, if neither language nor task is given; None: detected
    default_language: str | None = None  # of the files, if no language is given
    default_task: str | None = None
    previous: int | None = None  # the text of earlier windows follows it; None: not stated
    rules: WindowRules = PLAIN_RULES  # those of the files

    @property
    def first_time(self) -> int:
        """Return the token of time 0."""
        return self.no_times + 1

    @property
    def no_speech(self) -> int:
        """Return the token whose probability after the start is that of silence."""
        return self.no_times - 1

    def processors(self, *, times: bool) -> tuple[Processor, ...]:
        """Return the processors of a transcript, in the order of transformers."""
        rules = (timestamps(self.no_times, self.end, max_initial=self.max_initial),) if times else ()
        return min_length(1, self.suppressed_first), ban(self.suppressed), *rules

    def language_of(self, name: str) -> int:
        """Return the token of a language code or English name. Raises: UsageError for a language that is not known."""
        code = language_code(name)
        if code not in self.languages:
            names = ", ".join(sorted(self.languages)) or "English only"
            raise UsageError(f"the speech model does not know the language {quote(name)}; it knows {names}")
        return self.languages[code]

    def prompt(self, language: int | None, task: str | None, *, times: bool) -> list[int]:
        """Return the tokens before the transcript. `language` is a token, or None for a model of English only.

        Raises: UsageError for a task that the model does not have.
        """
        tokens = [self.start]
        if language is not None:
            tokens += [language, self._task(task)]
        elif task not in (None, "transcribe"):
            raise UsageError(f"the speech model writes English only, so it has no task {quote(task)}; leave it out")
        return tokens if times else [*tokens, self.no_times]

    def _task(self, task: str | None) -> int:
        if task is None:
            stated = [token for token in self.forced if token in self.tasks.values()]
            if stated and stated[0] is not None:
                return stated[0]
        name = task or "transcribe"
        if name not in self.tasks:
            raise UsageError(f"the speech model has no task {quote(name)}, only {', '.join(self.tasks) or 'none'}")
        return self.tasks[name]


def language_code(name: str) -> str:
    """Return the code of a language that is given by its code, its token or its English name, such as "de".

    Raises: UsageError if the name is no text.
    """
    if not isinstance(name, str):
        raise UsageError(f'the language must be a code such as "de", not {quote(name)}')
    text = name.lower().removeprefix("<|").removesuffix("|>")
    if len(text) == 2:  # no name is so short
        return text
    with optional_import("speech", "names of languages need"):
        from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE
    return TO_LANGUAGE_CODE.get(text, text)


def is_speech_model(target: Target) -> bool:
    """Return True if the target reads spectrograms of speech."""
    return isinstance(target.model.config, WhisperConfig)


def read_settings(source: str | Path, target: Target, tokenizer: Tokenizer) -> SpeechSettings:
    """Read generation_config.json, config.json and the vocabulary of a speech model.

    Args:
      source: the hub id or folder that was loaded.

    Raises: UsageError for a model that does not read speech, and for files without its tokens.
    """
    if not is_speech_model(target):
        raise UsageError(f"{target.model.name} does not read speech; give a Whisper model")
    folder = resolve(source)
    read = lambda name: ConfigFields(read_json_object(folder / name) or {}, str(folder / name))
    config, generation = read("config.json"), read("generation_config.json")
    stated = generation if generation.values else config
    ids = {piece: token for token, piece in reversed(list(enumerate(tokenizer.vocab)))}
    suppressed = _ids(stated, "suppress_tokens", "suppress_ids")
    previous = suppressed[-2] if len(suppressed) > 1 else None  # as in transformers, where no file states it

    def token(piece: str, *names: str) -> int:
        for fields in (generation, config):
            for name in names:
                if fields.has(name) and type(fields.value(name)) is int:
                    return fields.size(name, minimum=0)
        if piece not in ids:
            raise UsageError(f"{folder} states no {' or '.join(names)}, and its vocabulary lacks {piece}; download it")
        return ids[piece]

    size = target.model.vocab_size
    settings = SpeechSettings(
        start=target.model.config.first_token,
        no_times=token("<|notimestamps|>", "no_timestamps_token_id"),
        end=token("<|endoftext|>", "eos_token_id"),
        suppressed=suppressed,
        suppressed_first=_ids(stated, "begin_suppress_tokens", "suppress_ids_begin"),
        max_initial=generation.size("max_initial_timestamp_index", _default_max_initial(config), minimum=0),
        previous=generation.size("prev_sot_token_id", ids.get("<|startofprev|>", previous), minimum=0),
        rules=_rules(generation),
    )
    if _is_multilingual(generation, size):
        languages = {code: value for piece, value in ids.items() for code in CODE.findall(piece)}
        tasks = {name: ids[f"<|{name}|>"] for name in TASKS if f"<|{name}|>" in ids}
        settings = settings._replace(
            languages=_names(generation, "lang_to_id", CODE) or languages,
            tasks=_names(generation, "task_to_id") or tasks,
            default_language=_default_language(generation), default_task=generation.text("task", None),
        )  # fmt: skip
        if settings.default_language is None and settings.default_task is None:  # otherwise the old field is void
            forced = _forced(generation if generation.has("forced_decoder_ids") else config)
            settings = settings._replace(forced=forced)
    previous = -1 if settings.previous is None else settings.previous
    highest = max(settings.no_times + 1, settings.end, settings.start, previous, *settings.languages.values())
    if highest >= size:
        raise UsageError(f"{folder} states the token {highest}, and its model has {size} tokens; download it again")
    return settings


def _ids(fields: ConfigFields, *names: str) -> tuple[int, ...]:
    """Return the token ids of the first of the fields that is present. -1 was an old name of a default list."""
    for name in names:
        if fields.has(name):
            values = fields.array(name, int)
            if not all(-1 <= value <= POSITIONS for value in values):
                raise UsageError(f"{fields.where} has {name} {quote(values)}, which must be token ids")
            return tuple(value for value in values if value >= 0)
    return ()


def _rules(fields: ConfigFields) -> WindowRules:
    """Return the rules of windows that the files state."""
    stated: dict[str, Any] = {name: fields.number(name, None, minimum=-1e30) for name in THRESHOLDS}
    return PLAIN_RULES._replace(**stated, condition_on_prev_tokens=fields.flag("condition_on_prev_tokens"))


def _default_max_initial(config: ConfigFields) -> int | None:
    """Return the limit of the first time where no generation_config.json states it.

    A folder of CTranslate2 has no such file. Its library has the limit of all published models.
    """
    return MAX_INITIAL if any(config.has(name) for name in ctranslate2.UNREAD) else None


def _default_language(fields: ConfigFields) -> str | None:
    """Return the language of the files, which state one text or a list of one. None: it is detected."""
    stated = fields.value("language")
    stated = stated[0] if isinstance(stated, list) and len(stated) == 1 else stated
    if stated is not None and not isinstance(stated, str):
        raise UsageError(f"{fields.where} has language {quote(stated)}, which must be one language such as de")
    return stated


def _is_multilingual(fields: ConfigFields, vocab_size: int) -> bool:
    if fields.has("is_multilingual"):
        return fields.flag("is_multilingual")
    return fields.has("lang_to_id") or vocab_size >= FIRST_MULTILINGUAL


def _names(fields: ConfigFields, name: str, form: re.Pattern[str] | None = None) -> dict[str, int]:
    """Return the ids of a nested object by name, or by the code in the name."""
    nested: Any = fields.value(name) or {}
    is_valid = isinstance(nested, dict) and all(type(value) is int and value >= 0 for value in nested.values())
    if not is_valid:
        raise UsageError(f"{fields.where} has {name} {quote(nested)}, which must be token ids by name")
    codes = {key: form.findall(key) if form else [key] for key in nested}
    return {matches[0]: nested[key] for key, matches in codes.items() if matches}


def _forced(fields: ConfigFields) -> tuple[int | None, ...]:
    """Return the tokens of `forced_decoder_ids`, pairs of an index from 1 and a token."""
    pairs: Sequence[Any] = fields.array("forced_decoder_ids", list)
    is_token = lambda value: value is None or (type(value) is int and value >= 0)
    if [pair[:1] for pair in pairs] != [[i] for i in range(1, len(pairs) + 1)] or not all(
        len(pair) == 2 and is_token(pair[1]) for pair in pairs
    ):
        raise UsageError(f"{fields.where} has forced_decoder_ids {quote(pairs)}, which must be [[1, id], [2, id], ...]")
    return tuple(pair[1] for pair in pairs)
