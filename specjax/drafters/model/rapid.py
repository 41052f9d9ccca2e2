"""RAPID: a draft model that reads only the chunks of a long prompt that are relevant to its end.

Chen, Feng, Ni, Li, Shieh: Long-Context Inference with Retrieval-Augmented Speculative Decoding (ICML 2025),
arXiv 2502.20330. With `score=attention` the chunks are those of Cha et al.: SpecExtend (2025), arXiv 2505.20776.

Rule: split the prompt into chunks, score each chunk against the query, and keep the best ones, in document order, up to
a budget. The draft model's prompt consists of these chunks and the query. After j tokens of output its position is
L_short + j, and the target's is L_prompt + j. It drafts like `two_model`, with its true q. Any model can draft, even a
larger one or the target itself: the gain comes from the shorter context, not from fewer parameters.
Guarantee: distribution. The choice of chunks depends on the prompt only. The rule `specjax.verifiers.rapid`, the other
half of the paper, makes it lossy.
Deviations: the query is the last `query` tokens of the prompt. The query and the first chunk (bos, system prompt) are
always kept; the authors fill two templates. Chunks have a fixed length and ignore sentences. There is no threshold: the
budget is always filled. A chunk's score needs no second model: it is the sum of log(chunks / chunks with the token)
over the distinct tokens that query and chunk share. The authors' code combines a sentence embedder and BM25.
The score was tested on WikiText-2 in SmolLM2's tokens: 64 chunks of 128 tokens, and the 64 tokens after one chunk as
the query. That chunk is among the best four in 48 % of 768 trials. The cosine of mean token embeddings of SmolLM2
reaches 22 % to 26 %. After `refresh` new tokens, chunks of the whole text are selected again, with its end as the
query; the authors' outputs are short. The confidence threshold at which the authors stop drafting is missing.
With `score=attention` the score is the mean attention of the newest cached token of the text in the last layer of the
target, over heads and tokens of the chunk. SpecExtend gathers the selected keys from a complete cache of the draft
model every few steps. Here the draft model reads the selected tokens again after `refresh` new ones, at new positions.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from specjax import trees
from specjax.arrays.branching import update_if
from specjax.arrays.indexing import take_along
from specjax.catalog import Method, Option, shared
from specjax.drafters.layers.early_exit import context_target
from specjax.drafters.model.two_model import State
from specjax.drafters.model.two_model import functions as two_model_functions
from specjax.engine.prefill import CHUNK, prefill
from specjax.errors import UsageError
from specjax.models.requirements import check_rewinds
from specjax.models.variants.cache_parts import keys_of_last_layer
from specjax.numerics.validation import check_integer
from specjax.retrieval.cached_tokens import attention_weights
from specjax.retrieval.last_queries import check_full_attention, last_queries
from specjax.trees import Builder
from specjax.types import Array, Context, Drafter, Model, Target

CHUNK_TOKENS, QUERY_TOKENS = 128, 64
"""Default sizes of a chunk and of the query."""

METHOD = Method(
    name="rapid",
    kind="drafter",
    guarantee="distribution",
    summary="drafts with a model that reads only the relevant chunks of a long prompt",
    paper="Chen et al. 2025, arXiv 2502.20330",
    needs=frozenset({"draft"}),
    options=(
        shared.num_tokens(10),
        shared.TREE,
        Option("budget", "int", 4096, "prompt tokens that the draft model reads"),
        Option("chunk", "int", 128, "tokens per chunk"),
        Option("query", "int", 64, "last prompt tokens that serve as the retrieval query"),
        Option(
            "score", ("tokens", "attention"), "tokens", "relevance of a chunk: rare tokens of the query, or attention"
        ),
        Option("max_new_tokens", "int", 1024, "maximum number of new tokens, for the size of the draft model's cache"),
        Option("refresh", "int", None, "new tokens after which the chunks are selected again; default: max_new_tokens"),
    ),
    arguments=("draft",),
)


LAG = 2


def rapid(
    draft: Target,
    num_tokens: int = 10,
    tree: Builder | None = None,
    *,
    budget: int = 4096,
    chunk: int = CHUNK_TOKENS,
    query: int = QUERY_TOKENS,
    score: str = "tokens",
    max_new_tokens: int = 1024,
    refresh: int | None = None,
) -> Drafter:
    """Draft a chain of `num_tokens` tokens of `draft`, or a `tree`, after at most `budget` tokens of the prompt.

    Args:
      budget: maximum prompt length of the draft model in tokens, the query included. It reads shorter prompts in full.
      chunk: tokens per chunk; 128 in the authors' script, 512 in their README.
      query: number of tokens at the end of the prompt that determine the relevant chunks.
      score: "tokens" or "attention". With "attention" the target's newest token determines the relevant chunks. The
        draft model then reads its part in the first step, and needs a target with a cache of keys and values.
      max_new_tokens: cache slots for the output. A row that outgrows them is cut down to `budget` again. If the draft
        model cannot rewind, it stops drafting for such rows, and does not run once no row fits.
      refresh: cache slots for the output if they are fewer than max_new_tokens. Chunks are then selected more often, so
        they follow the text. Each time the draft model reads about `budget` tokens.

    State: the state of `two_model`, with a cache of about budget + min(max_new_tokens, refresh) slots.
    Raises: UsageError for a setting below its minimum.
    """
    if chunk < 1:
        raise UsageError(f"chunk must be at least 1, not {chunk}")
    if query < LAG:
        raise UsageError(f"query must be at least {LAG}, not {query}")
    if budget < chunk + query:
        raise UsageError(f"budget must be at least {chunk + query}, a chunk and the query, not {budget}")
    if max_new_tokens < 1:
        raise UsageError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
    if score not in ("tokens", "attention"):
        raise UsageError(f'score must be tokens or attention, not "{score}"')
    if score == "attention":
        check_rewinds(draft.model, "the draft model of rapid with score=attention")
    if refresh is not None:
        check_integer("refresh", refresh)
        max_new_tokens = min(max_new_tokens, refresh)
    builder = trees.make_builder(num_tokens, tree, None)
    by_attention = score == "attention"
    return _functions(draft.model, builder, budget, chunk, query, max_new_tokens, by_attention).replace(
        params=draft.params
    )


@functools.cache
def _functions(
    model: Model, builder: Builder, budget: int, chunk: int, query: int, max_new_tokens: int, by_attention: bool
) -> Drafter:  # fmt: skip
    longest = budget + max_new_tokens
    slots = longest + max(builder.num_nodes, CHUNK) + 1  # with the slack of `buffer_size`

    def shorten(context: Context) -> Context:
        if by_attention and context.cache is None:  # the target has not read the prompt yet
            check_full_attention(context_target(context).model, "rapid with score=attention", "use score=tokens")
            size = min(slots, context.tokens.shape[1])
            return context._replace(tokens=context.tokens[:, :size], length=jnp.ones_like(context.length))
        if context.tokens.shape[1] <= budget:  # no text can exceed the budget
            return context
        scores = attention_scores(context, chunk, query) if by_attention else None
        return retrieve(context, budget=budget, chunk=chunk, query=query, slots=slots, scores=scores)

    drafter = two_model_functions(model, builder, LAG, shorten)

    def propose(params, keys, state: State, context: Context, limit):
        outgrown = context.length - state.dropped > longest
        if by_attention:
            outgrown |= state.num_cached == 0
        if model.rewind is None:
            limit = jnp.where(outgrown, 0, limit)
        elif by_attention or context.tokens.shape[1] > longest:
            outgrown &= limit > 0
            again = lambda length, state: read_again(params, state, context._replace(length=length), outgrown)
            state = update_if(jnp.any(outgrown), again, context.length, state)
        return drafter.propose(params, keys, state, context, limit)

    def read_again(params, state: State, context: Context, rows: Array) -> State:
        """Cut the text down and read it again, for `rows` bool[B]."""
        short = shorten(context)
        num_cached = jnp.maximum(short.length - LAG, 0)
        cache = model.rewind_cache(state.cache, jnp.where(rows, 0, state.num_cached))
        cache = prefill(model, params, cache, short.tokens, jnp.where(rows, num_cached, 0))
        dropped = jnp.where(rows, context.length - short.length, state.dropped)
        return State(cache, jnp.where(rows, num_cached, state.num_cached), dropped)

    return drafter.replace(propose=propose)


def retrieve(
    context: Context, *, budget: int, chunk: int, query: int, slots: int, scores: Array | None = None
) -> Context:  # fmt: skip
    """Cut the prompts down to `budget` tokens, in a buffer of at most `slots`. Shorter prompts stay unchanged.

    scores: float[B, C] of the chunks; None: those of `chunk_scores`.
    """
    tokens, length = context.tokens, context.length[:, None]
    size = tokens.shape[1]
    slots = min(slots, size)
    scores = chunk_scores(tokens, context.length, chunk, query) if scores is None else scores
    count = scores.shape[1]
    _, best = jax.lax.top_k(scores, min((budget - query) // chunk, count))
    is_selected = jnp.any(best[:, :, None] == jnp.arange(count), 1)  # bool[B, C]
    position = jnp.arange(size)
    is_kept = jnp.repeat(is_selected, chunk, 1)[:, :size] | (position >= length - query) | (length <= budget)
    is_kept &= position < length
    place = jnp.where(is_kept, jnp.cumsum(is_kept, 1) - 1, slots)
    rows = jnp.arange(tokens.shape[0])[:, None]
    short = jnp.zeros((tokens.shape[0], slots), tokens.dtype).at[rows, place].set(tokens, mode="drop")
    return context._replace(tokens=short, length=jnp.sum(is_kept, 1, dtype=jnp.int32))


def chunk_scores(tokens: Array, length: Array, chunk: int, query: int) -> Array:
    """Return int32[B, C], the relevance of each chunk of a text to its last `query` tokens.

    The first chunk has the highest score. Chunks of query and padding only have the lowest. The scores of texts with
    `query` or fewer tokens are arbitrary.
    """
    batch, size = tokens.shape
    count = -(-size // chunk)
    padded = jnp.pad(tokens, ((0, 0), (0, count * chunk - size)))
    body = jnp.arange(count * chunk) < length[:, None] - query
    query_tokens = take_along(tokens, jnp.maximum(length[:, None] - query + jnp.arange(query), 0), 1)
    is_duplicate = jnp.any(
        (query_tokens[:, :, None] == query_tokens[:, None, :]) & jnp.tri(query, k=-1, dtype=bool), 2
    )  # duplicates
    same = (query_tokens[:, :, None] == padded[:, None, :]) & body[:, None, :]
    holds = jnp.any(same.reshape(batch, query, count, chunk), 3)  # bool[B, Q, C]
    exists = jnp.arange(count) * chunk < length[:, None] - query
    chunk_counts = jnp.maximum(jnp.sum(holds, 2), 1)
    rarity = jnp.log(jnp.sum(exists, 1)[:, None] / chunk_counts)
    # The sum of integers does not depend on its order, so a row's chunks do not depend on the shape of the batch.
    weight = jnp.where(is_duplicate, 0, jnp.round(1024 * rarity)).astype(jnp.int32)
    score = jnp.where(exists, jnp.sum(jnp.where(holds, weight[:, :, None], 0), 1), -1)
    return jnp.where(jnp.arange(count) == 0, jnp.iinfo(jnp.int32).max, score)


def attention_scores(context: Context, chunk: int, query: int) -> Array:
    """Return float32[B, C], the attention of the newest cached token to the tokens of each chunk, in the last layer.

    It is a mean over the heads and over the tokens before the last `query` ones. The first chunk has the highest score.
    """
    batch, size = context.tokens.shape
    queries, positions = last_queries(context_target(context), context.tokens, context.cache, context.length - 1, 1)
    weights = attention_weights(queries[-1], positions, keys_of_last_layer(context.cache))
    count = -(-size // chunk)
    of_token = jnp.mean(weights, (1, 2, 3))[:, :size]
    of_token = jnp.pad(of_token, ((0, 0), (0, count * chunk - of_token.shape[1])))
    is_body = jnp.arange(count * chunk) < context.length[:, None] - query
    in_chunks = lambda x: jnp.sum(x.reshape(batch, count, chunk), 2)
    num_tokens = in_chunks(is_body)
    mean = in_chunks(jnp.where(is_body, of_token, 0)) / jnp.maximum(num_tokens, 1)
    score = jnp.where(num_tokens > 0, mean, -1)
    return jnp.where(jnp.arange(count) == 0, jnp.inf, score)
