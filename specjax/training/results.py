"""Results of `train_drafter`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from specjax.models.heads.contract import DraftHead
from specjax.training.measure.acceptance_eval import MeasuredAcceptance
from specjax.training.measure.scaling import ScalingLaw
from specjax.training.objectives.recipes import Recipe
from specjax.types import Target


class BudgetRun(NamedTuple):
    """The result of one budget."""

    tokens: int  # response tokens
    per_pass: float


@dataclass(frozen=True)
class TrainedDrafter:
    """A trained draft head or draft model, as it was written to a folder."""

    model: DraftHead | Target
    kind: str
    folder: Path
    recipe: Recipe
    num_draft_tokens: int  # length of the measured chain
    measured: MeasuredAcceptance  # on held-out responses that did not select the result
    held_out: int  # number of these responses
    improved: bool  # False if no step improved a trained starting point, which is then returned
    texts: int  # number of texts that were trained on
    response_tokens: int  # number of response tokens in these texts
    history: list[dict[str, Any]]  # one entry per step
    runs: tuple[BudgetRun, ...] = ()  # one entry per budget
    law: ScalingLaw | None = None  # fitted to these runs
    card: Mapping[str, Any] = field(default_factory=dict)  # the content of `card.json`
