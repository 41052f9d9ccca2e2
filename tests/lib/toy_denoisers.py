"""Denoisers small enough to count by hand, and tiny transformers read as denoisers."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import toy

from specjax.diffusion import Denoiser
from specjax.types import Model, Output

MASK = 63
"""Of the tiny transformers, whose vocabulary is 64."""


@functools.cache
def _by_hand(kind: str, vocab: int) -> Model:
    """`logits(params, tokens[B, N], positions[B, N], mask[B, N, N])` of whole canvases are the hidden states."""
    logits_fn = _LOGITS[kind]

    def forward(params, tokens, cache, *, positions, mask, taps=(), earlier=None):
        hidden = logits_fn(params, tokens, positions, mask)
        return Output(hidden, hidden), jnp.zeros((*tokens.shape, 0))

    return Model(
        init_cache=lambda params, inputs, batch, capacity: jnp.zeros((batch, 0)),
        forward=forward,
        commit=lambda cache, pending, path, num_nodes: cache,
        vocab_size=vocab,
        max_positions=1 << 20,
        name=kind,
        unembed=lambda params, hidden: hidden,
    )


def _of_confidence(best, sure, vocab: int):
    """Logits [..., V] whose softmax has `sure` at token `best` and the rest spread over the others."""
    log_others = jnp.log((1 - sure) / (vocab - 2))  # the last token is the mask, which no column becomes
    ids = jnp.arange(vocab)
    logits = jnp.where(ids == best[..., None], jnp.log(sure)[..., None], log_others[..., None])
    return jnp.where(ids == vocab - 1, -1e9, logits)


def _frozen(params, tokens, positions, mask):
    best, sure = params
    place = jnp.minimum(positions, len(best) - 1)
    return _of_confidence(best[place], sure[place], _VOCAB)


def _ladder(params, tokens, positions, mask):
    """Surer of a column when the one before it is decided."""
    (best,) = params
    previous = jnp.concatenate([jnp.zeros_like(tokens[:, :1]), tokens[:, :-1]], 1)
    place = jnp.minimum(positions, len(best) - 1)
    return _of_confidence(best[place], jnp.where(previous == _VOCAB - 1, 0.5, 0.95), _VOCAB)


def _coupled(params, tokens, positions, mask):
    """Pairs of columns (0, 1), (2, 3) ... behind the prompt of one token: uniform over (a, b) and (b, a)."""
    other = jnp.where((positions - 1) % 2 == 0, jnp.roll(tokens, -1, 1), jnp.roll(tokens, 1, 1))
    is_known = other != _VOCAB - 1
    ids = jnp.arange(_VOCAB)
    either = jnp.where((ids == 0) | (ids == 1), 0.0, -1e9)
    fixed = jnp.where(ids == (1 - other)[..., None], 0.0, -1e9)
    return jnp.where(is_known[..., None], fixed, either)


def _cascade(params, tokens, positions, mask):
    """Column 1 is token 0 or 1; the others are sure once it is `params`, and its row alone says nothing of that."""
    is_known = jnp.take_along_axis(tokens, jnp.argmax(positions == 1, 1)[:, None], 1) == params
    dependents = _of_confidence(positions % (_VOCAB - 1), jnp.where(is_known, 0.99, 0.5), _VOCAB)
    ids = jnp.arange(_VOCAB)
    first = jnp.log(jnp.where(ids == 0, 0.48, jnp.where(ids == 1, 0.44, 0.08 / (_VOCAB - 3))))
    first = jnp.where(ids == _VOCAB - 1, -1e9, first)
    return jnp.where((positions == 1)[..., None], first, dependents)


_VOCAB = 12
_LOGITS = {"cascade": _cascade, "frozen": _frozen, "ladder": _ladder, "coupled": _coupled}


def frozen(sure, best=None) -> Denoiser:
    """The logits of column i do not depend on the canvas: token `best[i]` with probability `sure[i]`."""
    sure = jnp.asarray(sure, jnp.float32)
    best = np.arange(len(sure)) % (_VOCAB - 1) if best is None else best
    return Denoiser(_by_hand("frozen", _VOCAB), (jnp.asarray(best, jnp.int32), sure), _VOCAB - 1)


def ladder(size: int = 64) -> Denoiser:
    """Confidence .95 where the column before is decided, else .5."""
    return Denoiser(_by_hand("ladder", _VOCAB), (jnp.arange(size) % (_VOCAB - 1),), _VOCAB - 1)


def cascade(key: int) -> Denoiser:
    """Column 1 has token 0 with .48 and 1 with .44; the others have .99 once it is `key`, .5 before."""
    return Denoiser(_by_hand("cascade", _VOCAB), jnp.int32(key), _VOCAB - 1)


def coupled() -> Denoiser:
    """Two columns that must differ, each of them uniform by itself."""
    return Denoiser(_by_hand("coupled", _VOCAB), (), _VOCAB - 1)


@functools.cache
def full(alignment="same", layers: int = 2) -> Denoiser:
    """A random transformer with full attention; with one layer every memory is exact that computes what changed."""
    target = toy.tiny_llama(layers=layers)
    return Denoiser(target.model, target.params, MASK, alignment=alignment)


@functools.cache
def causal(block: int = 4, seeding="all_masked") -> Denoiser:
    """A random block-causal transformer."""
    target = toy.tiny_llama()
    alignment = "shifted" if seeding == "seed_and_mask" else "same"
    return Denoiser(target.model, target.params, MASK, "block_causal", block, alignment, seeding)


SMALL = {
    "deer": {"num_tokens": 5},
    "diffuspec": {"num_tokens": 6, "min_tokens": 3, "grow": 2, "choices": 4, "eos": (27,)},
    "failfast": {"num_tokens": 6, "chunk": 3, "tau": 0.02},
}
"""The options of drafters with a denoiser for tiny models."""


def keys_of(seed: int, rows: int) -> jax.Array:
    """The keys of the rows of a batch."""
    return jax.vmap(lambda row: jax.random.fold_in(jax.random.key(seed), row))(jnp.arange(rows))
