"""Seconds from the start of `specjax generate` to the first character of its answer, cold and warm.

    python benchmarks/first_token.py --runs 5

The first run has an empty cache folder, the others what it left there. What is given behind `--` goes to `generate`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

PROMPT = "Explain why the sky is blue."


def first_character(arguments: list[str], folder: str) -> tuple[float, float]:
    """(seconds until it, seconds in all)."""
    begin = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", "specjax.cli", "generate", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=os.environ | {"XDG_CACHE_HOME": folder}, bufsize=0,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        process.stdout.read(1)
        first = time.perf_counter() - begin
        process.stdout.read()
    assert process.returncode == 0, f"specjax generate ended with {process.returncode}"
    return first, time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="warm ones")
    parser.add_argument("arguments", nargs="*", help="of generate; default: a question, 24 tokens")
    given = parser.parse_args()
    arguments = given.arguments or [PROMPT, "--max-new-tokens", "24"]
    with tempfile.TemporaryDirectory() as folder:
        first, whole = first_character(arguments, folder)
        print(f"cold: first character after {first:.1f} s, all after {whole:.1f} s", flush=True)
        runs = [first_character(arguments, folder) for _ in range(given.runs)]
    firsts, wholes = zip(*runs, strict=True)
    print(
        f"warm, median of {given.runs}: first character after {statistics.median(firsts):.1f} s "
        f"({min(firsts):.1f} to {max(firsts):.1f}), all after {statistics.median(wholes):.1f} s"
    )


if __name__ == "__main__":
    main()
