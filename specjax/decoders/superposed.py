"""Superposed decoding: several completions of a prompt with one pass of the model per token.

Shen, Fan, Pratt, Park, Wallingford, Kakade, Holtzman, Krishna, Farhadi, Kusupati: Superposed Decoding: Multiple
Generations from a Single Autoregressive Inference Pass (NeurIPS 2024), arXiv 2405.18400.

Rule: k drafts have scores s_i, and share one cache of superposed inputs. The next input is
sum_i softmax(s)_i E[last token of draft i]. Its distribution p has a low temperature, is cut to the `candidates` most
likely tokens, and is normalised. For each draft it is mixed with n-gram models of a corpus:
  f_i(v) = sum over n of weight_n P_n(v | the last n - 1 tokens of draft i).
  log r_i(v) = (1 - alpha) log p(v) + alpha log f_i(v).
If the corpus has no continuation of a draft, log r_i(v) = (1 - alpha) log p(v) - 200. The k best of all
s_i + log r_i(v) are the drafts of the next step. The first step takes the k most likely tokens. Drafts among the 2 k
best that end with an eos are finished completions.
Guarantee: lossy. With one draft and no corpus it is greedy decoding.
Deviations: P_n is computed from exact counts of a datastore, for any context, while the authors store tables of
n-grams. A context is the end of the prompt and the draft. Without a corpus alpha is 0, and all drafts share one
distribution.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays.indexing import take_along
from specjax.arrays.modes import with_standard_modes
from specjax.catalog import Method, Option
from specjax.decoders.loop_setup import LoopInputs, check_rows, init_loop
from specjax.engine.packing import Prompts
from specjax.engine.prefill import prefill
from specjax.engine.prepare import Settings
from specjax.engine.results import DecodeResult, zero_stats
from specjax.engine.value_checks import are_sound
from specjax.errors import UsageError
from specjax.numerics.validation import check_integer, check_range
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
        Option("alpha", "float", 0.54, "weight of the datastore"),
    ),
    factory="superposed",
    arguments=("target",),
    settings=("temperature",),
)


WEIGHTS = (0.01, 0.04, 0.15, 0.18, 0.12)
"""The authors' weights of 2-grams to 6-grams."""
UNKNOWN = -200.0


class Drafts(NamedTuple):
    """Completions, best first."""

    tokens: Array  # int32[B, k, max_new_tokens], then -1
    lengths: Array  # int32[B, k]
    scores: Array  # float32[B, k], sums of log r; -inf for missing drafts

    def to_lists(self) -> list[list[list[int]]]:
        """Return the drafts of each row as lists."""
        tokens, lengths = np.asarray(self.tokens), np.asarray(self.lengths)
        return [[d[:n].tolist() for d, n in zip(row, ns, strict=True)] for row, ns in zip(tokens, lengths, strict=True)]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SuperposedResult(DecodeResult):
    """The best completion of each prompt, and all completions in `drafts`."""

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
    """Decode `drafts` completions of each prompt in `max_new_tokens` passes, in one compiled program. Lossy.

    Args:
      candidates: number of most likely tokens to choose from; the default is the authors'.
      temperature: temperature of p; the default is the authors'.
      corpus: `Datastore.to_device()`, with the token ids of the target, in which n-grams are counted.
      alpha: weight of the n-grams.
      eos: ids that end a draft.
      prompts, capacity, inputs: see `decode`.

    Raises: UsageError for a setting out of range, or a model that does not accept mixtures of tokens, or returns NaN
      or Inf.
    """
    if not target.model.capabilities.mixtures:
        raise UsageError(f"the model {target.model.name} accepts no mixtures of tokens; superposed decoding needs them")
    check_options(drafts=drafts, candidates=candidates, alpha=alpha, temperature=temperature)
    if candidates > target.model.vocab_size:
        raise UsageError(f"candidates must be at most the vocabulary, {target.model.vocab_size}, not {candidates}")
    settings = Settings(eos=eos, capacity=capacity)
    loop_inputs = init_loop(target, prompts, settings, key=0, max_new_tokens=max_new_tokens, room=1, inputs=inputs)
    result = _run(
        target, loop_inputs, corpus, jnp.float32(temperature), jnp.float32(alpha), drafts=drafts,
        candidates=candidates, max_new_tokens=int(max_new_tokens),
    )  # fmt: skip
    return check_rows(result, target)


