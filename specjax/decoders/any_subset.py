"""Any-subset speculative decoding: an any-order model fills in missing tokens, and drafts and verifies them itself.

Guo, Ermon: Reviving Any-Subset Autoregressive Models with Principled Parallel Sampling and Speculative Decoding (2025),
arXiv 2504.20456.

Rule: order the tokens, first the given ones, then the missing ones by position. Let n tokens be known.
  1. One call draws the next k tokens in parallel and independently, x_j ~ q_j = p(x_j | known).
  2. One call with the drafts filled in returns p_j = p(x_j | known, x_<j).
  3. Accept x_j with probability min(1, p_j(x_j) / q_j(x_j)) up to the first rejection. Redraw the rejected token from
     norm([p_j - q_j]+).
Because p_1 = q_1, the first token is always accepted, and the second one is accepted or redrawn. So the number of calls
never exceeds the number of tokens. A single draft needs no second call. The rule has no bonus token.
Guarantee: distribution, which is the model's joint distribution of the missing tokens in this order.
Deviations: the first draft is accepted without a test, because two calls may round differently. With k = 1 the second
call is skipped, so a token costs one call. Temperature, top-k and top-p apply to both p and q, and the mask token has
no mass in either. Drafts from a table of bigrams and slack in the ratio are not implemented. Each call reads the
complete sequence, without a cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays.indexing import take_along
from specjax.arrays.modes import with_standard_modes
from specjax.catalog import Method, Option
from specjax.decoders.loop_setup import check_rows
from specjax.engine.packing import check_new_tokens, check_prompts, to_rows
from specjax.engine.prepare import Settings, find_usable
from specjax.engine.results import DecodeResult, add_round, zero_stats
from specjax.engine.value_checks import are_sound
from specjax.errors import UsageError
from specjax.models.any_order import XLNetConfig, forward, load_xlnet
from specjax.models.loading.tokenizers.tokenizer import Tokenizer
from specjax.numerics.sampling import DRAFT, VERIFY, draw, fold_in, row_keys, uniform, warp
from specjax.numerics.validation import MAX_NODES, check_integer, pad_rows
from specjax.trees.operations import chain
from specjax.types import Array, PyTree, Stats
from specjax.verifiers.exact.standard import core as verify_chain

METHOD = Method(
    name="any_subset",
    kind="decoder",
    guarantee="distribution",
    summary="fills in missing tokens with an any-order model, which drafts and verifies its own tokens",
    paper="Guo, Ermon 2025, arXiv 2504.20456",
    needs=frozenset({"any_order"}),
    arguments=("target",),
    settings=("key", "temperature", "top_k", "top_p"),
    options=(Option("window", "int", 5, "drafted tokens per step"),),
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AnySubsetModel:
    """A two-stream model that can predict any token from any others, with its parameters as the only leaves.

    `apply(params, tokens int32[B, S], content bool[B, S, S], positions int32[B, Q], query bool[B, Q, S]) -> logits
    float32[B, Q, V]` returns the distributions of the tokens at `positions`. A query stream has the position
    `positions[b, i]`, but not its token. It attends to the tokens j with `query[b, i, j]`, possibly none, in the
    content stream. In the content stream, token j attends to the tokens l with `content[b, j, l]`, itself included.
    """

    apply: Callable[..., Array] = field(metadata={"static": True})
    vocab_size: int = field(metadata={"static": True})
    mask_token: int | None = field(metadata={"static": True}, default=None)  # id of missing tokens
    params: PyTree = ()
    name: str = field(metadata={"static": True}, default="any-order model")
    max_positions: int = field(metadata={"static": True}, default=(1 << 31) - 1)

    @property
    def config(self) -> None:
        """Return None, since the model has no `LlamaConfig`."""

    @property
    def model(self) -> AnySubsetModel:
        """Return the object itself, whose facts have the names of those in `Target.model`."""
        return self


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class AnySubsetResult(DecodeResult):
    """Result of `any_subset`.

    `tokens` int32[B, S] are the missing tokens by position. `stats.target_passes` counts the calls of the model that a
    row needed. In `stats`, a depth is a position in the draft.
    """

    filled: Array  # int32[B, S], the complete sequences


class TokenOrder(NamedTuple):
    """The order in which tokens are decoded."""

    position: Array  # int32[B, S], position of the token of each rank
    rank: Array  # int32[B, S], rank of the token at each position
    num_given: Array  # int32[B], number of given tokens
    stop: Array  # int32[B], number of tokens of the complete sequence; later ranks are padding


@with_standard_modes
def any_subset(
    model: AnySubsetModel,
    tokens: Array,
    missing: Array,
    *,
    key: Array | int,
    lengths: Array | None = None,
    window: int = 5,
    temperature: float | Array = 1.0,
    top_k: int | Array | None = None,
    top_p: float | Array | None = None,
) -> AnySubsetResult:
    """Fill in the missing tokens in one compiled loop, in which each row proceeds at its own speed.

    Args:
      tokens: int32[B, S]. missing: bool[B, S], the positions to fill; their values in `tokens` are ignored.
      key: one PRNG key or seed, and row b uses `fold_in(key, b)`; or one key per row [B].
      lengths: int32[B], number of valid positions per row; default: all.
      window: number of drafted tokens per step, k in the rule.
      temperature, top_k, top_p: see `specjax.decode`; a Python 0 compiles the greedy program.

    Raises: UsageError for a setting out of range, shapes that do not match, given ids outside of the vocabulary, or a
      model that returns NaN or Inf.
    """
    # Ids are checked before JAX converts them to 32 bits.
    module = jnp if any(isinstance(x, jax.core.Tracer) for x in (tokens, missing)) else np
    tokens, missing = module.asarray(tokens), module.asarray(missing, bool)
    if tokens.ndim != 2 or missing.shape != tokens.shape:
        raise UsageError(f"tokens and missing must both be [B, S], not {tokens.shape} and {missing.shape}")
    batch, size = tokens.shape
    settings = check_options(window=window, temperature=temperature, top_k=top_k, top_p=top_p)
    settings.check_batch(batch)
    prompts = module.where(missing, 0, tokens), jnp.full((batch,), size) if lengths is None else jnp.asarray(lengths)
    if prompts[1].shape != (batch,):
        raise UsageError(f"lengths must have one number per row, {batch}, not the shape {prompts[1].shape}")
    check_prompts(*prompts, 0, size, model.vocab_size)
    usable = find_usable(settings, prompts, batch, 0, size, model.vocab_size)
    usable = jnp.ones((batch,), bool) if usable is None else usable
    tokens = jnp.clip(prompts[0], 0, model.vocab_size - 1).astype(jnp.int32)
    lengths = jnp.clip(prompts[1], 1, size).astype(jnp.int32)
    sampling, keys = settings.to_sampling(), row_keys(key, batch)
    return check_rows(_fill(model, tokens, missing, lengths, usable, keys, sampling, window=window), model)


def check_options(
    *, window: int, temperature: float | Array = 1.0, top_k: int | Array | None = None,
    top_p: float | Array | None = None,
) -> Settings:  # fmt: skip
    """Check the options, and return the settings. Raises: UsageError."""
    check_integer("window", window, 1, MAX_NODES)
    return Settings(temperature, top_k, top_p)


def load_any_order(source: str | Path) -> tuple[AnySubsetModel, Tokenizer]:
    """Load an XLNet language model, a folder or a hub id, in float32. Raises: UsageError for any other model."""
    loaded = load_xlnet(source)
    model = AnySubsetModel(
        _apply(loaded.config), loaded.config.vocab_size, loaded.mask_token, loaded.params, name=loaded.name
    )
    return model, loaded.tokenizer


@functools.cache
def _apply(config: XLNetConfig) -> Callable[..., Array]:
    """Return the function of a model, the same object for the same config."""
    return functools.partial(forward, config)


def blank_prompts(
    model: AnySubsetModel, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> tuple[Array, Array, Array]:
    """Return tokens int32[B, S], missing bool[B, S] and lengths int32[B] of prompts with mask tokens.

    A prompt without mask tokens is continued: `max_new_tokens` missing tokens follow it.

    Raises: UsageError for a model without a mask token, prompts that are no lists of ids, or an empty one.
    """
    blank, rows = model.mask_token, to_rows(prompts)
    if blank is None:
        raise UsageError("the model has no mask_token, which stands for a missing token in a prompt; set it")
    for number, row in enumerate(rows):
        if not len(row):
            raise UsageError(f"prompt {number} is empty; give it at least one token")
    blanks = np.full(check_new_tokens(max_new_tokens), blank, np.int32)
    rows = [row if blank in row else np.append(row, blanks) for row in rows]
    lengths = np.array([len(row) for row in rows], np.int32)
    tokens = pad_rows(rows, int(lengths.max()))
    missing = (tokens == blank) & (np.arange(tokens.shape[1]) < lengths[:, None])
    return jnp.asarray(tokens), jnp.asarray(missing), jnp.asarray(lengths)


def token_order(missing: Array, lengths: Array) -> TokenOrder:
    """Order the given tokens first, then the missing ones, then padding, each by position."""
    exists = jnp.arange(missing.shape[1]) < lengths[:, None]
    position = jnp.argsort(jnp.where(exists, missing, 2), 1, stable=True).astype(jnp.int32)
    rank = jnp.argsort(position, 1).astype(jnp.int32)
    return TokenOrder(
        position, rank, jnp.sum(exists & ~missing, 1, dtype=jnp.int32), jnp.minimum(lengths, missing.shape[1])
    )


def content_mask(order: TokenOrder) -> Array:
    """Return the attention mask bool[B, S, S] of the content stream.

    A token attends to itself and to tokens of lower ranks; given tokens attend to each other. Both calls use this mask,
    so that they compute the same states for known tokens.
    """
    reach = jnp.maximum(order.rank, order.num_given[:, None] - 1)
    return order.rank[:, None, :] <= reach[:, :, None]


class State(NamedTuple):
    tokens: Array  # int32[B, S]
    num_known: Array  # int32[B]
    finite: Array  # bool[B], False for rows that failed
    stats: Stats


@functools.partial(jax.jit, static_argnames=("window",))
@with_standard_modes
def _fill(model, tokens, missing, lengths, usable, keys, sampling, *, window: int) -> AnySubsetResult:
    batch, size = tokens.shape
    order, row, slots = token_order(missing, lengths), jnp.arange(batch)[:, None], jnp.arange(window)
    content = content_mask(order)
    blank = 0 if model.mask_token is None else model.mask_token

    def distributions(tokens: Array, positions: Array, max_rank: Array) -> tuple[Array, Array]:
        """Return warped logits float32[B, k, V] at `positions`, given tokens of rank below `max_rank` int32[B, k].

        The second result is bool[B, k], False for logits that are no numbers.
        """
        logits = model.apply(model.params, tokens, content, positions, order.rank[:, None, :] < max_rank[:, :, None])
        if model.mask_token is not None:
            logits = logits.at[:, :, model.mask_token].set(-jnp.inf)
        return warp(logits, sampling), are_sound(logits)

    def find_running(s: State) -> Array:
        return s.finite & (s.num_known < order.stop)

    def body(s: State) -> State:
        n = s.num_known[:, None]
        valid = find_running(s)[:, None] & (slots < order.stop[:, None] - n)  # [B, k]
        positions = take_along(order.position, jnp.minimum(n + slots, size - 1), 1)
        purpose = functools.partial(fold_in, fold_in(keys, s.num_known))
        q, sound = distributions(s.tokens, positions, jnp.broadcast_to(n, positions.shape))
        drafted = draw(fold_in(purpose(DRAFT)[:, None], slots), q)
        target = lambda mask: jnp.where(mask, positions, size)
        filled = s.tokens.at[row, target(valid)].set(drafted, mode="drop")
        has_several = jnp.sum(valid, 1) > 1
        p, p_sound = jax.lax.cond(
            jnp.any(has_several), lambda: distributions(filled, positions, n + slots), lambda: (q, sound)
        )
        p = p.at[:, 0].set(q[:, 0])
        sound = jnp.all(sound & p_sound | ~valid, 1)
        count, next_token = _verify(purpose(VERIFY), drafted, valid, p, q)
        redrawn = count < jnp.sum(valid, 1)
        new = jnp.where(slots < count[:, None], drafted, next_token[:, None])
        committed = jnp.where(sound, count + redrawn, 0)
        calls = jnp.any(valid, 1).astype(jnp.int32) + has_several
        return State(
            s.tokens.at[row, target(slots < committed[:, None])].set(new, mode="drop"),
            s.num_known + committed,
            s.finite & sound,
            add_round(s.stats, calls, valid, slots < count[:, None]),
        )

    state = State(jnp.where(missing, blank, tokens), order.num_given, usable, zero_stats(batch, window))
    state = jax.lax.while_loop(lambda s: jnp.any(find_running(s)), body, state)
    count = jnp.where(state.finite, order.stop - order.num_given, 0)
    ranks = order.num_given[:, None] + jnp.arange(size)
    new = take_along(state.tokens, take_along(order.position, jnp.minimum(ranks, size - 1), 1), 1)
    return AnySubsetResult(
        jnp.where(jnp.arange(size) < count[:, None], new, -1),
        count,
        state.stats.hit_eos,
        state.stats,
        finite=state.finite,
        filled=state.tokens,
    )


def _verify(keys: Array, drafted: Array, valid: Array, p: Array, q: Array) -> tuple[Array, Array]:
    """Verify `drafted` int32[B, k]. Return the number of accepted tokens int32[B] and the redrawn token int32[B].

    The rule is the standard one on a chain below a root that represents the known tokens. The first draft always
    passes.
    """
    root = lambda x, value: jnp.pad(x, ((0, 0), (1, 0)), constant_values=value)
    leaf = lambda x: jnp.pad(x, ((0, 0), (0, 1), (0, 0)))  # the distribution of a bonus token, which is never drawn
    tree = chain(root(drafted, 0), root(valid, True), leaf(q))
    split = jax.vmap(jax.random.split)(keys)
    u = uniform(split[:, 0], drafted.shape[1] + 1)
    end = verify_chain(u.at[:, 1].set(0.0), tree, leaf(p))
    return end.num_nodes - 1, draw(split[:, 1], jnp.log(end.residual))
