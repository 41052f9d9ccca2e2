"""Controllers from a short text, for command lines and configs."""

from __future__ import annotations

import functools
from collections.abc import Callable

from specjax.catalog.options import REQUIRED, Option, read_call
from specjax.controllers.additive import additive
from specjax.controllers.bass import bass
from specjax.controllers.budget import budget
from specjax.controllers.by_batch import by_batch_for
from specjax.controllers.fixed import fixed
from specjax.controllers.goodput import goodput
from specjax.controllers.multiplicative import multiplicative
from specjax.controllers.spec_kv import spec_kv
from specjax.costs import NO_SHARES, Costs, Shares, WeightDtype
from specjax.errors import UsageError
from specjax.types import Controller

FORMS = {
    "fixed:N": "at most N tokens deep",
    "additive, additive:N": "start N deep; 2 more after a fully accepted draft, 1 less after a rejection",
    "multiplicative, multiplicative:N": "start N deep; double after a fully accepted draft, halve after a rejection",
    "bass, bass:N": "start N deep, the same for all rows; 2 more after a full acceptance, else about a tenth less",
    "by_batch": "the larger the batch, the shorter the draft; for a mixture of experts by the costs of its passes",
    "spec_kv:FILE": "as many as a trained network predicts from the last draft; more options: gammas=N/N/..., start=N, "
    "code=N, round_costs=X/X/...",
    "goodput": "the depth with the most tokens per second, 0 if speculation is slower",
    "budget, budget:N": "the same by the trained confidences of past drafts, for chains of dspark (N: 7)",
}


BUDGET_DIGITS = 3
"""Maximum digits of N in budget:N. This controller compares all depths up to N."""

SPEC_KV = (
    Option("weights", "spec_kv_weights", REQUIRED, "the file of a trained network"),
    Option("gammas", "integers_in_call", (2, 4, 6, 8), "lengths to choose from"),
    Option("start", "int", 4, "length of the first draft"),
    Option("code", "int", 0, "compression of the drafter: 0 float16, 1 int8, 2 nf4"),
    Option("round_costs", "floats_in_call", None, "cost of a step with each length; default: equal costs"),
)
"""The options of the form `spec_kv:FILE,start=2`."""


def parse(
    spec: str, costs: Costs = None, dtype: WeightDtype = "float32", *, draft_cost: float = 0.0,
    shares: Shares = NO_SHARES,
) -> Controller:  # fmt: skip
    """Build a controller from one of `FORMS`. Raises: UsageError for any other text.

    Args:
      costs, dtype, draft_cost, shares: as for `goodput`, `budget` and `by_batch`: cost curve, dtype of the target's
        parameters, cost of a drafter pass, bytes besides the weights.
    """
    name, _, number = spec.partition(":")
    if name == "spec_kv":
        return spec_kv(**read_call(spec, SPEC_KV))
    makers: dict[str, Callable[..., Controller]] = {
        "fixed": fixed,
        "additive": additive,
        "multiplicative": multiplicative,
        "bass": bass,
        "by_batch": functools.partial(by_batch_for, costs, dtype, draft_cost=draft_cost, shares=shares),
        "goodput": functools.partial(goodput, costs=costs, dtype=dtype, draft_cost=draft_cost, shares=shares),
        "budget": lambda n=7: budget(
            tuple(range(n + 1)), costs=costs, dtype=dtype, draft_cost=draft_cost, shares=shares
        ),
    }
    digits = dict.fromkeys(("fixed", "additive", "multiplicative", "bass"), 9) | {"budget": BUDGET_DIGITS}
    has_number = number.isdecimal() and len(number) <= digits.get(name, 0)
    if name not in makers or not (has_number or spec == name != "fixed"):
        raise UsageError(
            f'"{spec}" is not a controller; the forms are {", ".join(FORMS)}, with N of at most '
            f"{digits.get(name, 9)} digits"
        )
    return makers[name](int(number)) if number else makers[name]()
