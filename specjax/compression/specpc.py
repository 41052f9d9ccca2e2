"""SpecPC: a draft model selects the tokens of a prompt that the target reads.

Source: Galim et al. 2025, Draft-based Approximate Inference for LLMs, arXiv 2506.08373.

Rule: the last `window` tokens of the prompt attend to all tokens, in the draft model. Their weights are multiplied by a
ramp from 0 for the first of them to 1 for the last one. With `lookahead` n, the draft also writes n tokens, and n - 1
of them attend too. The score of a token is the maximum of the weights over queries, heads and layers from `first_layer`
on. Then the maximum of `kernel` scores around each token replaces its score. Tokens are selected in this order:
  1. the last `window` tokens, and the first `first` ones;
  2. the token with the highest score, and its neighbours from the nearest to the farthest, `neighbors` tokens in all;
  3. the token with the next score and its neighbours, and so on until `budget` tokens are selected.
Equal scores are in the order of the text. The selected tokens are the new prompt, in that order too, with consecutive
positions.
Guarantee: lossy. The text has the distribution of the target for the compressed prompt, if its method is exact.
Deviations: the paper does not select the first tokens by rule; `first=0` is its form. Here the draft does not stop at
an end-of-text token. The papers' settings leave out the first 8 layers; here a draft of less than 16 layers leaves out
half of them. The kernel of 64 of the papers is smaller for budgets below 512.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays.modes import jit
from specjax.catalog import Method, Option
from specjax.compression.draft_tokens import look_ahead
from specjax.engine import packing
from specjax.engine.prefill import prefill
from specjax.engine.step import buffer_size
from specjax.errors import UsageError
from specjax.models.variants import cache_parts
from specjax.numerics.validation import check_integer, pad_rows
from specjax.retrieval.cached_tokens import attention_weights
from specjax.retrieval.last_queries import check_full_attention, last_queries
from specjax.types import Array, Target

METHOD = Method(
    name="specpc",
    kind="compression",
    guarantee="lossy",
    summary="keeps the prompt tokens to which a draft model's last queries attend most",
    paper="Galim et al. 2025, Draft-based Approximate Inference for LLMs, arXiv 2506.08373",
    options=(
        Option("budget", "int", 512, "tokens of a compressed prompt"),
        Option("window", "int", 64, "last tokens of the prompt, which select the others and stay"),
        Option(
            "kernel", "int", None, "tokens over which the maximum of the scores is taken; default: 64, or budget / 8"
        ),
        Option("neighbors", "int", None, "tokens selected around each high score; default: as many as kernel"),
        Option("first", "int", 4, "first tokens of the prompt that stay"),
        Option("lookahead", "int", 1, "tokens that the draft writes; all but the last one select too"),
        Option("first_layer", "int", None, "first layer whose attention counts; default: 8, or half of few layers"),
    ),
    words=(Option("draft", "model", None, "the draft model; default: the model of --draft, or the target"),),
)

FIRST_LAYER = 8
"""Default of `first_layer` for drafts with twice as many layers."""
KERNEL, PEAKS = 64, 8
"""Default of `kernel`, as in the paper, and the number of high scores for which a budget has room by default.

With a kernel of 64, prompts of 650 tokens with a budget of 192 lost the number that was asked for in 8 of 8 cases. The
surroundings of the first tokens and of the window filled the budget. With 8 or 16 no case of 8 lost it, down to 128.
"""
WIDEST = 1024
"""Maximum number of neighbours. Ranks of a prompt of a million tokens then fit in 31 bits."""


class SelectionRule(NamedTuple):
    """The settings of `specpc`. All are static in its program."""

    budget: int
    window: int
    kernel: int
    neighbors: int
    first: int
    lookahead: int
    first_layer: int | None

    @property
    def offsets(self) -> list[int]:
        """Return the distances of a token's neighbours, the nearest first."""
        count = max(self.neighbors, 1)
        left = (count - 1) // 2
        return sorted(range(-left, count - left), key=lambda offset: (abs(offset), offset))


