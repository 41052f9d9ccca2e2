"""Superposed decoding: several completions of a prompt at once, for one pass of the model per token.

Shen, Fan, Pratt, Park, Wallingford, Kakade, Holtzman, Krishna, Farhadi, Kusupati: Superposed Decoding: Multiple
Generations from a Single Autoregressive Inference Pass (NeurIPS 2024), arXiv 2405.18400.

Rule: k drafts with scores s_i, and one cache of inputs in superposition. The next input is
sum_i softmax(s)_i E[last token of draft i]. Its distribution p at a low temperature, cut to the `candidates` likeliest
tokens and normalised, is mixed for each draft with n-gram models of a corpus, f_i(v) = sum over n of weight_n P_n(v |
the last n - 1 tokens of draft i): log r_i(v) = (1 - alpha) log p(v) + alpha log f_i(v), and (1 - alpha) log p(v) - 200
for a draft that the corpus has nothing to say about. Of all s_i + log r_i(v) the k best are the drafts of the next
step. The first step takes the k likeliest tokens. Of the 2 k best those that end with an eos are set aside.
Guarantee: lossy. Only with one draft and no corpus is it a decoding of the model, the greedy one.
Deviations: P_n is counted in a datastore, exactly and for any context, where the authors keep tables of n-grams; a
context is the end of the prompt and the draft. Without a corpus alpha is 0: the drafts then share one distribution.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays.indexing import take_along
from specjax.arrays.x64 import without_x64
from specjax.catalog import Method, Option
from specjax.engine.packing import Prompts, new_tokens, pack
from specjax.engine.prefill import prefill
from specjax.engine.prepare import Settings
from specjax.engine.results import DecodeResult
from specjax.engine.statistics import zero_stats
from specjax.errors import UsageError
from specjax.retrieval.datastore.index import Index, search
from specjax.retrieval.suffixes import last_tokens
from specjax.trees.superposition import extend, likeliest
from specjax.types import Array, Mixture, PyTree, Target

METHOD = Method(
    name="superposed_decoding",
    kind="decoder",
    guarantee="lossy",
    summary="decodes several completions of a prompt with one target pass per token",
    paper="Shen et al. 2024, arXiv 2405.18400",
    takes=frozenset({"datastore"}),
    options=(
        Option("drafts", "int", 3, "number of completions"),
        Option("candidates", "int", 9, "most likely tokens to choose from"),
        Option("temperature", "float", 0.06, "temperature of the mixture's distribution"),
        Option("alpha", "float", 0.54, "weight of the datastore"),
    ),
    factory="superposed",
)


WEIGHTS = (0.01, 0.04, 0.15, 0.18, 0.12)
"""The authors', of 2-grams to 6-grams."""
UNKNOWN = -200.0


class Drafts(NamedTuple):
    """Completions, best first."""

    tokens: Array  # int32[B, k, max_new_tokens], -1 behind the end
    lengths: Array  # int32[B, k]
    scores: Array  # float32[B, k], sums of log r; -inf where fewer drafts were found

    def to_lists(self) -> list[list[list[int]]]:
        """Per row its drafts."""
        tokens, lengths = np.asarray(self.tokens), np.asarray(self.lengths)
        return [[d[:n].tolist() for d, n in zip(row, ns, strict=True)] for row, ns in zip(tokens, lengths, strict=True)]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SuperposedResult(DecodeResult):
    """The best completion of each prompt, and beside it all of them."""

    drafts: Drafts


