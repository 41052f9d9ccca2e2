"""Models over several devices."""

from specjax.parallel.sharding import abstract_target, mesh, over_that_fits, shard

__all__ = ["abstract_target", "mesh", "over_that_fits", "shard"]
