"""The collaboration methods, each in a file named after its paper."""

from specjax.collaborate.methods.a_star import a_star
from specjax.collaborate.methods.anchored import anchored
from specjax.collaborate.methods.arbitrage import arbitrage
from specjax.collaborate.methods.cntp import cntp
from specjax.collaborate.methods.entropy_adaptive import entropy_adaptive
from specjax.collaborate.methods.first_finish import first_finish
from specjax.collaborate.methods.foreal import foreal
from specjax.collaborate.methods.fs_gen import fs_gen
from specjax.collaborate.methods.momentum import momentum
from specjax.collaborate.methods.power_smc import power_smc
from specjax.collaborate.methods.reward_smc import reward_smc
from specjax.collaborate.methods.rpc import rpc
from specjax.collaborate.methods.spec_reason import spec_reason
from specjax.collaborate.methods.speculative_thinking import speculative_thinking

__all__ = [
    "a_star",
    "anchored",
    "arbitrage",
    "cntp",
    "entropy_adaptive",
    "first_finish",
    "foreal",
    "fs_gen",
    "momentum",
    "power_smc",
    "reward_smc",
    "rpc",
    "spec_reason",
    "speculative_thinking",
]
