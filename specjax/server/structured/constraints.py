"""Constraints of requests: JSON schemas, regular expressions and calls of tools."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple


class Constraint(NamedTuple):
    """The form of a text. Equal constraints share an automaton."""

    kind: str  # "json", "regex" or "tools"
    text: str  # the schema as JSON, the expression, or the functions (`tools.required_call`)

    @classmethod
    def of_schema(cls, schema: Any) -> Constraint:
        """Return the constraint of a JSON schema, whose properties keep their order."""
        return cls("json", schema if isinstance(schema, str) else json.dumps(schema))

    @classmethod
    def of_choice(cls, texts: Sequence[str]) -> Constraint:
        """Return the constraint of some texts."""
        return cls("regex", "|".join(map(escape, texts)))


def escape(text: str) -> str:
    """Return an expression that matches only this text."""
    return re.sub(r"[][\\.*+?^$|(){}#&~-]", lambda match: "\\" + match[0], text)
