"""Seconds from the start of `specjax generate` to the first character of its answer, cold and warm.

    python benchmarks/first_token.py --runs 5

Cold runs have an empty cache folder, the others what the last of these left there. What is given behind `--` goes to
`generate`.
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


def first_character(arguments: list[str], folder: str) -> tuple[float, float, float, float]:
    """(seconds until it, seconds in all, and of the processors both)."""
    begin = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", "specjax.cli", "generate", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=os.environ | {"XDG_CACHE_HOME": folder}, bufsize=0,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        process.stdout.read(1)
        first, worked = time.perf_counter() - begin, processor_seconds(process.pid)
        process.stdout.read()
        total = time.perf_counter() - begin
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # what it worked is still told
        in_all = processor_seconds(process.pid)
    assert process.returncode == 0, f"specjax generate ended with {process.returncode}"
    return first, total, worked, in_all


def processor_seconds(process: int) -> float:
    """Return the processor seconds of a process, which a shared machine does not disturb; nan except on Linux."""
    try:
        with open(f"/proc/{process}/stat", encoding="ascii") as lines:
            fields = lines.read().rpartition(")")[2].split()
    except OSError:
        return float("nan")
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def summary(runs: list[tuple[float, float, float, float]]) -> str:
    first, total, worked, in_all = zip(*runs, strict=True)
    middle = statistics.median
    return (
        f"first character after {middle(first):.1f} s ({min(first):.1f} to {max(first):.1f}), all after "
        f"{middle(total):.1f} s; processor seconds {middle(worked):.1f} and {middle(in_all):.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="warm ones")
    parser.add_argument("--cold", type=int, default=1, help="cold ones")
    parser.add_argument("arguments", nargs="*", help="of generate; default: a question, 24 tokens")
    args = parser.parse_args()
    arguments = args.arguments or [PROMPT, "--max-new-tokens", "24"]
    cold, runs = [], []
    for number in range(args.cold):
        with tempfile.TemporaryDirectory() as folder:
            cold.append(first_character(arguments, folder))
            if number == args.cold - 1:
                runs = [first_character(arguments, folder) for _ in range(args.runs)]
    print(f"cold, median of {args.cold}: {summary(cold)}", flush=True)
    if runs:
        print(f"warm, median of {args.runs}: {summary(runs)}")


if __name__ == "__main__":
    main()