def superposed(
    target: Target,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    drafts: int = 3,
    candidates: int = 9,
    temperature: float = 0.06,
    corpus: Index | None = None,
    alpha: float = 0.54,
    eos=(),
    capacity: int | None = None,
    inputs: PyTree = None,
) -> SuperposedResult:
    """`drafts` completions of each prompt in `max_new_tokens` passes, in one compiled program. Lossy.

    Args:
      candidates: likeliest tokens to choose from; temperature: of p. The authors' settings.
      corpus: `Datastore.to_device()`, whose ids are the target's: where the n-grams are counted. alpha: their weight.
      eos: ids that end a draft. prompts, capacity, inputs: as for `decode`.

    Raises: UsageError for a setting outside its range, or a model that takes no mixtures of tokens.
    """
    if not target.model.capabilities.mixtures:
        raise UsageError(f"the model {target.model.name} takes no mixtures of tokens, which superposed decoding feeds")
    if drafts < 1:
        raise UsageError(f"drafts must be at least 1, not {drafts}")
    if not drafts <= candidates <= target.model.vocab_size:
        raise UsageError(f"candidates must be from the number of drafts, {drafts}, to the vocabulary, not {candidates}")
    if temperature <= 0:
        raise UsageError(f"temperature must be above 0, not {temperature}")
    if not 0 <= alpha < 1:
        raise UsageError(f"alpha must be at least 0 and below 1, not {alpha}")
    max_new_tokens = new_tokens(max_new_tokens)
    tokens, lengths = pack(prompts, max_new_tokens, 1, capacity or target.model.max_positions, target.model.vocab_size)
    return _run(
        target, inputs, corpus, tokens, lengths, Settings(eos=eos).ends(), jnp.float32(temperature), jnp.float32(alpha),
        drafts=drafts, candidates=candidates, max_new_tokens=max_new_tokens,
    )  # fmt: skip


def mixed(log_p: Array, f: Array, alpha: Array | float) -> Array:
    """log r float32[B, k, C] of the candidates' log p float32[B, C] and n-gram probabilities f float32[B, k, C]."""
    known = jnp.any(f > 0, -1, keepdims=True)
    of_model = (1 - alpha) * log_p[:, None]
    return jnp.where(known, of_model + alpha * jnp.log(f), of_model + UNKNOWN)


def ngram_probability(corpus: Index, text: Array, length: Array, tokens: Array) -> Array:
    """f float32[R, C] of `tokens` int32[R, C] behind texts, by the counts of a corpus.

    Args: text: int32[R, 5], the last tokens of each, the newest last. length: int32[R], how many are real.
    """
    rows, count = tokens.shape

    def times(text: Array, span: int, length: Array) -> Array:
        """How often the last `span` tokens occur: int32[...]."""
        return jnp.sum(search(corpus, text[:, text.shape[1] - span :], length, span).counts, 1)

    longer = jnp.concatenate([jnp.repeat(text, count, 0), tokens.reshape(-1, 1)], 1)
    total = jnp.zeros((rows, count))
    for n, weight in enumerate(WEIGHTS, 2):
        context = times(text, n - 1, length)[:, None]
        both = times(longer, n, jnp.repeat(length + 1, count)).reshape(rows, count)
        total += weight * jnp.where(context > 0, both / jnp.maximum(context, 1), 0.0)
    return total


class _State(NamedTuple):
    cache: PyTree
    tokens: Array  # int32[B, k, N], the drafts that go on
    scores: Array  # float32[B, k]
    ended: Drafts  # those that do not, best first
    passes: Array  # int32[B], that the row needed


