"""Models over several devices and hosts."""

from specjax.parallel.arrays import gather, place, spread_rows
from specjax.parallel.checkpoint import Checkpoints, restore, save
from specjax.parallel.hosts import check_same, initialize
from specjax.parallel.sharding import abstract_target, head_shardings, mesh, over_that_fits, shard, shard_head

__all__ = [
    "Checkpoints",
    "abstract_target",
    "check_same",
    "gather",
    "head_shardings",
    "initialize",
    "mesh",
    "over_that_fits",
    "place",
    "restore",
    "save",
    "shard",
    "shard_head",
    "spread_rows",
]