def check_options(*, drafts: int, candidates: int, alpha: float, temperature: float = 0.06) -> Settings:
    """Check the options that need no model, and return the settings. Raises: UsageError."""
    check_integer("drafts", drafts, 1)
    check_integer("candidates", candidates, 1)
    if drafts > candidates:
        raise UsageError(f"drafts must be at most candidates, {candidates}, not {drafts}")
    check_range("temperature", temperature, lambda x: x > 0, "above 0")
    check_range("alpha", alpha, lambda x: (x >= 0) & (x < 1), "at least 0 and below 1")
    return Settings(temperature)


def mix_ngrams(log_p: Array, f: Array, alpha: Array | float) -> Array:
    """Return log r float32[B, k, C], from the candidates' log p float32[B, C] and n-gram probabilities f [B, k, C]."""
    in_corpus = jnp.any(f > 0, -1, keepdims=True)
    model_score = (1 - alpha) * log_p[:, None]
    return jnp.where(in_corpus, model_score + alpha * jnp.log(f), model_score + UNKNOWN)


def ngram_probability(corpus: Index, text: Array, length: Array, tokens: Array) -> Array:
    """Return f float32[R, C], the n-gram probabilities of `tokens` int32[R, C] after texts, from counts of a corpus.

    Args:
      text: int32[R, 5], the last tokens of each text, the newest last.
      length: int32[R], number of valid tokens.
    """
    rows, count = tokens.shape

    def times(text: Array, span: int, length: Array) -> Array:
        """Return the number of occurrences of the last `span` tokens, int32[...]."""
        return jnp.sum(search(corpus, text[:, text.shape[1] - span :], length, span).counts, 1)

    longer = jnp.concatenate([jnp.repeat(text, count, 0), tokens.reshape(-1, 1)], 1)
    total = jnp.zeros((rows, count))
    for n, weight in enumerate(WEIGHTS, 2):
        context = times(text, n - 1, length)[:, None]
        both = times(longer, n, jnp.repeat(length + 1, count)).reshape(rows, count)
        total += weight * jnp.where(context > 0, both / jnp.maximum(context, 1), 0.0)
    return total


class State(NamedTuple):
    cache: PyTree
    tokens: Array  # int32[B, k, N], running drafts
    scores: Array  # float32[B, k]
    ended: Drafts  # finished drafts, best first
    passes: Array  # int32[B], passes that the row needed
    finite: Array  # bool[B], false for rows that failed


