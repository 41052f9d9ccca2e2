"""Texts that several models or samples write together: `TextState` is the text, `methods` contains the methods."""

from specjax.collaborate import methods
from specjax.collaborate.multi_writer import (
    Scores,
    TextState,
    Written,
    append,
    begin,
    extend,
    fork,
    look,
    read,
    rewind,
    score,
    select,
)
from specjax.collaborate.prepare import TextJob, prepare_texts
from specjax.collaborate.results import TextResult
from specjax.collaborate.segments import Segmenter, after_any, after_strings, after_tokens

__all__ = [
    "Scores",
    "Segmenter",
    "TextJob",
    "TextResult",
    "TextState",
    "Written",
    "after_any",
    "after_strings",
    "after_tokens",
    "append",
    "begin",
    "extend",
    "fork",
    "look",
    "methods",
    "prepare_texts",
    "read",
    "rewind",
    "score",
    "select",
]
