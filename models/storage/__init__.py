"""Form in which a process stores a model: its layers, projections and cache."""

from specjax.models.storage.backends import storage_options
from specjax.models.storage.joined import JOINED, join_projections, rows_in_joined, split_projections

__all__ = ["JOINED", "join_projections", "rows_in_joined", "split_projections", "storage_options"]
