"""Attention and feed-forward layers on separate devices: seconds of each stage, and the best division of devices."""

from specjax.planning.stages.compiled import CompiledStages, StagePass, compile_stage_passes
from specjax.planning.stages.programs import StagePrograms, compile_stages
from specjax.planning.stages.report import StagePlan, StageRow, plan_stages

__all__ = [
    "CompiledStages",
    "StagePass",
    "StagePlan",
    "StagePrograms",
    "StageRow",
    "compile_stage_passes",
    "compile_stages",
    "plan_stages",
]
