"""GEAR: the cache of keys and values in a few bits, with a low-rank correction and separate outliers.

Source: Kang et al. 2024, GEAR: An Efficient KV Cache Compression Recipe for Near-Lossless Generative Inference of LLM,
arXiv 2403.05527.

Rule: `models/gear/codec.py` compresses a block of keys or values. A query at position t reads block i compressed if
t >= (i + 2) * block, and in full precision otherwise.
Guarantee: lossy. The compressed model is another model. Decoding with it is as exact as its method.
Deviations: the authors compress when a buffer is full, so the text depends on where rounds end. Here the position
decides. They use rank 4 for prompts and 2 for new tokens; here all blocks have the same rank, because the size of a
prefill would matter otherwise. Power iteration makes its columns orthonormal in each iteration, which spans the same
space with less rounding.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from specjax.catalog import Method, Option
from specjax.catalog.schemes import check_gear
from specjax.errors import UsageError
from specjax.models import make_model
from specjax.types import Target

METHOD = Method(
    name="gear",
    kind="cache",
    guarantee="lossy",
    summary="stores older keys and values in a few bits, with a low-rank correction and separate outliers",
    paper="Kang et al. 2024, GEAR: An Efficient KV Cache Compression Recipe for Near-Lossless Generative Inference of "
    "LLM, arXiv 2403.05527",
    options=(
        Option("bits", "int", 4, "bits of a key or value: 2, 4 or 8"),
        Option("block", "int", 64, "tokens that are compressed together; the last two blocks are not compressed"),
        Option("rank", "int", 2, "rank of the correction of a block and head; 0: none"),
        Option("outliers", "float", 0.02, "share of numbers that are stored apart; 0: none, else at least two"),
    ),
)


def gear(target: Target, bits: int = 4, *, block: int = 64, rank: int = 2, outliers: float = 0.02) -> Target:
    """Return the target with a compressed cache.

    Args:
      bits, block, rank, outliers: see `METHOD`.

    Raises: UsageError for a value out of range, or a target whose cache cannot be compressed.
    """
    check_options(bits=bits, block=block, rank=rank, outliers=outliers)
    config = target.model.config
    if config is None or not hasattr(config, "cache_dtype"):
        raise UsageError(f"gear needs a model with a cache of keys and values, which {target.model.name} does not have")
    form = f"gear:{bits},block={block},rank={rank},outliers={outliers:g}"
    model = make_model(dataclasses.replace(config, cache_dtype=form), target.model.mesh, target.model.over)
    return dataclasses.replace(target, model=model)


def check_options(
    *, bits: int = 4, block: int = 64, rank: int = 2, outliers: float = 0.02, **others: Any
) -> dict[str, Any]:
    """Check the options of `gear` and return them. Raises: UsageError for a value out of range."""
    return check_gear(bits=bits, block=block, rank=rank, outliers=outliers)
