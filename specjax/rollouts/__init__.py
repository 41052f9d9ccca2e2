"""Samples of a policy that is being trained, for any loop of reinforcement learning and for Tunix."""

from specjax.rollouts.sampler import RolloutSampler, Samples, SamplingCost
from specjax.rollouts.scoring import score
from specjax.rollouts.store import RolloutStore

__all__ = ["RolloutSampler", "RolloutStore", "Samples", "SamplingCost", "score"]
