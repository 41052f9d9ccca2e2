"""RAPID: a draft model that reads only the chunks of a long prompt that bear on its end.

Chen, Feng, Ni, Li, Shieh: Long-Context Inference with Retrieval-Augmented Speculative Decoding (ICML 2025),
arXiv 2502.20330.

Rule: split the prompt into chunks, score each against the query, and keep the best ones, in document order, up to a
budget. The draft model's prompt is these chunks and the query; with j tokens of output its positions are
L_short + j where the target's are L_prompt + j. It drafts as in `two_model`, with its true q. Any model may draft, a
larger one or the target itself too: what is saved is the long context, not the parameters.
Guarantee: distribution. Which chunks are kept depends on the prompt only. With the rule `specjax.verifiers.rapid`, the
other half of the paper, it is lossy.
Deviations: the query is the end of the prompt, the last `query` tokens, which with the first chunk (bos, system prompt)
are always kept; the authors fill two templates. Chunks are cut by count, not at ends of sentences, and there is no
threshold: the budget is filled. A chunk's score needs no second model: the sum of log(chunks / chunks that hold it)
over the query's distinct tokens that it holds. (The authors' code joins a sentence embedder's choice and BM25's.) On
WikiText-2 in SmolLM2's tokens, 64 chunks of 128 and as query the 64 tokens behind one of them, that one is among the
best four in 48 % of 768 trials, and in 22 % to 26 % by the cosine of mean token embeddings of SmolLM2. Where the output
outgrows the draft model's cache, chunks are chosen anew, of the whole text by its end; the authors' outputs are short.
The confidence at which the authors stop drafting is not here.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from specjax import trees
from specjax.arrays.indexing import take_along
from specjax.catalog import Method, Option, shared
from specjax.drafters.model.two_model import State
from specjax.drafters.model.two_model import functions as two_model_functions
from specjax.engine.prefill import CHUNK, prefill
from specjax.errors import UsageError
from specjax.trees import Builder
from specjax.types import Array, Context, Drafter, Model, Target

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
        Option("max_new_tokens", "int", 1024, "maximum number of new tokens, for the size of the draft model's cache"),
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
    chunk: int = 128,
    query: int = 64,
    max_new_tokens: int = 1024,
) -> Drafter:
    """A chain of `num_tokens` tokens of `draft`, or a `tree`, after at most `budget` tokens of the prompt.

    Args:
      budget: largest prompt of the draft model, in tokens, the query included; a prompt within it is read whole.
      chunk: tokens per chunk; 128 in the authors' script, 512 in their README.
      query: tokens at the end of the prompt that say what is relevant.
      max_new_tokens: room for output in the draft's cache; a row that outgrows it is cut down to `budget` once more. A
        draft model that cannot rewind drafts for it no longer, and no longer runs once no row fits.

    State: that of `two_model`, with a cache of about budget + max_new_tokens slots.
    Raises: UsageError for a setting below its minimum.
    """
    if num_tokens < 1:
        raise UsageError(f"num_tokens must be at least 1, not {num_tokens}")
    if chunk < 1:
        raise UsageError(f"chunk must be at least 1, not {chunk}")
    if query < LAG:
        raise UsageError(f"query must be at least {LAG}, not {query}")
    if budget < chunk + query:
        raise UsageError(f"budget must hold a chunk and the query, {chunk + query} tokens at least; it is {budget}")
    if max_new_tokens < 1:
        raise UsageError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
    builder = tree or trees.chain(num_tokens)
    return _functions(draft.model, builder, budget, chunk, query, max_new_tokens).replace(params=draft.params)


@functools.cache
def _functions(model: Model, builder: Builder, budget: int, chunk: int, query: int, max_new_tokens: int) -> Drafter:
    longest = budget + max_new_tokens
    slots = longest + max(builder.num_nodes, CHUNK) + 1  # with slack as `buffer_size` has it

    def shorten(context: Context) -> Context:
        if context.tokens.shape[1] <= budget:  # no text can outgrow it
            return context
        return retrieve(context, budget=budget, chunk=chunk, query=query, slots=slots)

    drafter = two_model_functions(model, builder, LAG, shorten)

    def propose(params, keys, state: State, context: Context, limit):
        outgrown = context.length - state.dropped > longest
        if model.rewind is None:
            limit = jnp.where(outgrown, 0, limit)
        elif context.tokens.shape[1] > longest:
            outgrown &= limit > 0
            # A branch would copy the cache; a loop of one turn or none writes in place.
            again = lambda _, state: read_again(params, state, context, outgrown)
            state = jax.lax.fori_loop(0, jnp.any(outgrown).astype(jnp.int32), again, state)
        return drafter.propose(params, keys, state, context, limit)

    def read_again(params, state: State, context: Context, rows: Array) -> State:
        """With the text cut down and read anew for `rows` bool[B]."""
        short = shorten(context)
        held = jnp.maximum(short.length - LAG, 0)
        cache = model.rewind_cache(state.cache, jnp.where(rows, 0, state.held))
        cache = prefill(model, params, cache, short.tokens, jnp.where(rows, held, 0))
        dropped = jnp.where(rows, context.length - short.length, state.dropped)
        return State(cache, jnp.where(rows, held, state.held), dropped)

    return drafter.replace(propose=propose)


def retrieve(context: Context, *, budget: int, chunk: int, query: int, slots: int) -> Context:
    """The prompts cut down to `budget` tokens, in a buffer of at most `slots`. Shorter ones stay as they are."""
    tokens, length = context.tokens, context.length[:, None]
    size = tokens.shape[1]
    slots = min(slots, size)
    scores = chunk_scores(tokens, context.length, chunk, query)
    count = scores.shape[1]
    _, best = jax.lax.top_k(scores, min((budget - query) // chunk, count))
    chosen = jnp.any(best[:, :, None] == jnp.arange(count), 1)  # bool[B, C]
    position = jnp.arange(size)
    kept = jnp.repeat(chosen, chunk, 1)[:, :size] | (position >= length - query) | (length <= budget)
    kept &= position < length
    place = jnp.where(kept, jnp.cumsum(kept, 1) - 1, slots)
    rows = jnp.arange(tokens.shape[0])[:, None]
    short = jnp.zeros((tokens.shape[0], slots), tokens.dtype).at[rows, place].set(tokens, mode="drop")
    return context._replace(tokens=short, length=jnp.sum(kept, 1, dtype=jnp.int32))


def chunk_scores(tokens: Array, length: Array, chunk: int, query: int) -> Array:
    """int32[B, C]: how much each chunk of a text has to do with its last `query` tokens; the first one the most.

    Lowest for chunks that hold nothing but query and padding. Each text has more than `query` tokens, or any scores.
    """
    batch, size = tokens.shape
    count = -(-size // chunk)
    padded = jnp.pad(tokens, ((0, 0), (0, count * chunk - size)))
    body = jnp.arange(count * chunk) < length[:, None] - query
    asked = take_along(tokens, jnp.maximum(length[:, None] - query + jnp.arange(query), 0), 1)
    again = jnp.any((asked[:, :, None] == asked[:, None, :]) & jnp.tri(query, k=-1, dtype=bool), 2)  # seen before
    same = (asked[:, :, None] == padded[:, None, :]) & body[:, None, :]
    holds = jnp.any(same.reshape(batch, query, count, chunk), 3)  # bool[B, Q, C]
    exists = jnp.arange(count) * chunk < length[:, None] - query
    held_by = jnp.maximum(jnp.sum(holds, 2), 1)
    rarity = jnp.log(jnp.sum(exists, 1)[:, None] / held_by)
    # Integers: their sum does not depend on its order, nor a row's chunks on the shape of the batch.
    weight = jnp.where(again, 0, jnp.round(1024 * rarity)).astype(jnp.int32)
    score = jnp.where(exists, jnp.sum(jnp.where(holds, weight[:, :, None], 0), 1), -1)
    return jnp.where(jnp.arange(count) == 0, jnp.iinfo(jnp.int32).max, score)
