"""A tiny model and methods of adaptive depth that skip something of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from toy import tiny_llama

from specjax import adaptive, decode
from specjax.drafters import autoregressive

LAYERS, WIDTH = 8, 32
PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6]]
NEW = 20


@functools.cache
def target(stacked: bool = True):
    """Stacked, so that a program has one layer; the layers apart give the same text, as a test says."""
    return tiny_llama(layers=LAYERS, stacked=stacked)


def some(kind, seed: int):
    return kind(jax.random.normal(jax.random.key(seed), (LAYERS, WIDTH)), jnp.full((LAYERS,), -0.3))


@functools.cache
def depth(name: str):
    """Return a policy that leaves out some of the layers, not all."""
    return {
        "calm": lambda: adaptive.calm(0.3, every=2, horizon=NEW),
        "saturation": lambda: adaptive.calm(0.93, confidence="saturation", every=1),
        "skip_decode": lambda: adaptive.skip_decode(1.5, horizon=NEW),
        "ffn_skip": lambda: adaptive.ffn_skip(0.8, warm_up=2),
        "dynamax": lambda: adaptive.dynamax(some(adaptive.Probes, 3), 0.6, every=2),
        "first": lambda: adaptive.first(some(adaptive.Routers, 4)),
        "unified": lambda: adaptive.unified(2.0),
    }[name]()


def never(name: str):
    """The same method, set so that every token runs everything."""
    return {
        "calm": lambda: adaptive.calm(1.01, every=2),
        "saturation": lambda: adaptive.calm(1.01, confidence="saturation", every=1),
        "skip_decode": lambda: adaptive.skip_decode(1.0),
        "ffn_skip": lambda: adaptive.ffn_skip(1.01, warm_up=2),
        "dynamax": lambda: adaptive.dynamax(some(adaptive.Probes, 3), 1.01, every=2),
        "first": lambda: adaptive.first(some(adaptive.Routers, 4)._replace(bias=jnp.full((LAYERS,), 1e4))),
        "unified": lambda: adaptive.unified(1.0),
    }[name]()


def texts(model, drafter=None, prompts=PROMPTS, **options):
    """Return what is decoded behind the prompts."""
    options = {"key": jax.random.key(0), "max_new_tokens": NEW} | options
    return decode(model, drafter or autoregressive(), prompts, **options).to_lists()


def read_again(model, answers, prompts=PROMPTS):
    """`adaptive.read` of prompts and answers, and which entries count."""
    full_texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    tokens = np.zeros((len(full_texts), max(map(len, full_texts))), np.int32)
    for row, text in zip(tokens, full_texts, strict=True):
        row[: len(text)] = text
    counts = np.arange(tokens.shape[1]) < np.array([[len(answer)] for answer in answers])
    return adaptive.read(model, tokens, np.array([len(prompt) for prompt in prompts])), counts


@functools.cache
def lesson():
    """Prompts with what the target writes behind them, int32[B, T], and the lengths."""
    rows = [prompt + answer for prompt, answer in zip(PROMPTS, texts(target()), strict=True)]
    size = max(map(len, rows))
    return jnp.asarray([row + [0] * (size - len(row)) for row in rows]), jnp.asarray([len(row) for row in rows])
