"""Trained parts of methods: probes, routers, filters, decision heads and changed models, by the name of their method.

Each entry trains on texts and writes files that the method reads. `specjax train --method NAME` calls them. Draft heads
and draft models have a pipeline of their own (`specjax.training.pipeline`).
"""

from collections.abc import Mapping

from specjax.training.parts import adaptive_depth, decision_heads, denoisers, loop_models
from specjax.training.parts.contract import PartJob, PartKind, PartResult

__all__ = ["PARTS", "PartJob", "PartKind", "PartResult"]

PARTS: Mapping[str, PartKind] = {
    **adaptive_depth.PARTS, **loop_models.PARTS, **denoisers.PARTS, **decision_heads.PARTS
}  # fmt: skip
"""The parts by the name of their method, rule or controller."""
