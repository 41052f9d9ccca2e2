"""Logits processors of the target: `decode(..., processors=(repetition(1.1), ban([5])))`.

Processors run in the given order, before temperature, top-k, top-p and min-p. At each tree node, a processor receives
the text that plain decoding would have there. So every method, tree and rule keeps its guarantee, relative to plain
decoding with the same processors. Drafts are not processed: a forbidden token may be drafted and is then rejected.
"""

from specjax.processors.automaton import Automaton, json_schema, regex
from specjax.processors.bad_words import bad_words
from specjax.processors.bias import ban, bias
from specjax.processors.constraint import constraint, following
from specjax.processors.min_length import min_length
from specjax.processors.penalties.frequency import frequency
from specjax.processors.penalties.presence import presence
from specjax.processors.penalties.repetition import repetition
from specjax.processors.places.by_place import by_place, forced_tokens
from specjax.processors.places.forced import forced
from specjax.processors.places.image_phases import image_phases
from specjax.processors.places.lumina import LuminaLayout, LuminaTokens, lumina_layout
from specjax.processors.timestamps import timestamps

__all__ = [
    "Automaton",
    "LuminaLayout",
    "LuminaTokens",
    "bad_words",
    "ban",
    "bias",
    "by_place",
    "constraint",
    "following",
    "forced",
    "forced_tokens",
    "frequency",
    "image_phases",
    "json_schema",
    "lumina_layout",
    "min_length",
    "presence",
    "regex",
    "repetition",
    "timestamps",
]
