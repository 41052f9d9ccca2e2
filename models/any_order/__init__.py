"""Models that predict a token from any set of other tokens, and their checkpoints."""

from specjax.models.any_order.reading import load_xlnet
from specjax.models.any_order.xlnet import XLNetConfig, forward

__all__ = ["XLNetConfig", "forward", "load_xlnet"]
