"""Tiny models for loops of their own, with distributions that are known."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp

from specjax.decoders import AnySubsetModel, ContinuousModel


def exact(joint) -> AnySubsetModel:
    """The model whose predictions are the conditionals of `joint` [V, ..., V], one axis per position."""
    joint = jnp.asarray(joint, jnp.float32)
    vocab, size = joint.shape[0], joint.ndim
    return AnySubsetModel(_exact(vocab, size), vocab, params=joint.ravel())


@functools.cache
def _exact(vocab, size):
    texts = jnp.array(list(itertools.product(range(vocab), repeat=size)))  # [C, S]

    def apply(params, tokens, content, positions, query):
        agrees = jnp.all(~query[:, :, None, :] | (texts == tokens[:, None, None, :]), -1)  # [B, Q, C]
        one_hot = jax.nn.one_hot(jnp.moveaxis(texts[:, positions], 0, -1), vocab)  # [B, Q, C, V]
        return jnp.log(jnp.einsum("bqc,bqcv,c->bqv", agrees, one_hot, params))

    return apply


def previous_token(params, condition, tokens, positions):
    """float32[B, Q, d]: `params["link"]` times the token before, 0 at the start."""
    previous = jnp.take_along_axis(tokens, jnp.maximum(positions - 1, 0)[:, :, None], 1)
    return params["link"] * jnp.where(positions[:, :, None] > 0, previous, 0.0)


def linear_mean(params, t, x, z):
    return params["mean"][t - 1] + params["slope"][t - 1] * x + z


def linear_std(params, t, z):
    return params["std"][t - 1]


def linear(slope, std, mean=0.0, link=0.0, dim=1) -> ContinuousModel:
    """x_{t-1} = mean_t + slope_t x_t + z + std_t eps; entry 0 of each is the last step, t = 1."""
    as_row = lambda x: jnp.broadcast_to(jnp.asarray(x, jnp.float32), (len(slope),))
    params = {"slope": as_row(slope), "std": as_row(std), "mean": as_row(mean), "link": jnp.float32(link)}
    return ContinuousModel(previous_token, linear_mean, linear_std, dim, len(slope), params)
