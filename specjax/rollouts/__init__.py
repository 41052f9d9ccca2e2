"""Samples of a policy that is being trained, for any loop of reinforcement learning and for Tunix."""

from specjax.rollouts.sampler import RolloutSampler, Samples, SamplingCost

__all__ = ["RolloutSampler", "Samples", "SamplingCost"]
