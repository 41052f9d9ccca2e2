"""A GRPO run in Tunix with specjax as its rollout engine: the policy is Tunix's own module, and no weight is copied.

    pip install google-tunix==0.1.7
    python examples/tunix_grpo.py --updates 20
    python examples/tunix_grpo.py --engine vanilla

Tunix (github.com/google/tunix) trains. `ClusterConfig(rollout_engine=SpecJaxRollout)` is the only change. A rollout
reads the trainer's module as it stands, so there are no weights to send. Speculation keeps the distribution of the
samples, so the policy that is updated is the one that sampled: the largest difference between the log-probabilities of
the sampler and those of Tunix's own pass is printed for each rollout. The reward is a toy, the share of even tokens,
and the policy a tiny random Qwen3, which learns it within a minute on two CPU cores. `--engine vanilla` samples with
Tunix's own engine, for comparison: its samples have the same distribution, but other random numbers.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.rl import rl_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout, vanilla_rollout

from specjax.rollouts import SamplingCost
from specjax.rollouts.tunix import SpecJaxRollout

TINY = qwen3.ModelConfig(
    num_layers=2, vocab_size=64, embed_dim=32, hidden_dim=64, num_heads=4, num_kv_heads=2, head_dim=8, norm_eps=1e-6,
    rope_theta=10_000, dtype=jnp.float32, param_dtype=jnp.float32,
)  # fmt: skip
END = 0  # the eos and the padding


class Numbers:
    """A tokenizer of texts such as "3 14 15"."""

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids) -> str:
        return " ".join(str(int(i)) for i in ids)

    def bos_id(self) -> int:
        return 1

    def eos_id(self) -> int:
        return END

    pad_id = eos_id


class Rollout(NamedTuple):
    """Result of one call of `generate`."""

    reward: float  # mean over the samples
    logprob_gap: float  # largest difference between the sampler's log-probabilities and the trainer's
    tokens_per_pass: float  # of the policy


class Watched:
    """A part of an engine that records reward, log-probabilities and cost of each call."""

    # Tunix builds the engine; this is how its figures get out
    history: list[Rollout] = []  # noqa: RUF012
    costs: list[SamplingCost] = []  # noqa: RUF012

    def generate(self, prompts, rollout_config, **options):
        output = super().generate(prompts, rollout_config, **options)
        longest = max(map(len, output.tokens))
        new = np.array([np.pad(row, (0, longest - len(row)), constant_values=END) for row in output.tokens])
        theirs = np.asarray(self.get_per_token_logps(jnp.asarray(output.left_padded_prompt_tokens), jnp.asarray(new)))
        gaps = [
            np.abs(ours - row[: len(ours)])[tokens != END].max(initial=0.0)
            for ours, row, tokens in zip(output.logprobs, theirs, output.tokens, strict=True)
        ]
        reward = float(np.mean([share_of_even(row) for row in output.tokens]))
        tokens_per_pass = self.costs.pop().tokens_per_pass if self.costs else 1.0
        self.history.append(Rollout(reward, float(max(gaps)), tokens_per_pass))
        return output


class Observed(Watched, SpecJaxRollout):
    """The engine of specjax."""


class Vanilla(Watched, vanilla_rollout.VanillaRollout):
    """Tunix's own engine. Its seed is that of each call, or it would use the same random numbers in all calls."""

    def __init__(self, rollout_actor, tokenizer, mesh=None, rollout_config=None):
        config = rollout_actor.config
        super().__init__(
            rollout_actor,
            tokenizer,
            base_rollout.CacheConfig(
                cache_size=rollout_config.kv_cache_size,
                num_layers=config.num_layers,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
            ),
        )
        self.calls = 0

    def generate(self, prompts, rollout_config, **options):
        self.calls += 1
        seed = 1000 * (rollout_config.seed or 0) + self.calls
        return super().generate(prompts, dataclasses.replace(rollout_config, seed=seed), **options)


def share_of_even(ids) -> float:
    return float(np.mean(np.asarray(ids) % 2 == 0)) if len(ids) else 0.0


def reward(prompts, completions, **_) -> list[float]:
    return [share_of_even([int(word) for word in text.split()]) for text in completions]


def main(arguments: list[str] | None = None) -> list[Rollout]:
    parser = argparse.ArgumentParser(description="GRPO in Tunix, sampled by specjax.")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--group", type=int, default=8, help="samples per prompt")
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=0.01)
    parser.add_argument("--drafter", default="prompt_lookup", help="the name of a method; autoregressive for no drafts")
    parser.add_argument("--engine", choices=("specjax", "vanilla"), default="specjax")
    parser.add_argument("--seed", type=int, default=0, help="of the policy and its samples")
    options = parser.parse_args(arguments)
    policy = qwen3.Qwen3(TINY, rngs=nnx.Rngs(options.seed))
    drafted = functools.partial(Observed, drafter=options.drafter, report=Observed.costs.append)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    Watched.history.clear()
    cluster = rl_cluster.RLCluster(
        actor=policy,
        tokenizer=Numbers(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(
                (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT), mesh
            ),
            rollout_engine=drafted if options.engine == "specjax" else Vanilla,
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adam(options.learning_rate), max_steps=options.updates, eval_every_n_steps=10**6
            ),
            rollout_config=base_rollout.RolloutConfig(
                max_tokens_to_generate=options.max_new_tokens,
                max_prompt_length=8,
                temperature=1.0,
                kv_cache_size=128,
                seed=options.seed,
                return_logprobs=True,
            ),
        ),
    )
    learner = grpo_learner.GRPOLearner(
        cluster, grpo_learner.GRPOConfig(num_generations=options.group, beta=0.0), reward_fns=reward
    )
    prompts = np.array(["1 2 3 1 2", "4 5", "6 7 8"])
    learner.train([{"prompts": prompts} for _ in range(options.updates)])
    for step, rollout in enumerate(Watched.history):
        print(f"rollout {step}: " + ", ".join(f"{k} {v:.4g}" for k, v in rollout._asdict().items()), flush=True)
    return list(Watched.history)


if __name__ == "__main__":
    main()
