"""Controllers of the draft depth, and a bandit that chooses among arms. All are pure functions of the past."""

from specjax.controllers import bandit
from specjax.controllers.additive import additive
from specjax.controllers.bass import bass
from specjax.controllers.budget import budget
from specjax.controllers.by_batch import by_batch
from specjax.controllers.fixed import fixed
from specjax.controllers.goodput import goodput
from specjax.controllers.multiplicative import multiplicative
from specjax.controllers.parsing import FORMS, parse
from specjax.controllers.spec_kv import fit as fit_spec_kv
from specjax.controllers.spec_kv import read_spec_kv, save_spec_kv, spec_kv

__all__ = [
    "FORMS",
    "additive",
    "bandit",
    "bass",
    "budget",
    "by_batch",
    "fit_spec_kv",
    "fixed",
    "goodput",
    "multiplicative",
    "parse",
    "read_spec_kv",
    "save_spec_kv",
    "spec_kv",
]
