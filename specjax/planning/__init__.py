"""Planning of a decode for absent accelerators, with the real compiler and without weights."""

from specjax.costs.chips import CHIPS
from specjax.planning.budget.frontier import memory_frontier
from specjax.planning.budget.within_memory import MemoryPlan, plan_within_memory
from specjax.planning.inputs.topologies import known_topologies, parse_topology
from specjax.planning.model_choice import ModelChoice, choose_model
from specjax.planning.records import PlanReport
from specjax.planning.reports.decode import compile_report
from specjax.planning.reports.fits import Fits, ModelFit, what_fits
from specjax.planning.reports.training import TrainingReport, training_report
from specjax.planning.stages.report import StagePlan, plan_stages
from specjax.planning.tree.plan import Plan, plan
from specjax.planning.workload import Workload, make_workload

__all__ = [
    "CHIPS",
    "Fits",
    "MemoryPlan",
    "ModelChoice",
    "ModelFit",
    "Plan",
    "PlanReport",
    "StagePlan",
    "TrainingReport",
    "Workload",
    "choose_model",
    "compile_report",
    "known_topologies",
    "make_workload",
    "memory_frontier",
    "parse_topology",
    "plan",
    "plan_stages",
    "plan_within_memory",
    "training_report",
    "what_fits",
]