@functools.partial(jax.jit, static_argnames=("drafts", "candidates", "max_new_tokens"))
@without_x64
def _run(
    target: Target,
    inputs: PyTree,
    corpus: Index | None,
    prompt: Array,
    length: Array,
    eos: Array,
    temperature: Array,
    alpha: Array,
    *,
    drafts: int,
    candidates: int,
    max_new_tokens: int,
) -> SuperposedResult:
    model, params = target.model, target.params
    batch, k, n = prompt.shape[0], drafts, max_new_tokens
    cache = prefill(model, params, model.start_cache(params, inputs, length, prompt.shape[1]), prompt, length - 1)

    def look(cache: PyTree, step: Array, mixture: Mixture) -> tuple[PyTree, Array, Array]:
        """The cache with one more input, the candidates int32[B, C], best first, and their log p."""
        output, pending = model.forward(
            params, mixture, cache, positions=(length - 1 + step)[:, None], mask=jnp.ones((batch, 1, 1), bool)
        )
        cache = model.commit(cache, pending, jnp.zeros((batch, 1), jnp.int32), jnp.ones((batch,), jnp.int32))
        return cache, *likeliest(output.logits[:, 0].astype(jnp.float32) / temperature, candidates)

    def body(carry: tuple[Array, _State]) -> tuple[Array, _State]:
        step, state = carry
        last = jax.lax.dynamic_index_in_dim(state.tokens, step - 1, 2, keepdims=False)
        mixture = Mixture(last[:, None], jax.nn.softmax(state.scores, -1)[:, None])
        cache, named, log_p = look(state.cache, step, mixture)
        log_r = jnp.broadcast_to(log_p[:, None], (batch, k, candidates))
        if corpus is not None:
            log_r = mixed(log_p, counted(state.tokens, step, named), alpha)
        draft, choice, scores = extend(state.scores, log_r, min(2 * k, k * candidates))
        token = take_along(named, choice, 1)
        history = take_along(state.tokens, draft[:, :, None], 1).at[:, :, step].set(token)
        tokens, scores, ended = sort_out(history, scores, token, step + 1, state.ended)
        return step + 1, _State(cache, tokens, scores, ended, state.passes + goes_on(state))

    def counted(tokens: Array, step: Array, named: Array) -> Array:
        """f of the candidates behind every draft, [B, k, C]."""
        assert corpus is not None
        text = jnp.repeat(prompt, k, 0)
        place = jnp.repeat(length, k)[:, None] + jnp.arange(n)
        drafted = jnp.where(jnp.arange(n) < step, tokens.reshape(batch * k, n), 0)
        text = text.at[jnp.arange(batch * k)[:, None], place].set(drafted, mode="drop")
        seen = jnp.repeat(length, k) + step
        ending = last_tokens(text, seen, len(WEIGHTS))[:, ::-1]
        return ngram_probability(corpus, ending, seen, jnp.repeat(named, k, 0)).reshape(batch, k, candidates)

    def goes_on(state: _State) -> Array:
        """bool[B]: whether a draft of the row may still be among the k best."""
        return jnp.any(state.scores > state.ended.scores[:, -1:], 1)

    def sort_out(
        history: Array, scores: Array, token: Array, count: Array, ended: Drafts
    ) -> tuple[Array, Array, Drafts]:
        """The k best that go on, with their scores, and the k best that have ended, among drafts int32[B, M, N]."""
        is_eos = jnp.any(token[:, :, None] == eos, 2)
        alive, place = jax.lax.top_k(jnp.where(is_eos, -jnp.inf, scores), k)
        new = jnp.where(is_eos, scores, -jnp.inf)
        return take_along(history, place[:, :, None], 1), alive, best_of(ended, history, new, count)

    def best_of(ended: Drafts, tokens: Array, scores: Array, count: Array) -> Drafts:
        """The k best of those before and of drafts of `count` tokens."""
        lengths = jnp.where(scores > -jnp.inf, count, 0)
        best, place = jax.lax.top_k(jnp.concatenate([ended.scores, scores], 1), k)
        pick = lambda old, new: jnp.concatenate([old, new], 1)
        of_all = take_along(pick(ended.tokens, tokens), place[:, :, None], 1)
        return Drafts(of_all, take_along(pick(ended.lengths, lengths), place, 1), best)

    root = Mixture(take_along(prompt, length[:, None] - 1, 1)[:, :, None], jnp.ones((batch, 1, 1)))
    cache, named, log_p = look(cache, jnp.int32(0), root)
    none = jnp.full((batch, k, n), -1, jnp.int32)
    ended = Drafts(none, jnp.zeros((batch, k), jnp.int32), jnp.full((batch, k), -jnp.inf))
    width = min(2 * k, candidates)
    first = jnp.full((batch, width, n), -1, jnp.int32).at[:, :, 0].set(named[:, :width])
    tokens, scores, ended = sort_out(first, log_p[:, :width], named[:, :width], jnp.int32(1), ended)
    state = _State(cache, tokens, scores, ended, jnp.ones((batch,), jnp.int32))
    alive = lambda carry: (carry[0] < n) & jnp.any(goes_on(carry[1]))
    step, state = jax.lax.while_loop(alive, body, (jnp.int32(1), state))
    best = best_of(state.ended, state.tokens, state.scores, step)
    best = best._replace(tokens=jnp.where(jnp.arange(n) < best.lengths[:, :, None], best.tokens, -1))
    tokens, lengths = best.tokens[:, 0], best.lengths[:, 0]
    last = take_along(tokens, jnp.maximum(lengths - 1, 0)[:, None], 1)
    hit_eos = jnp.any(last == eos, 1)
    stats = zero_stats(batch, 0)._replace(target_passes=state.passes, hit_eos=hit_eos)
    return SuperposedResult(tokens, lengths, hit_eos, stats, drafts=best)
