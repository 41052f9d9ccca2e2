"""Reinforcement learning with `specjax.decode` as the sampler: rollout, advantages and update in one jitted function.

    python examples/grpo_rollout.py --updates 20
    python examples/grpo_rollout.py --target smollm2-135m --prompt "Name a river." --max-new-tokens 32

GRPO (Shao et al.: DeepSeekMath, 2024, arXiv 2402.03300): several samples per prompt, rewards normalised within each
group, a clipped policy gradient; here without a reference model. Speculation keeps the distribution of the samples, so
the policy that is updated is the one that sampled, and `logprobs=True` gives the probabilities that its ratio needs.
The drafter has no weights, so it cannot fall behind the policy. The reward is a toy, the share of even token ids; the
default policy is a tiny random Llama, which learns it within seconds.
"""

from __future__ import annotations

import argparse
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

import specjax
from specjax.models import LlamaConfig, init_params, make_model
from specjax.types import Array, Model, PyTree, Target

TINY = LlamaConfig(
    vocab_size=64, width=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_width=64, max_positions=512
)
CLIP = 0.2


class Metrics(NamedTuple):
    """Metrics of one update."""

    reward: Array  # mean over the samples
    loss: Array
    logprob_gap: Array  # largest difference between the sampler's log-probabilities and the re-scored ones
    gradient_norm: Array
    tokens_per_pass: Array  # of the target, in the rollout


def reward_of(tokens: Array, alive: Array) -> Array:
    """float32[B]: the share of even ids among the sampled tokens int32[B, T]."""
    return jnp.sum((tokens % 2 == 0) & alive, 1) / jnp.maximum(jnp.sum(alive, 1), 1)


def advantages_of(rewards: Array, group: int) -> Array:
    """float32[B]: rewards normalised within each group of samples of one prompt."""
    grouped = rewards.reshape(-1, group)
    centred = grouped - grouped.mean(1, keepdims=True)
    return (centred / (grouped.std(1, keepdims=True) + 1e-4)).reshape(-1)


def rescore(model: Model, params: PyTree, prompts: Array, lengths: Array, tokens: Array) -> Array:
    """float32[B, T]: log p of tokens int32[B, T] behind the prompts int32[B, P]; differentiable in `params`."""
    rows, places = jnp.arange(len(prompts))[:, None], jnp.arange(tokens.shape[1])
    text = jnp.pad(prompts, ((0, 0), (0, tokens.shape[1])))
    text = text.at[rows, lengths[:, None] + places].set(jnp.maximum(tokens, 0))
    batch, size = text.shape
    output, _ = model.forward(
        params, text, model.init_cache(params, None, batch, 1),
        positions=jnp.broadcast_to(jnp.arange(size), (batch, size)),
        mask=jnp.broadcast_to(jnp.tril(jnp.ones((size, size), bool)), (batch, size, size)),
    )  # fmt: skip
    logits = output.logits[rows, lengths[:, None] - 1 + places]  # [B, T, V]
    return jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(tokens, 0)[:, :, None], 2)[:, :, 0]


@functools.partial(jax.jit, static_argnames=("optimizer", "group", "max_new_tokens"))
def update(policy, drafter, state, prompts, lengths, key, eos, *, optimizer, group: int, max_new_tokens: int):
    """Sample `group` texts per prompt and take one step. Returns: the policy, the optimizer's state, Metrics."""
    prompts, lengths = jnp.repeat(prompts, group, 0), jnp.repeat(lengths, group)
    rollout = specjax.decode(
        policy, drafter, (prompts, lengths), key=key, max_new_tokens=max_new_tokens, temperature=1.0, eos=eos,
        logprobs=True,
    )  # fmt: skip
    alive = jnp.arange(max_new_tokens) < rollout.lengths[:, None]
    rewards = reward_of(rollout.tokens, alive)
    advantages = advantages_of(rewards, group)[:, None]

    def loss(params):
        log_p = rescore(policy.model, params, prompts, lengths, rollout.tokens)
        ratio = jnp.exp(jnp.where(alive, log_p - rollout.logprobs, 0.0))
        objective = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantages)
        gap = jnp.max(jnp.where(alive, jnp.abs(log_p - rollout.logprobs), 0.0))
        return -jnp.sum(jnp.where(alive, objective, 0.0)) / jnp.sum(alive), gap

    (value, gap), gradients = jax.value_and_grad(loss, has_aux=True)(policy.params)
    changes, state = optimizer.update(gradients, state, policy.params)
    policy = Target(policy.model, optax.apply_updates(policy.params, changes))
    metrics = Metrics(rewards.mean(), value, gap, optax.global_norm(gradients), rollout.block_efficiency.mean())
    return policy, state, metrics


def main(arguments: list[str] | None = None) -> list[Metrics]:
    parser = argparse.ArgumentParser(description="A GRPO-style rollout and update.")
    parser.add_argument("--target", help="a model as for specjax.load; default: a tiny random one")
    parser.add_argument("--prompt", action="append", help="for --target; may be repeated")
    parser.add_argument("--group", type=int, default=8, help="samples per prompt")
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, help="default: 0.003, with --target 1e-5")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.target:
        policy, tokenizer = specjax.load(options.target)
        prompts = [tokenizer.chat(text) for text in options.prompt or ["Name a river.", "Count to five."]]
        eos = tokenizer.eos
    else:
        policy = Target(make_model(TINY), init_params(TINY, jax.random.key(options.seed)))
        prompts, eos = [[1, 2, 3, 1, 2], [4, 5], [6, 7, 8]], ()
    width = max(map(len, prompts))
    padded = jnp.array([row + [0] * (width - len(row)) for row in prompts])
    lengths = jnp.array([len(row) for row in prompts])
    optimizer = optax.adam(options.learning_rate or (1e-5 if options.target else 3e-3))
    state, history = optimizer.init(policy.params), []
    for step in range(options.updates):
        policy, state, metrics = update(
            policy, specjax.drafters.prompt_lookup(3), state, padded, lengths,
            jax.random.fold_in(jax.random.key(options.seed), step), jnp.asarray(eos, jnp.int32),
            optimizer=optimizer, group=options.group, max_new_tokens=options.max_new_tokens,
        )  # fmt: skip
        history.append(Metrics(*map(float, metrics)))
        print(f"update {step}: " + ", ".join(f"{k} {v:.4g}" for k, v in history[-1]._asdict().items()), flush=True)
    return history


if __name__ == "__main__":
    main()
