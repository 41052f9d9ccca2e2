"""Do the two sides of a PEARL step run at the same time?

    python benchmarks/pearl_overlap.py [GAMMA]

Random Llamas on two devices (CPU: two fake ones): one target pass and GAMMA draft passes, alone, one after the other,
and dispatched together as `pearl` does. Full overlap takes the time of the slower; none, the sum. Fake CPU devices
share the cores, which one program alone uses up unless XLA_FLAGS has --xla_cpu_multi_thread_eigen=false. The least of
ROUNDS times counts, as others may use the machine.
"""

from __future__ import annotations

import os
import sys
import time

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"

import jax
import numpy as np

from specjax.decoders.pearl import _draft, _place, _read, _Role, _verify
from specjax.models import LlamaConfig, init_params, make_model
from specjax.types import Sampling, Target

ROUNDS = 60


def role(layers: int, device: int) -> _Role:
    config = LlamaConfig(
        vocab_size=4096, width=512, num_layers=layers, num_heads=8, num_kv_heads=8, head_dim=64, mlp_width=1024
    )
    target = Target(make_model(config), init_params(config, jax.random.key(device)))
    return _place(
        _Role(jax.device_put(target, jax.devices()[device]), Sampling(), jax.random.split(jax.random.key(0), 1))
    )


def main(gamma: int) -> None:
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

    alone = {"target": seconds(verify, wait=True), "draft": seconds(draft, wait=True)}
    in_turn, together = seconds(verify, draft, wait=True), seconds(verify, draft, wait=False)
    hidden = (in_turn - together) / min(alone.values())
    print(f"{jax.device_count()} {jax.default_backend()} devices, {os.cpu_count()} cores, gamma {gamma}")
    for name, value in alone.items():
        print(f"{name} alone    {1e3 * value:7.2f} ms")
    print(f"one by one      {1e3 * in_turn:7.2f} ms")
    print(f"together        {1e3 * together:7.2f} ms: {hidden:.0%} of the shorter side is hidden")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4)