@functools.partial(jax.jit, static_argnames=("drafts", "candidates", "max_new_tokens"))
@with_standard_modes
def _run(
    target: Target,
    loop_inputs: LoopInputs,
    corpus: Index | None,
    temperature: Array,
    alpha: Array,
    *,
    drafts: int,
    candidates: int,
    max_new_tokens: int,
) -> SuperposedResult:
    model, params = target.model, target.params
    prompt, length = loop_inputs.tokens, loop_inputs.prompts
    batch, k, n = prompt.shape[0], drafts, max_new_tokens
    cache = model.start_cache(params, loop_inputs.inputs, length, prompt.shape[1])
    cache = prefill(model, params, cache, prompt, length - 1)

    def feed_mixture(cache: PyTree, step: Array, mixture: Mixture) -> tuple[PyTree, Array, Array, Array]:
        """Run a pass over one input. Return the cache, the candidates int32[B, C], best first, and their log p.

        The last result is bool[B], False for rows without candidates.
        """
        output, pending = model.forward(
            params, mixture, cache, positions=(length - 1 + step)[:, None], mask=jnp.ones((batch, 1, 1), bool)
        )
        cache = model.commit(cache, pending, jnp.zeros((batch, 1), jnp.int32), jnp.ones((batch,), jnp.int32))
        logits = output.logits[:, 0]
        return cache, *likeliest(logits.astype(jnp.float32) / temperature, candidates), are_sound(logits)

    def body(carry: tuple[Array, State]) -> tuple[Array, State]:
        step, state = carry
        last = jax.lax.dynamic_index_in_dim(state.tokens, step - 1, 2, keepdims=False)
        mixture = Mixture(last[:, None], jax.nn.softmax(state.scores, -1)[:, None])
        cache, candidate_tokens, log_p, sound = feed_mixture(state.cache, step, mixture)
        running = is_running(state)
        log_r = jnp.broadcast_to(log_p[:, None], (batch, k, candidates))
        if corpus is not None:
            log_r = mix_ngrams(log_p, ngram_scores(state.tokens, step, candidate_tokens), alpha)
        draft, choice, scores = extend(state.scores, log_r, min(2 * k, k * candidates))
        token = take_along(candidate_tokens, choice, 1)
        history = take_along(state.tokens, draft[:, :, None], 1).at[:, :, step].set(token)
        tokens, scores, ended = sort_out(history, scores, token, step + 1, state.ended)
        finite = state.finite & (sound | ~running)
        return step + 1, State(cache, tokens, scores, ended, state.passes + running, finite)

    def ngram_scores(tokens: Array, step: Array, candidate_tokens: Array) -> Array:
        """Return f of the candidates after every draft, [B, k, C]."""
        assert corpus is not None
        text = jnp.repeat(prompt, k, 0)
        positions = jnp.repeat(length, k)[:, None] + jnp.arange(n)
        drafted = jnp.where(jnp.arange(n) < step, tokens.reshape(batch * k, n), 0)
        text = text.at[jnp.arange(batch * k)[:, None], positions].set(drafted, mode="drop")
        text_length = jnp.repeat(length, k) + step
        ending = last_tokens(text, text_length, len(WEIGHTS))[:, ::-1]
        return ngram_probability(corpus, ending, text_length, jnp.repeat(candidate_tokens, k, 0)).reshape(
            batch, k, candidates
        )

    def is_running(state: State) -> Array:
        """Return bool[B], True if a running draft of the row can still be among the k best."""
        return state.finite & jnp.any(state.scores > state.ended.scores[:, -1:], 1)

    def sort_out(
        history: Array, scores: Array, token: Array, count: Array, ended: Drafts
    ) -> tuple[Array, Array, Drafts]:
        """Split drafts int32[B, M, N] into the k best running ones, with scores, and the k best finished ones."""
        is_eos = jnp.any(token[:, :, None] == loop_inputs.eos, 2)
        alive, index = jax.lax.top_k(jnp.where(is_eos, -jnp.inf, scores), k)
        new = jnp.where(is_eos, scores, -jnp.inf)
        return take_along(history, index[:, :, None], 1), alive, best_of(ended, history, new, count)

    def best_of(ended: Drafts, tokens: Array, scores: Array, count: Array) -> Drafts:
        """Return the k best of earlier finished drafts and of new drafts of `count` tokens."""
        lengths = jnp.where(scores > -jnp.inf, count, 0)
        best, index = jax.lax.top_k(jnp.concatenate([ended.scores, scores], 1), k)
        pick = lambda old, new: jnp.concatenate([old, new], 1)
        best_tokens = take_along(pick(ended.tokens, tokens), index[:, :, None], 1)
        return Drafts(best_tokens, take_along(pick(ended.lengths, lengths), index, 1), best)

    root = Mixture(take_along(prompt, length[:, None] - 1, 1)[:, :, None], jnp.ones((batch, 1, 1)))
    cache, candidate_tokens, log_p, sound = feed_mixture(cache, jnp.int32(0), root)
    finite = loop_inputs.usable & sound
    empty = jnp.full((batch, k, n), -1, jnp.int32)
    ended = Drafts(empty, jnp.zeros((batch, k), jnp.int32), jnp.full((batch, k), -jnp.inf))
    width = min(2 * k, candidates)
    first = jnp.full((batch, width, n), -1, jnp.int32).at[:, :, 0].set(candidate_tokens[:, :width])
    tokens, scores, ended = sort_out(first, log_p[:, :width], candidate_tokens[:, :width], jnp.int32(1), ended)
    state = State(cache, tokens, scores, ended, loop_inputs.usable.astype(jnp.int32), finite)
    alive = lambda carry: (carry[0] < n) & jnp.any(is_running(carry[1]))
    step, state = jax.lax.while_loop(alive, body, (jnp.int32(1), state))
    best = best_of(state.ended, state.tokens, state.scores, step)
    has_text = state.finite[:, None]
    best = best._replace(
        lengths=jnp.where(has_text, best.lengths, 0), scores=jnp.where(has_text, best.scores, -jnp.inf)
    )
    best = best._replace(tokens=jnp.where(jnp.arange(n) < best.lengths[:, :, None], best.tokens, -1))
    tokens, lengths = best.tokens[:, 0], best.lengths[:, 0]
    last = take_along(tokens, jnp.maximum(lengths - 1, 0)[:, None], 1)
    hit_eos = jnp.any(last == loop_inputs.eos, 1) & (lengths > 0)
    stats = zero_stats(batch, 0)._replace(target_passes=state.passes, hit_eos=hit_eos)
    return SuperposedResult(tokens, lengths, hit_eos, stats, finite=state.finite, drafts=best)
