"""Attacks on the readers of files: what is changed in one, and what must then hold."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import random
import re
import resource
import signal
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tiers import exhaustive

from specjax.errors import UsageError

SECONDS, MEMORY, SENTENCE = 20, 3 << 30, 1200

VALUES = [
    None, True, False, 0, 1, 2, 3, 7, -1, -5, -8, 48, 100_000, 10**9, (1 << 31) - 1, 1 << 31, (1 << 63) - 1, 1 << 63,
    0.5, -0.5, 32.0, 1e-40, 1e38, 1e308, math.nan, math.inf, -math.inf, "", "x", "12", "../x", "/dev/zero", "\x00",
    "\x1b]0;x\x07", "a" * 100_000, "(a+)+$", "{{ 1", [], {}, [[]], [{}], [0, 1], [-1], ["a"], [1] * 3000, {"a": 1},
    {"default": None},
]  # fmt: skip


def attacks(quick: int, many: int = 100_000):
    """Return parameters for `parametrize("rng, count", ...)`: some cases always, many in the tier `exhaustive`."""
    return [pytest.param(random.Random(0), quick, id="quick"), exhaustive(random.Random(1), many, id="many")]


class TooLong(KeyboardInterrupt):
    """Not an `Exception`, which a reader may turn into a sentence."""


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Limit the time, and the further memory where the system publishes how much is used."""

    def stop(*_):
        raise TooLong

    handler, limits = signal.signal(signal.SIGALRM, stop), resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(FileNotFoundError), open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, limits[1]))
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGALRM, handler)


def survives(read: Callable[[], object], case: object = "") -> str | None:
    """The sentence with which it was refused, None if it was read. Anything else is a failure."""
    try:
        with bounded():
            read()
    except UsageError as error:
        sentence = str(error)
        assert sentence and len(sentence) <= SENTENCE and "\n" not in sentence, (case, sentence)
        return sentence
    except TooLong:
        pytest.fail(f"{case}: more than {SECONDS} s")
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | pytest.fail.Exception):
            raise
        raise AssertionError(f"{case}: {type(error).__name__}: {str(error)[:300]}") from error
    return None


def changed_bytes(rng: random.Random, contents: bytes, within: int | None = None) -> bytes:
    """Return the contents with one to three changes among the first `within` bytes."""
    data = bytearray(contents)
    for _ in range(rng.randint(1, 3)):
        limit = max(1, min(len(data), within or len(data)))
        at, other = sorted(rng.randrange(limit) for _ in range(2))
        kind = rng.randrange(8)
        if not data:
            break
        if kind < 3:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 3:
            data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif kind == 4:
            number = rng.choice((0, 1, 7, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 64) - 1))
            width = rng.choice((4, 8))
            data[at : at + width] = (number & ((1 << 8 * width) - 1)).to_bytes(width, "little")
        elif kind == 5:
            del data[at : min(other, at + 64)]
        elif kind == 6:
            data[at:at] = data[at : min(other, at + 64)]
        else:
            del data[at:]
    return bytes(data)


def changed_json(rng: random.Random, document: Any, values: list = VALUES) -> Any:
    """Return the document with one to three values replaced, removed, exchanged or added."""
    document = copy.deepcopy(document)
    for _ in range(rng.randint(1, 3)):
        holder, key = document, None
        while isinstance(holder, dict | list) and holder:
            key = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
            if rng.random() < 0.4 or not isinstance(holder[key], dict | list) or not holder[key]:
                break
            holder = holder[key]
        if key is None:
            return copy.deepcopy(rng.choice(values))
        kind = rng.randrange(10)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder[key], int | float) and math.isfinite(holder[key]):
            holder[key] = rng.choice(
                (holder[key] + 1, holder[key] - 1, -holder[key], holder[key] * 1000, str(holder[key]))
            )
        elif kind == 2:
            holder[key] = copy.deepcopy(rng.choice(list(holder.values()) if isinstance(holder, dict) else holder))
        elif kind == 3:
            holder[key] = [holder[key]]
        else:
            holder[key] = copy.deepcopy(rng.choice(values))
    return document


def as_json(rng: random.Random, document: Any) -> bytes:
    """Return the bytes of a document, sometimes damaged as only JSON can be."""
    contents = json.dumps(document).encode("utf-8", "surrogatepass")
    kind = rng.randrange(40)
    if kind == 0:
        return rng.choice((b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000, b"", b"\xff\xfe", b"\x00" * 100, b"null"))
    if kind == 1:
        return re.sub(rb"\d+", b"9" * 5000, contents, count=1)
    if kind < 5:
        return changed_bytes(rng, contents)
    return contents


def gguf_bytes(
    fields: dict[str, Any], tensors: list[tuple[str, tuple, int, int]], data: bytes, alignment: int = 32
) -> bytes:
    """A GGUF file that says anything. `tensors`: name, dimensions (the fastest first), kind, offset."""
    text = lambda x: struct.pack("<Q", len(x.encode("utf-8", "replace"))) + x.encode("utf-8", "replace")

    def value(x) -> tuple[int, bytes]:
        if isinstance(x, bool):
            return 7, struct.pack("<?", x)
        if isinstance(x, int):
            return (
                (4, struct.pack("<I", x))
                if 0 <= x < 1 << 32
                else (11, struct.pack("<q", max(-(1 << 63), min(x, (1 << 63) - 1))))
            )
        if isinstance(x, float):
            return 12, struct.pack("<d", x)
        if isinstance(x, list):
            items = [value(entry) for entry in x]
            kind = items[0][0] if items else 4
            return 9, struct.pack("<IQ", kind, len(items)) + b"".join(item for _, item in items)
        return 8, text(str(x))

    body = b"".join(
        text(name) + struct.pack("<I", kind) + raw for name, (kind, raw) in ((n, value(v)) for n, v in fields.items())
    )
    body += b"".join(
        text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
        for name, shape, kind, offset in tensors
    )
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields)) + body
    return head + bytes(-len(head) % alignment) + data
