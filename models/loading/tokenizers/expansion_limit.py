"""The largest factor by which a tokenizer.json can expand a text. A few chained replacements can produce gigabytes."""

from __future__ import annotations

import base64
import json
import math
from typing import Any

MAX_EXPANSION = 1 << 14
"""Largest accepted factor. Replacements of one character count twice, because they may match an empty text. The tables
of T5, XLM and Gemma have factors below 100.
"""


def expansion_factor(backend: Any) -> int:
    """Return the largest factor by which a tokenizer of the library `tokenizers` expands its input or output."""
    parts = (backend.normalizer, backend.post_processor, backend.decoder)
    return max((_part_expansion(json.loads(part.__getstate__())) for part in parts if part is not None), default=1)


def _part_expansion(part: dict[str, Any]) -> int:
    match part:
        case {"type": "Sequence"}:  # of normalizers, processors or decoders
            return math.prod(
                _part_expansion(child) for group in part.values() if isinstance(group, list) for child in group
            )
        case {"type": "Replace", "content": content, "pattern": {"String": pattern}}:
            return -(-len(content) // len(pattern)) if pattern and content else 1 + len(content)
        case {"type": "Replace", "content": content}:  # a regular expression, which may match an empty text
            return 1 + len(content)
        case {"type": "Precompiled", "precompiled_charsmap": table}:
            table = base64.b64decode(table)
            texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
            return max(1, *map(len, texts))
        case {"type": "TemplateProcessing", "single": pieces}:
            return max(1, sum("Sequence" in piece for piece in pieces))
    return 1
