"""Plan a decode for TPUs that are not here: the real compiler, no chip and no weights."""

from specjax.planning.chips import CHIPS, known_topologies, parse_topology
from specjax.planning.compiler import compile_report, make_job
from specjax.planning.plan import Plan, plan
from specjax.planning.report import Report

__all__ = [
    "CHIPS",
    "Plan",
    "Report",
    "compile_report",
    "known_topologies",
    "make_job",
    "parse_topology",
    "plan",
]