def specpc(
    draft: Target,
    prompts: Sequence[Sequence[int]],
    budget: int = 512,
    *,
    window: int = 64,
    kernel: int | None = None,
    neighbors: int | None = None,
    first: int = 4,
    lookahead: int = 1,
    first_layer: int | None = None,
) -> list[list[int]]:
    """Return the prompts with at most `budget` tokens each, in the order of the text. This is lossy.

    A prompt of at most `budget` tokens is returned unchanged, if the draft could read it. The draft reads one prompt
    after another.

    Args:
      draft: a model with the tokenizer of the target, or the target itself.
      prompts: token lists.
      window: last tokens of the prompt. Their attention selects the others, and they are always selected.
      kernel: tokens over which the maximum of the scores is taken. None: KERNEL, but at most an eighth of the budget.
      neighbors: tokens that a high score selects, itself included; None: as many as `kernel`.
      first: first tokens of the prompt, which are always selected.
      lookahead: tokens that the draft writes. All but the last one attend to the prompt too.
      first_layer: first layer whose attention counts. None: 8, or half of the layers of a draft with less than 16.

    Raises: UsageError for a setting out of range, and for a prompt that is not token ids or does not fit the draft. The
      draft needs a cache of keys and values on one device, and attention without windows.
    """
    rule = check_options(budget, window, kernel, neighbors, first, lookahead, first_layer)
    rule = _fit(rule, draft)
    tokens, lengths = _pad(draft, prompts, lookahead)
    rows = [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]
    for i, row in enumerate(rows):
        if len(row) > budget:
            slots = _select(draft, tokens[i : i + 1], lengths[i : i + 1], rule)
            rows[i] = tokens[i, np.asarray(slots)[0]].tolist()
    return rows


def compile_for(draft: Target, prompts: Sequence[Sequence[int]], **options: Any) -> None:
    """Compile the program of `specpc` with these arguments, and read the shortest prompt that it compresses."""
    rule = _fit(check_options(**options), draft)
    tokens, lengths = _pad(draft, prompts, rule.lookahead)
    if lengths.max() > rule.budget:
        jax.block_until_ready(_select(draft, tokens[:1], np.full((1,), rule.budget + 1, np.int32), rule))


