"""The rollout engine of Tunix (github.com/google/tunix), with drafts.

    ClusterConfig(rollout_engine=SpecJaxRollout)
    ClusterConfig(rollout_engine=functools.partial(SpecJaxRollout, drafter="suffix"))

It reads the module of the trainer at each call, so no weight is copied. It needs google-tunix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from tunix.rl import common
from tunix.rl.rollout import base_rollout

from specjax.models.custom import as_target
from specjax.models.heads.contract import DraftHead
from specjax.rollouts.sampler import Form, RolloutSampler, SamplingCost, padded_left
from specjax.rollouts.store import RolloutStore
from specjax.types import Drafter, PyTree, Target


class SpecJaxRollout(base_rollout.BaseRollout):
    """Samples of the module that Tunix trains.

    Guarantee: samples have exactly the distribution of the policy with the temperature, top-k and top-p of the
    configuration. Their log-probabilities are those of the trainer: after the temperature, before top-k and top-p.
    """

    def __init__(
        self,
        rollout_actor: nnx.Module,
        tokenizer: Any,
        mesh: jax.sharding.Mesh | None = None,
        rollout_config: Any = None,
        *,
        drafter: Drafter | DraftHead | str | None = "auto",
        logprobs: Form = "tempered",
        cache: Callable[[int, int], PyTree] | None = None,
        report: Callable[[SamplingCost], Any] | None = None,
        store: RolloutStore | None = None,
        rescore: bool = False,
    ):
        """Build the engine; Tunix passes the first four arguments.

        Args:
          drafter, logprobs, store, rescore: as in `RolloutSampler`.
          cache: function of (batch, slots) that returns an empty cache of the module. Default: its `init_cache`.
          report: function that receives the cost of each call.
        """
        self._model, self._tokenizer, self._report = rollout_actor, tokenizer, report
        module: Any = rollout_actor
        self._slots = cache or (lambda batch, count: module.init_cache(batch, count, _dtype(module)))
        self._drafter, self._logprobs, self._store = drafter, logprobs, store
        self._rescore = rescore
        self._sampler: RolloutSampler | None = None
        self._target: Target | None = None

    def generate(self, prompts: list[str], rollout_config: Any, **_: Any) -> base_rollout.RolloutOutput:
        """Return one sample per prompt. Longer prompts lose their beginning, as in Tunix's own engine."""
        config = rollout_config
        if self._sampler is None or self._target is None:
            form = self._logprobs if config.return_logprobs else None
            self._sampler = RolloutSampler(
                self._drafter, max_prompt_length=config.max_prompt_length, logprobs=form, store=self._store,
                rescore=self._rescore,
            )  # fmt: skip
            self._target = as_target(self._model, max_positions=config.kv_cache_size, cache=self._slots, name="policy")
        ids = [self._tokens(text)[-config.max_prompt_length :] for text in prompts]
        policy = Target(self._target.model, nnx.to_pure_dict(nnx.state(self._model)))
        top_k = config.top_k if config.top_k is not None and config.top_k > 0 else None
        samples = self._sampler.sample(
            policy, ids, key=0 if config.seed is None else config.seed, max_new_tokens=config.max_tokens_to_generate,
            temperature=config.temperature, top_p=config.top_p, top_k=top_k,
            eos=config.eos_tokens or [self.eos_id()],
        )  # fmt: skip
        if self._report is not None:
            self._report(samples.report)
        ends = set(config.eos_tokens or [self.eos_id()])
        texts = [self._tokenizer.decode(row[:-1] if len(row) and row[-1] in ends else row) for row in samples.tokens]
        left_padded = padded_left(ids, config.max_prompt_length, self.pad_id())
        return base_rollout.RolloutOutput(texts, None, samples.tokens, left_padded, samples.logprobs)

    def get_per_token_logps(self, prompt_tokens: jax.Array, completion_tokens: jax.Array, **options: Any) -> jax.Array:
        """Return log p float32[B, T] of the completions by one pass of the module."""
        definition, state = nnx.split(self._model)
        return common.compute_per_token_logps(
            definition, state, prompt_tokens, completion_tokens, self.pad_id(), self.eos_id(), **options
        )

    def update_params(self, params: PyTree, filter_types: Any = None) -> None:
        """Write the weights of a trainer whose module is another one. The same module is read as it stands."""
        nnx.update(self._model, params)

    def pad_id(self) -> int:
        """Return the padding of the tokenizer."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """Return the eos of the tokenizer."""
        return self._tokenizer.eos_id()

    def model(self) -> nnx.Module:
        """Return the policy."""
        return self._model

    def _tokens(self, text: str) -> list[int]:
        """Return the ids of a prompt, with the bos of the tokenizer as Tunix's own engine adds it."""
        ids, bos = list(self._tokenizer.encode(text)), self._tokenizer.bos_id()
        return [bos, *ids] if bos and ids[:1] != [bos] else ids


def _dtype(module: nnx.Module) -> Any:
    return jnp.result_type(*jax.tree.leaves(nnx.state(module, nnx.Param)))
