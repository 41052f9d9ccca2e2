"""Small helpers for tests of texts that several models write."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode
from specjax.collaborate import multi_writer as texts
from specjax.collaborate import segments
from specjax.collaborate.prepare import prepare_texts
from specjax.types import Model, Output, Target

VOCAB, STATES = 16, 61


class Tokens(NamedTuple):
    """A cache that holds the tokens themselves."""

    tokens: jax.Array  # int32[B, S]
    length: jax.Array  # int32[B]


@functools.cache
def history_model(vocab: int = VOCAB) -> Model:
    """A model that depends on every token before, where it stands, and on nothing else: params float32[STATES, V].

    Its logits are rows of a table, equal in any width of pass, and a token that a cache lacks, or has too much, changes
    them. It compiles in no time.
    """

    def code(tokens, positions):
        return (tokens + 1) * (positions % 7 + 1) * 5 % STATES

    def forward(params, tokens, cache, *, positions, mask, taps=(), earlier=None):
        slots = jnp.arange(cache.tokens.shape[1])
        history = jnp.sum(jnp.where(slots < cache.length[:, None], code(cache.tokens, slots), 0), 1)
        new = code(tokens, positions)
        among = new if earlier is None else jnp.concatenate([code(*earlier), new], 1)
        state = (history[:, None] + jnp.sum(jnp.where(mask, among[:, None], 0), 2)) % STATES
        logits = params[state]
        return Output(logits, logits), (tokens, positions)

    def commit(cache, pending, path, num_nodes):
        offset = jnp.arange(path.shape[1])
        place = jnp.where(offset < num_nodes[:, None], cache.length[:, None] + offset, cache.tokens.shape[1])
        accepted = jnp.take_along_axis(pending[0], jnp.maximum(path, 0), 1)
        tokens = cache.tokens.at[jnp.arange(len(place))[:, None], place].set(accepted, mode="drop")
        return Tokens(tokens, cache.length + num_nodes)

    return Model(
        init_cache=lambda params, inputs, batch, capacity: Tokens(
            jnp.zeros((batch, capacity), jnp.int32), jnp.zeros((batch,), jnp.int32)
        ),
        forward=forward,
        commit=commit,
        rewind=lambda cache, length: cache._replace(length=jnp.minimum(cache.length, length)),
        vocab_size=vocab,
        max_positions=1 << 20,
        name="history",
    )


@functools.cache
def history(seed: int = 0, vocab: int = VOCAB) -> Target:
    """Random logits, each seed another model."""
    table = np.random.default_rng(seed).normal(size=(STATES, vocab)) * 2
    return Target(history_model(vocab), jnp.asarray(table, jnp.float32))


@functools.cache
def alike(seed: int = 0, noise: float = 0.7) -> Target:
    """A draft model of `history` that errs now and then."""
    target = history(seed)
    more = np.random.default_rng(99).normal(size=target.params.shape) * noise
    return Target(target.model, target.params + jnp.asarray(more, jnp.float32))


PROMPTS = [[1, 2, 3, 1, 2], [4, 5], [6, 7, 8, 9, 6, 7]]
KEYS = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), np.arange(3))


def plain(target, drafter="autoregressive", prompts=PROMPTS, key=KEYS, max_new_tokens=12, **settings):
    """Return what one model writes alone."""
    return decode(target, drafter, prompts, key=key, max_new_tokens=max_new_tokens, **settings).to_lists()


def keys_of(writer: int, key=KEYS, writers: int = 2):
    """The keys [B] of a writer among several."""
    return texts.writer_keys(key, writers)[:, writer]


def job_of(models, drafters=(), prompts=PROMPTS, key=KEYS, max_new_tokens=12, **options):
    return prepare_texts(models, prompts, key=key, max_new_tokens=max_new_tokens, drafters=drafters, **options)


def new_tokens(text):
    """Per row what was written behind the prompt."""
    rows = zip(np.asarray(text.tokens), np.asarray(text.prompt), np.asarray(text.length), strict=True)
    return [row[start:end].tolist() for row, start, end in rows]


# Programs that tests share: of a turn, with how many tokens and whose rows it is as data.


@jax.jit
def begin(job):
    return job.begin()


def turn(writers, text, who, *, limit=1 << 20, active=None, segmenter=None):
    """The text and what was written, after one turn of a writer."""
    batch = len(text.length)
    limit = np.broadcast_to(np.int32(limit), (batch,))
    active = np.ones((batch,), bool) if active is None else np.array(active, bool)
    return _turn(writers, text, limit, active, segmenter, who=who)


@functools.partial(jax.jit, static_argnames=("who",))
def _turn(writers, text, limit, active, segmenter, *, who):
    return texts.extend(writers, text, who, limit=limit, active=active, segmenter=segmenter)


rewind = jax.jit(texts.rewind)


# What the models of `history` write, in numpy.


def table_logits(target, tokens):
    """float32[V]: what it says after tokens."""
    ids, place = np.array(tokens), np.arange(len(tokens))
    return np.asarray(target.params)[((ids + 1) * (place % 7 + 1) * 5 % STATES).sum() % STATES]


def greedy(target, tokens, count, ends=()):
    """Return the model's next tokens, until one of `ends`."""
    new = []
    while len(new) < count and not (new and new[-1] in ends):
        new.append(int(table_logits(target, [*tokens, *new]).argmax()))
    return new


