"""Models over several devices."""

from specjax.parallel.sharding import abstract_target, mesh, shard

__all__ = ["abstract_target", "mesh", "shard"]
