"""How deep to draft: pure functions of the past."""

from specjax.controllers.fixed import fixed

__all__ = ["fixed"]