# Every method, with models of `history` and settings that make it do what it is for.

ENDS = (3, 5, 9)
DIGITS = tuple(range(10))
JUDGING = (1, 2)
HEAD = np.where(np.arange(VOCAB) < 8, 1, -1).astype(np.float32)


def calls():
    """Name to (function, arguments), all but prompts, key and max_new_tokens."""
    from specjax.collaborate import methods, reward_of

    small, large, ends = history(0), history(1), segments.after_any(ENDS, VOCAB)
    pair = (small, large)
    return {
        "spec_reason": (
            methods.spec_reason, pair, {"segmenter": ends, "judging": JUDGING, "digits": DIGITS, "threshold": 5.0}
        ),
        "entropy_adaptive": (methods.entropy_adaptive, pair, {"tau": 2.2, "window": 2, "min_tokens": 2}),
        "fs_gen": (methods.fs_gen, pair, {"temperature": 0.8}),
        "speculative_thinking": (
            methods.speculative_thinking, pair,
            {"segmenter": ends, "negative": [[4], [7, 11]], "positive": [[6]], "verify": [[15]], "check": [8, 8],
                "look_ahead": 3, "long": 4, "patience": 2},
        ),
        "first_finish": (methods.first_finish, (large,), {"samples": 3, "eos": 5}),
        "cntp": (methods.cntp, (large,), {"punctuation": ends, "n_max": 4, "max_trial_tokens": 5}),
        "power_smc": (methods.power_smc, (large,), {"particles": 4, "block": 4, "alpha": 2.0, "ramp": 5, "eos": 5}),
        "reward_smc": (methods.reward_smc, (large,), {"reward": likes_fours, "particles": 4, "block": 4, "eos": 5}),
        "a_star": (
            methods.a_star, (large,),
            {"segmenter": ends, "reward": likes_odds, "k": 3, "frontier": 4, "expected": 3.0, "budget": 6,
                "max_step_tokens": 5, "temperature": 0.8},
        ),
        "anchored": (methods.anchored, pair, {"budget": 0.3}),
        "momentum": (methods.momentum, (large,), {}),
        "arbitrage": (
            methods.arbitrage, pair, {"segmenter": ends, "router": reward_of(history(2), (HEAD, 0.0))}
        ),
        "rpc": (methods.rpc, (large,), {"samples": 4, "eos": 5, "answer": last_of}),
        "foreal": (methods.foreal, pair, {"segmenter": ends, "lead": 2, "p": 0.6, "temperature": 0.8}),
    }  # fmt: skip


def likes_fours(tokens, start, length, ended):
    """A reward: 0.5, and 1 more for each token 4 of the block."""
    place = jnp.arange(tokens.shape[1])
    inside = (place >= start[:, None]) & (place < length[:, None])
    return 0.5 + jnp.sum(inside & (tokens == 4), 1)


def likes_odds(tokens, start, length, ended):
    """A reward of a step by its last token, from 0.2 to 0.95; odd ones have more."""
    last = jnp.take_along_axis(tokens, length[:, None] - 1, 1)[:, 0]
    return 0.2 + 0.5 * (last % 2) + 0.25 * last / VOCAB


def last_of(tokens):
    """An answer."""
    return tokens[-1] % 4


def run(name, prompts=PROMPTS, key=KEYS, max_new_tokens=12, **options):
    """The result of a method."""
    method, models, settings = calls()[name]
    return method(*models, prompts, key=key, max_new_tokens=max_new_tokens, **(settings | options))
