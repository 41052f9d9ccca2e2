"""Controllers from a short text, for command lines and configs."""

from __future__ import annotations

import functools
from collections.abc import Callable

from specjax.controllers.additive import additive
from specjax.controllers.bass import bass
from specjax.controllers.by_batch import by_batch
from specjax.controllers.fixed import fixed
from specjax.controllers.goodput import goodput
from specjax.controllers.multiplicative import multiplicative
from specjax.costs import Costs
from specjax.errors import UsageError
from specjax.types import Controller

FORMS = {
    "fixed:N": "at most N tokens deep",
    "additive, additive:N": "starts N deep; 2 more after a round accepted whole, 1 less after a rejection",
    "multiplicative, multiplicative:N": "starts N deep; doubles and halves",
    "bass, bass:N": "starts N deep, all rows alike; 2 more once a row accepts a draft whole, else about a tenth less",
    "by_batch": "the larger the batch, the less deep",
    "goodput": "the depth that emits most tokens per second, 0 if none pays",
}


def parse(spec: str, costs: Costs = None, dtype: str = "float32", *, draft_cost: float = 0.0) -> Controller:
    """A controller from one of `FORMS`; `costs`, the `dtype` of the parameters and the `draft_cost` of one pass of the
    drafter: for those that weigh costs.

    Raises: UsageError for any other text.
    """
    name, _, number = spec.partition(":")
    makers: dict[str, Callable[..., Controller]] = {
        "fixed": fixed,
        "additive": additive,
        "multiplicative": multiplicative,
        "bass": bass,
        "by_batch": by_batch,
        "goodput": functools.partial(goodput, costs=costs, dtype=dtype, draft_cost=draft_cost),
    }
    takes_number = name in ("fixed", "additive", "multiplicative", "bass")
    if name not in makers or not (
        (number.isdecimal() and len(number) < 10 and takes_number) or spec == name != "fixed"
    ):
        raise UsageError(f'"{spec}" is not a controller; the forms are {", ".join(FORMS)}')
    return makers[name](int(number)) if number else makers[name]()
