"""Form of models that is fastest on each backend."""

from __future__ import annotations

from typing import Any

from specjax.models.storage.joined import JOINED


def storage_options(platform: str) -> dict[str, Any]:
    """Return the fields of `DecoderConfig` for programs that run on "tpu", "gpu" or "cpu".

    - stacked: on a TPU a scan over stacked layers reads each layer in place and compiles fast. On a GPU the scan copies
      each layer out of the stack in every pass, which took half of a step (Llama 3 8B on an H200, bfloat16: 13.9 ms,
      and 5.3 ms unrolled). On a CPU it copies them too.
    - joined: on a GPU one product of joined projections starts one kernel instead of three. The key and value
      projections alone are also too small to reach its memory bandwidth. On a TPU that is true for queries, keys and
      values. A TPU would need a copy to separate gate and up. On a CPU separate products are as fast.
    - cache_lanes, cache_bits: arguments of `models.cache.init`.
    """
    return {
        "stacked": platform == "tpu",
        "joined": {"gpu": tuple(JOINED), "tpu": ("qkv",)}.get(platform, ()),
        "cache_lanes": 128 if platform == "tpu" else 1,
        "cache_bits": platform == "cpu",
    }