def check_options(
    budget: int = 512, window: int = 64, kernel: int | None = None, neighbors: int | None = None, first: int = 4,
    lookahead: int = 1, first_layer: int | None = None,
) -> SelectionRule:  # fmt: skip
    """Return the settings of `specpc`. Raises: UsageError for a value out of range."""
    check_integer("budget", budget)
    kernel = min(KERNEL, max(budget // PEAKS, 1)) if kernel is None else kernel
    check_integer("kernel", kernel)
    neighbors = min(kernel, WIDEST) if neighbors is None else neighbors
    rule = SelectionRule(budget, window, kernel, neighbors, first, lookahead, first_layer)
    for name, minimum, maximum in (
        ("budget", 1, None), ("window", 1, None), ("neighbors", 0, WIDEST), ("first", 0, None), ("lookahead", 1, None),
        ("first_layer", 0, None),
    ):  # fmt: skip
        value: Any = getattr(rule, name)
        check_integer(name, value, minimum, maximum)
    if budget <= first + window:
        raise UsageError(
            f"budget must be above {first + window}, the first {first} and the last {window} tokens that always stay, "
            f"not {budget}; raise budget, or lower window"
        )
    return rule


def _fit(rule: SelectionRule, draft: Target) -> SelectionRule:
    """Return the settings with the draft's first layer. Raises: UsageError for a draft that does not fit."""
    check_full_attention(draft.model, "specpc", "choose another draft model")
    layers = draft.model.capabilities.num_layers
    if rule.first_layer is None:
        return rule._replace(first_layer=min(FIRST_LAYER, layers // 2))
    if rule.first_layer >= layers:
        raise UsageError(
            f"first_layer must be below the {layers} layers of the draft model {draft.model.name}, not "
            f"{rule.first_layer}; lower it"
        )
    return rule


def _pad(draft: Target, prompts: Sequence[Sequence[int]], lookahead: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (tokens int32[B, L], lengths int32[B]) with slots for the draft's tokens. Raises: UsageError."""
    model, rows = draft.model, packing.to_rows(prompts)
    for number, row in enumerate(rows):
        if len(row) + lookahead > model.max_positions:
            raise UsageError(
                f"prompt {number} has {len(row)} tokens, and the draft model {model.name} reads {model.max_positions}, "
                f"lookahead of {lookahead} included; shorten the prompt or choose another draft model"
            )
    lengths = np.asarray([len(row) for row in rows], np.int32)
    tokens = pad_rows(rows, buffer_size(int(lengths.max()), lookahead, 1, model.max_positions))
    packing.check_prompts(tokens, lengths, lookahead, model.max_positions, model.vocab_size)
    return tokens, lengths


@jit(static_argnames="rule")
def _select(draft: Target, tokens: Array, lengths: Array, rule: SelectionRule) -> Array:
    """Return the places of the selected tokens in order, int32[B, budget], of prompts that are longer than `budget`."""
    return most_important(importance(draft, tokens, lengths, rule), lengths, rule)


def importance(draft: Target, tokens: Array, lengths: Array, rule: SelectionRule) -> Array:
    """Return the score of each token of prompts int32[B, L] before the maximum over neighbours, float32[B, L].

    lengths: int32[B], at least `window`. The scores after the prompt are 0.
    """
    model, size = draft.model, tokens.shape[1]
    cache = model.start_cache(draft.params, None, lengths, size)
    cache = prefill(model, draft.params, cache, tokens, lengths)
    if rule.lookahead > 1:
        tokens, cache = look_ahead(draft, tokens, cache, lengths, rule.lookahead)
    num_new = rule.lookahead - 1
    queries, positions = last_queries(draft, tokens, cache, lengths + num_new, rule.window + num_new)
    ramp = jnp.linspace(0.0, 1.0, rule.window) if rule.window > 1 else jnp.ones(1)
    ramp = jnp.concatenate([ramp, jnp.ones(num_new)])

    def of_layer(query: Array, key: Array) -> Array:
        weights = attention_weights(query, positions, key) * ramp[:, None]
        return jnp.max(weights, (1, 2, 3))

    assert rule.first_layer is not None
    scores = jnp.max(cache_parts.map_keys(of_layer, queries, cache)[rule.first_layer :], 0)[:, :size]
    return jnp.where(jnp.arange(size) < lengths[:, None], scores, 0)


def most_important(scores: Array, lengths: Array, rule: SelectionRule) -> Array:
    """Return the places of the selected tokens in order, int32[B, budget].

    scores: float32[B, L], not negative. lengths: int32[B], at least `budget`.
    """
    place = jnp.arange(scores.shape[1])
    is_prompt = place < lengths[:, None]
    left = (rule.kernel - 1) // 2
    pooled = jax.lax.reduce_window(
        scores, -jnp.inf, jax.lax.max, (1, rule.kernel), (1, 1), ((0, 0), (left, rule.kernel - 1 - left))
    )
    order = jnp.argsort(jnp.where(is_prompt, -pooled, jnp.inf), 1, stable=True)
    rank = jnp.argsort(order, 1)  # the place of each token in the order
    always = (place < rule.first) | ((place >= lengths[:, None] - rule.window) & is_prompt)
    turn = jnp.where(always, -1, jnp.where(is_prompt, _turns(rank, rule.offsets), jnp.iinfo(jnp.int32).max))
    return jnp.sort(jnp.argsort(turn, 1, stable=True)[:, : rule.budget], 1).astype(jnp.int32)


def _turns(rank: Array, offsets: list[int]) -> Array:
    """Return the turn at which each token is selected, int32[B, L]: tokens by rank, each with its neighbours.

    rank: int32[B, L]. offsets: distances of the neighbours, in their order.
    """
    count = len(offsets)
    reach = max(map(abs, offsets))
    turns = jnp.pad(rank * count, ((0, 0), (reach, reach)), constant_values=jnp.iinfo(jnp.int32).max - count)
    center = jnp.arange(rank.shape[1]) + reach
    return jnp.min(turns[:, center[:, None] - jnp.array(offsets)] + jnp.arange(count), -1)
