"""Sharding of models over several devices and hosts."""

from specjax.numerics.global_arrays import gather, place
from specjax.parallel.hosts import check_same, initialize
from specjax.parallel.sharding import (
    abstract_target,
    head_shardings,
    largest_over,
    mesh,
    shard,
    shard_head,
    spread_inputs,
    spread_rows,
)

__all__ = [
    "abstract_target",
    "check_same",
    "gather",
    "head_shardings",
    "initialize",
    "largest_over",
    "mesh",
    "place",
    "shard",
    "shard_head",
    "spread_inputs",
    "spread_rows",
]
