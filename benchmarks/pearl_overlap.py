"""Do the two sides of a PEARL step run at the same time?

    python benchmarks/pearl_overlap.py --gamma 4 --profile docs/pearl_profile.png

Random Llamas on two devices (CPU: two fake ones): one target pass and GAMMA draft passes, alone, one after the other,
and dispatched together as `pearl` does. Full overlap takes the time of the slower; none, the sum. Fake CPU devices
share the cores, which one program alone uses up unless XLA_FLAGS has --xla_cpu_multi_thread_eigen=false. The least of
ROUNDS times counts, as others may use the machine. --profile draws which of the two programs had operations running
when, from JAX's own profiler, and says for how much of the shorter side's time the other ran too.
"""

from __future__ import annotations

import argparse
import glob
import os
import tempfile
import time

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"

import jax
import numpy as np

from specjax.decoders.pearl import Role, _draft, _place, _read, _verify
from specjax.models import LlamaConfig, init_params, make_model
from specjax.types import Sampling, Target

ROUNDS = 60


def role(layers: int, device: int) -> Role:
    config = LlamaConfig(
        vocab_size=4096, width=512, num_layers=layers, num_heads=8, num_kv_heads=8, head_dim=64, mlp_width=1024
    )
    target = Target(make_model(config), init_params(config, jax.random.key(device)))
    return _place(
        Role(jax.device_put(target, jax.devices()[device]), Sampling(), jax.random.split(jax.random.key(0), 1))
    )


def spans(folder: str) -> dict[str, list[tuple[float, float]]]:
    """Program -> merged (start, end) in ms during which any of its operations ran, from a profile."""
    (file,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
    intervals: dict[str, list] = {"jit__verify": [], "jit__draft": []}
    for plane in jax.profiler.ProfileData.from_file(file).planes:
        for line in plane.lines:
            for event in line.events:
                program = dict(event.stats).get("hlo_module")
                if program in intervals:
                    intervals[program].append((event.start_ns / 1e6, event.end_ns / 1e6))
    return {program: merged(times) for program, times in intervals.items()}


def merged(times: list[tuple[float, float]]) -> list[tuple[float, float]]:
    result: list[tuple[float, float]] = []
    for start, end in sorted(times):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((start, end))
    return result


def common(ours, theirs) -> float:
    """Time that both have."""
    return sum(max(0.0, min(b, d) - max(a, c)) for a, b in ours for c, d in theirs)


def draw(busy: dict[str, list[tuple[float, float]]], out: str) -> None:
    from matplotlib.figure import Figure

    first = min(times[0][0] for times in busy.values())
    axes = (figure := Figure(figsize=(9.0, 2.2), layout="constrained")).subplots()
    for row, (program, color) in enumerate((("jit__draft", "tab:green"), ("jit__verify", "tab:gray"))):
        axes.broken_barh([(a - first, b - a) for a, b in busy[program]], (row - 0.4, 0.8), color=color)
    axes.set_yticks([0, 1], ["draft", "target"])
    axes.set_xlabel("ms")
    figure.savefig(out, dpi=120)


def main(gamma: int, profile: str | None) -> None:
    tokens, length = np.ones((1, 256), np.int32), np.array([8], np.int32)
    writer, judge = role(2, 0), role(2 * gamma, 1)
    caches = [_read(side, tokens, length) for side in (writer, judge)]

    def draft():
        drafts, caches[0] = _draft(writer, caches[0], tokens[:, :1], length, gamma=gamma)
        return drafts

    def verify():
        picks, caches[1] = _verify(judge, caches[1], tokens[:, :gamma], length)
        return picks

    def seconds(*programs, wait: bool) -> float:
        times = []
        for _ in range(ROUNDS + 3):
            start = time.perf_counter()
            results = [jax.block_until_ready(run()) if wait else run() for run in programs]
            jax.device_get(results)
            times.append(time.perf_counter() - start)
        return min(times[3:])

    if profile is not None:
        for _ in range(3):
            jax.device_get([verify(), draft()])
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                for _ in range(5):
                    jax.device_get([verify(), draft()])
            busy = spans(folder)
        shorter = min(sum(b - a for a, b in times) for times in busy.values())
        print(f"profile of five steps: {common(*busy.values()) / shorter:.0%} of the shorter side ran beside the other")
        draw(busy, profile)

    alone = {"target": seconds(verify, wait=True), "draft": seconds(draft, wait=True)}
    in_turn, together = seconds(verify, draft, wait=True), seconds(verify, draft, wait=False)
    hidden = (in_turn - together) / min(alone.values())
    print(f"{jax.device_count()} {jax.default_backend()} devices, {os.cpu_count()} cores, gamma {gamma}")
    for name, value in alone.items():
        print(f"{name} alone    {1e3 * value:7.2f} ms")
    print(f"one by one      {1e3 * in_turn:7.2f} ms")
    print(f"together        {1e3 * together:7.2f} ms: {hidden:.0%} of the shorter side is hidden")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--profile", help="a picture of the two programs over five steps")
    arguments = parser.parse_args()
    main(arguments.gamma, arguments.profile)
