"""What changes the target's logits by the text before them: `decode(..., processors=(repetition(1.1), ban([5])))`.

In the order given, and before temperature, top-k, top-p and min-p. A processor sees, at each node of a tree, the text
that plain decoding would have there, so every method, tree and rule keeps its promise, for the distribution that plain
decoding with the same processors has. Drafts are not processed: what a processor forbids is drafted for nothing.
"""

from specjax.processors.automaton import Automaton, json_schema, regex
from specjax.processors.bias import ban, bias
from specjax.processors.constraint import constraint, following
from specjax.processors.frequency import frequency
from specjax.processors.presence import presence
from specjax.processors.repetition import repetition

__all__ = [
    "Automaton",
    "ban",
    "bias",
    "constraint",
    "following",
    "frequency",
    "json_schema",
    "presence",
    "regex",
    "repetition",
]
