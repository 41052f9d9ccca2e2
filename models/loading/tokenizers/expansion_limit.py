"""How much longer a tokenizer.json can make a text: a chain of a few replacements makes gigabytes of it."""

from __future__ import annotations

import base64
import json
import math
from typing import Any

MAX_EXPANSION = 1 << 14
"""Times the length of a text. Replacements of one character count twice, as they may stand where nothing was; the
tables of T5, XLM and Gemma come to less than 100."""


def expansion_factor(backend: Any) -> int:
    """The most by which a tokenizer of the library `tokenizers` multiplies what it reads or writes."""
    parts = (backend.normalizer, backend.post_processor, backend.decoder)
    return max((_of(json.loads(part.__getstate__())) for part in parts if part is not None), default=1)


def _of(part: dict[str, Any]) -> int:
    match part:
        case {"type": "Sequence"}:  # of normalizers, processors or decoders
            return math.prod(_of(one) for several in part.values() if isinstance(several, list) for one in several)
        case {"type": "Replace", "content": content, "pattern": {"String": found}}:
            return -(-len(content) // len(found)) if found and content else 1 + len(content)
        case {"type": "Replace", "content": content}:  # of a regular expression, which may match nothing
            return 1 + len(content)
        case {"type": "Precompiled", "precompiled_charsmap": table}:
            table = base64.b64decode(table)
            texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
            return max(1, *map(len, texts))
        case {"type": "TemplateProcessing", "single": pieces}:
            return max(1, sum("Sequence" in piece for piece in pieces))
    return 1
