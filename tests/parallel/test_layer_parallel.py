"""A layer-parallel model gives the logits of a whole one, each device keeps its own layers, and fewer sums are made."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import tiny_llama

import specjax
from specjax import UsageError, trees
from specjax.drafters import autoregressive, easyspec, two_model
from specjax.models import Gemma3Config, LlamaConfig, init_params, make_model
from specjax.parallel import layer_parallel

SHAPE = {
    "vocab_size": 64,
    "width": 32,
    "num_layers": 7,  # five in the middle: a group and a smaller one, of 2 or of 4
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "mlp_width": 64,
}
LLAMA = LlamaConfig(**SHAPE, tied=False, qkv_bias=True)
GEMMA = Gemma3Config(**SHAPE, is_global=(False, True, False, False, True, False, True), window=3)
INT8 = dataclasses.replace(LLAMA, cache_dtype="int8", stacked=True)
PROMPTS = [[1, 2, 3, 1, 2], [4, 5], [6, 7, 8, 9, 6, 7], [3]]


def whole(config):
    return specjax.Target(make_model(config), init_params(config, jax.random.key(1)))


@jax.jit
def three_passes(target, group: int = jnp.int32(0)):
    raise NotImplementedError


def passes(group):
    """(target) -> logits, and what is committed, of three passes: a prompt, drafts, drafts that see those."""

    @jax.jit
    def run(target):
        model, rows = target.model, 4
        tokens = jax.random.randint(jax.random.key(0), (rows, 9), 0, 64)
        span = lambda a, b: jnp.broadcast_to(jnp.arange(a, b), (rows, b - a))
        causal = lambda new, seen: jnp.broadcast_to(jnp.tril(jnp.ones((new, seen), bool), seen - new), (rows, new, seen))
        feed = lambda a, b, cache, group=group, **options: model.forward(
            target.params, tokens[:, a:b], cache, positions=span(a, b), mask=causal(b - a, b - min(a, 4)) if a else
            causal(b, b), group=group, **options,
        )  # fmt: skip
        prompt, pending = feed(0, 5, model.init_cache(rows, 128), group=1)
        cache = model.commit(model.init_cache(rows, 128), pending, span(0, 5), jnp.full(rows, 4))
        first, pending = feed(4, 6, cache)
        second, _ = feed(6, 9, cache, earlier=pending, taps=(0, 3, 7))
        return prompt.logits, first.logits, second
    return run
