"""The report of a training run: a card with its facts, and a plot."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from specjax.errors import UsageError
from specjax.persistence.cards import describe_machine, describe_target, describe_version, write_card
from specjax.training.measure.plot import plot
from specjax.training.measure.scaling import ScalingLaw
from specjax.training.results import BudgetRun, TrainedDrafter
from specjax.types import Target

PLOT = "training.png"


def make_card(trained: TrainedDrafter, target: Target, tokenizer: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts about a run, as they are read from its file.

    Args: settings: settings of the run, such as "epochs", by name.
    """
    measured, last = trained.measured, trained.history[-1] if trained.history else {}
    card = {
        **describe_version(), "machine": describe_machine(), **describe_target(target, tokenizer),
        "method": trained.kind, "recipe": dataclasses.asdict(trained.recipe),
        "answers": trained.texts, "answer_tokens": trained.response_tokens, **settings,
        "seconds": last.get("seconds", 0.0),
        "served": {
            "tokens_per_pass": measured.per_pass, **measured._asdict(), "num_draft_tokens": trained.num_draft_tokens,
            "texts": trained.held_out,
        },
        "accuracy": last.get("accuracy", []),
        "law": None if trained.law is None else _describe_law(trained.law, trained.runs),
    }  # fmt: skip
    return json.loads(json.dumps(card))


def write_report(trained: TrainedDrafter, title: str) -> None:
    """Write the card and the plot into the folder of a drafter. Raises: UsageError if they cannot be written."""
    write_card(trained.folder, trained.card)
    if trained.history:
        with contextlib.suppress(UsageError):  # without matplotlib history.jsonl still has the numbers
            (trained.folder / PLOT).write_bytes(plot(trained.history, title))


def _describe_law(law: ScalingLaw, runs: tuple[BudgetRun, ...]) -> dict[str, Any]:
    """Return the scaling law with its predictions for 2, 4 and 16 times the largest budget."""
    predicted = []
    for budget in (factor * runs[-1].tokens for factor in (2, 4, 16)):
        low, high = law.predict_interval(budget)
        predicted.append({"tokens": budget, "tokens_per_pass": float(law(budget)), "from": low, "to": high})
    return {
        "form": law.form, "slope": law.slope, "start": law.intercept, "r2": law.r2,
        "runs": [{"tokens": run.tokens, "tokens_per_pass": run.per_pass} for run in runs], "predicted": predicted,
    }  # fmt: skip
