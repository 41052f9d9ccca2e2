"""Automata over bytes of regular expressions, from outlines-core, and a process of its own in which to compile them.

Some short expressions, such as `(a|b)*a(a|b){20}`, have automata with millions of states. A server compiles the
expressions of its clients in a process with limits of time and memory. As a script, this file is that process. So it
imports nothing of specjax.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np

NONE = -1
"""The state after a byte that is not allowed."""
MEMORY = 2 << 30
"""Bytes of memory of the process."""
END, AT_END = "\U0010ffff", 256
"""A character that marks the end of every text without being part of it, and its letter.

outlines-core 0.2.14 loses transitions from states where a text may end to states where it may not. For `(ab)*` it
rejects a and b as two tokens. So a text ends only after END, and a state is accepting if END may follow.
"""


class CompileError(ValueError):
    """The reason why an expression cannot be compiled, as the end of a sentence."""


def compile_bytes(pattern: str, is_valid: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the states int32[S, 256] after each byte, and the accepting states bool[S]. State 0 is the first one.

    Args:
      is_valid: the expression needs no check. Otherwise the group around it could make it valid.

    Raises: CompileError for an invalid expression.
    """
    if not is_valid:
        _index(pattern, {})
    index = _index(f"(?:{pattern}){END}", {END.encode(): [AT_END]})
    start, rows = index.get_initial_state(), index.get_transitions()
    # END is also read as content, by `.` and by negated classes. Only where it completes a text does it lead to an end.
    complete = set(index.get_final_states())
    states = {start, *rows, *(target for row in rows.values() for target in row.values())}
    place = {state: number for number, state in enumerate([start, *sorted(states - {start})])}
    following = np.full((len(place), 256), NONE, np.int32)
    accepting = np.zeros(len(place), bool)
    for state, row in rows.items():
        accepting[place[state]] = row.pop(AT_END, None) in complete
        row.pop(AT_END + 1, None)
        following[place[state], list(row)] = [place[target] for target in row.values()]
    return following, accepting


def _index(pattern: str, more: dict[bytes, list[int]]) -> Any:
    import outlines_core as library

    letters = {bytes([byte]): [byte] for byte in range(256)} | more
    try:
        return library.Index(pattern, library.Vocabulary(AT_END + 1, letters))
    except (ValueError, TypeError, OverflowError) as error:
        first_line = next(iter(str(error).splitlines()), "")
        raise CompileError(f"is invalid or not supported: {first_line}") from None


def compile_in_process(pattern: str, is_valid: bool, seconds: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the result of `compile_bytes` from a process that may take some seconds, and MEMORY.

    Raises: CompileError for an invalid expression, or if a limit is reached.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            [sys.executable, "-S", "-P", __file__], input=json.dumps([pattern, is_valid]).encode(), env=environment,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=seconds, start_new_session=True, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise CompileError(f"takes more than {seconds:g} s to compile; limit its lengths, or simplify it") from None
    line, _, content = done.stdout.partition(b"\n")
    if done.returncode or not line:
        raise CompileError("takes too much memory to compile; limit its lengths, or simplify it")
    answer = json.loads(line)
    if "error" in answer:
        raise CompileError(answer["error"])
    following, accepting = content[: -answer["states"]], content[-answer["states"] :]
    return np.frombuffer(following, np.int32).reshape(-1, 256), np.frombuffer(accepting, bool)


def _main() -> None:
    try:
        import resource
    except ImportError:  # not on this system
        pass
    else:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        following, accepting = compile_bytes(*json.loads(sys.stdin.buffer.read()))
    except CompileError as error:
        sys.stdout.buffer.write(json.dumps({"error": str(error)}).encode() + b"\n")
        return
    head = json.dumps({"states": len(accepting)}).encode() + b"\n"
    sys.stdout.buffer.write(head + following.tobytes() + accepting.tobytes())


if __name__ == "__main__":
    _main()
