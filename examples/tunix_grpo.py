"""`specjax.decode` as the sampler of a GRPO run in Tunix: the policy is Tunix's own module, and no weight is copied.

    pip install google-tunix==0.1.7
    python examples/tunix_grpo.py --updates 20

Tunix (github.com/google/tunix) trains; `ClusterConfig(rollout_engine=SpecjaxRollout)` is all that it is told. A rollout
reads the trainer's module as it stands, so there are no weights to send. Speculation keeps the distribution of the
samples, so the policy that is updated is the one that sampled: the largest difference between the log-probabilities of
the sampler and those of Tunix's own pass is printed for each rollout. The reward is a toy, the share of even tokens,
and the policy a tiny random Qwen3, which learns it within a minute on two CPU cores.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.rl import common, rl_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout

import specjax

TINY = qwen3.ModelConfig(
    num_layers=2, vocab_size=64, embed_dim=32, hidden_dim=64, num_heads=4, num_kv_heads=2, head_dim=8, norm_eps=1e-6,
    rope_theta=10_000, dtype=jnp.float32, param_dtype=jnp.float32,
)  # fmt: skip
END = 0  # Tunix takes neither the padding nor what follows the end for a part of the text: here they are one token


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


class SpecjaxRollout(base_rollout.BaseRollout):
    """Tunix's rollout worker: samples from the module that is trained, by `specjax.decode`."""

    history: list[Rollout] = []  # noqa: RUF012 (Tunix makes the worker; this is how its figures get out)

    def __init__(self, rollout_actor: nnx.Module, tokenizer: Any, mesh, rollout_config: base_rollout.RolloutConfig):
        self._model, self._tokenizer, self._calls = rollout_actor, tokenizer, itertools.count()
        slots = lambda batch, count: rollout_actor.init_cache(batch, count, jnp.float32)
        self._target = specjax.as_target(
            rollout_actor, max_positions=rollout_config.kv_cache_size, cache=slots, name="policy"
        )
        self._drafter = specjax.drafters.prompt_lookup(3)  # without weights, so it cannot fall behind the policy

    def generate(self, prompts: list[str], rollout_config, **_) -> base_rollout.RolloutOutput:
        config, ids = rollout_config, [self._tokenizer.encode(text) for text in prompts]
        width = config.max_prompt_length
        tokens = np.array([row[-width:] + [END] * (width - len(row)) for row in ids], np.int32)
        lengths = np.array([min(len(row), width) for row in ids], np.int32)
        key = jax.random.key(next(self._calls)) if config.seed is None else config.seed
        result = specjax.decode(
            specjax.Target(self._target.model, nnx.to_pure_dict(nnx.state(self._model))), self._drafter,
            (jnp.asarray(tokens), jnp.asarray(lengths)), key=key, max_new_tokens=config.max_tokens_to_generate,
            temperature=config.temperature, top_p=config.top_p, top_k=config.top_k, eos=config.eos_tokens or END,
            logprobs=True,
        )  # fmt: skip
        counts, new = np.asarray(result.lengths), np.asarray(result.tokens)
        completions = [row[:n] for row, n in zip(new, counts, strict=True)]
        logprobs = [row[:n] for row, n in zip(np.asarray(result.logprobs), counts, strict=True)]
        left_padded = np.array([[END] * (width - n) + row[:n].tolist() for row, n in zip(tokens, lengths, strict=True)])
        self._note(result, left_padded, new, logprobs)
        texts = [self._tokenizer.decode(row) for row in completions]
        return base_rollout.RolloutOutput(texts, None, completions, left_padded, logprobs)

    def _note(self, result, left_padded, new, logprobs) -> None:
        theirs = np.asarray(self.get_per_token_logps(jnp.asarray(left_padded), jnp.maximum(jnp.asarray(new), END)))
        gaps = [
            np.abs(ours - row[: len(ours)])[tokens[: len(ours)] != END].max(initial=0.0)
            for ours, row, tokens in zip(logprobs, theirs, new, strict=True)
        ]
        reward = np.mean([share_of_even(row[: len(ours)]) for row, ours in zip(new, logprobs, strict=True)])
        self.history.append(Rollout(float(reward), float(max(gaps)), float(np.mean(result.block_efficiency))))

    def get_per_token_logps(self, prompt_tokens, completion_tokens) -> jax.Array:
        return _per_token_logps(*nnx.split(self._model), prompt_tokens, completion_tokens)

    def update_params(self, params, filter_types=None) -> None:
        nnx.update(self._model, params)  # of a trainer with another module; this one's is read as it stands

    def pad_id(self) -> int:
        return END

    def eos_id(self) -> int:
        return END

    def model(self) -> nnx.Module:
        return self._model


def _per_token_logps(definition, state, prompt_tokens, completion_tokens):
    """Tunix's own: one pass of its module over whole texts."""
    return common.compute_per_token_logps(definition, state, prompt_tokens, completion_tokens, END, END)


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
    options = parser.parse_args(arguments)
    policy = qwen3.Qwen3(TINY, rngs=nnx.Rngs(0))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    SpecjaxRollout.history.clear()
    cluster = rl_cluster.RLCluster(
        actor=policy,
        tokenizer=Numbers(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(
                (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT), mesh
            ),
            rollout_engine=SpecjaxRollout,
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adam(options.learning_rate), max_steps=options.updates, eval_every_n_steps=10**6
            ),
            rollout_config=base_rollout.RolloutConfig(
                max_tokens_to_generate=options.max_new_tokens, max_prompt_length=8, temperature=1.0, kv_cache_size=128
            ),
        ),
    )
    learner = grpo_learner.GRPOLearner(
        cluster, grpo_learner.GRPOConfig(num_generations=options.group, beta=0.0), reward_fns=reward
    )
    prompts = np.array(["1 2 3 1 2", "4 5", "6 7 8"])
    learner.train([{"prompts": prompts} for _ in range(options.updates)])
    for step, rollout in enumerate(SpecjaxRollout.history):
        print(f"rollout {step}: " + ", ".join(f"{k} {v:.4g}" for k, v in rollout._asdict().items()), flush=True)
    return SpecjaxRollout.history


if __name__ == "__main__":
    main()
