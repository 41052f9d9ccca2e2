"""How deep to draft, and which of several arms to pull: pure functions of the past."""

from specjax.controllers import bandit
from specjax.controllers.fixed import fixed
from specjax.controllers.goodput import goodput

__all__ = ["bandit", "fixed", "goodput"]
