"""Jacobi decoding in blocks, and CEED-VLA's early exit from it.

Santilli, Severino, Postolache, Maiorca, Mancusi, Marin, Rodolà: Accelerating Transformer Inference for Translation via
Parallel Decoding (ACL 2023), arXiv 2305.10427.
Song, Chen, Ding, Huang, Zhao, Wang, Li: CEED-VLA: Consistency Vision-Language-Action Model with Early-Exit Decoding
(2025), arXiv 2506.13725.

Rule: a block of n tokens begins as a guess y^0, drawn from the tokens of the prompt. One causal pass over it gives
  y^{j+1}_i = argmax p(. | text, y^j_{<i})  for all i at once,
so that every pass makes at least one more token final. The block ends at the fixed point y^{j+1} = y^j, which is the
greedy text, or after `iterations` passes as it is then; the next one goes on behind it.
Guarantee: lossy; without a limit of iterations (or with one of at least n) greedy.

A target that was distilled to jump to the fixed point from anywhere (Kou et al. 2024, CLLM, arXiv 2403.00835) needs few
passes: `specjax.training.methods.consistency` does that. Of others a pass makes little more than one token.

Deviations: keys and values of a block that ended early belong to its last guess but one. They are read again, together
with the first pass of the next block; `stale_keys=True` keeps them, as cheaper and further from the model.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import first_largest, take_along
from specjax.arrays.x64 import without_x64
from specjax.catalog import Method, Option
from specjax.decoders.loop_setup import written
from specjax.engine.packing import Prompts, new_tokens, pack
from specjax.engine.prefill import prefill
from specjax.engine.prepare import Settings
from specjax.engine.results import DecodeResult
from specjax.errors import UsageError
from specjax.numerics.sampling import fold_in, row_keys, uniform
from specjax.types import Array, PyTree, Target

METHOD = Method(
    name="ceed_vla",
    kind="decoder",
    guarantee="lossy",
    summary="decodes a block by Jacobi iterations with early exit; equals greedy decoding if they converge",
    paper="Song et al. 2025, arXiv 2506.13725; Santilli et al. 2023, arXiv 2305.10427",
    options=(
        Option("block", "int", 16, "tokens per block"),
        Option("iterations", "int", 8, "maximum number of passes per block"),
        Option("stale_keys", "yes_or_no", False, "keep the cache entries of guesses that did not converge"),
    ),
)


def ceed_vla(
    target: Target,
    prompts: Prompts,
    *,
    key: Array | int = 0,
    max_new_tokens: int,
    block: int = 16,
    iterations: int | None = 8,
    stale_keys: bool = False,
    eos=(),
    capacity: int | None = None,
    inputs: PyTree = None,
) -> DecodeResult:
    """Blocks of `block` tokens, each of at most `iterations` passes, in one compiled program. Greedy, or lossy.

    Args:
      iterations: None: until the fixed point, the greedy text. stale_keys: of blocks that ended before it.
      key: of the first guesses. prompts, eos, capacity, inputs: as for `decode`.

    `stats.target_passes` counts the passes. Raises: UsageError for a setting outside its range.
    """
    if block < 1:
        raise UsageError(f"block must be at least 1, not {block}")
    if iterations is not None and iterations < 1:
        raise UsageError(f"iterations must be at least 1, or None, not {iterations}")
    max_new_tokens = new_tokens(max_new_tokens)
    room = 2 * block
    tokens, lengths = pack(
        prompts, max_new_tokens, room, capacity or target.model.max_positions, target.model.vocab_size
    )
    limit = jnp.int32(block if iterations is None else min(iterations, block))
    return _run(
        target, inputs, tokens, lengths, row_keys(key, len(tokens)), Settings(eos=eos).ends(), limit,
        block=block, stale=stale_keys, max_new_tokens=max_new_tokens,
    )  # fmt: skip


class _State(NamedTuple):
    cache: PyTree  # of the first `held` tokens
    tokens: Array  # int32[B, L]
    length: Array  # int32[B]
    held: Array  # int32[B], below the length
    guess: Array  # int32[B, n], of the tokens behind the text
    passes: Array  # int32[B], of this block
    done: Array  # bool[B]
    hit_eos: Array  # bool[B]
    all_passes: Array  # int32[B]


@functools.partial(jax.jit, static_argnames=("block", "stale", "max_new_tokens"))
@without_x64
def _run(
    target: Target, inputs: PyTree, prompt: Array, prompts: Array, keys: Array, eos: Array, limit: Array, *, block: int,
    stale: bool, max_new_tokens: int,
) -> DecodeResult:  # fmt: skip
    model, params, n = target.model, target.params, block
    batch, index = len(prompts), jnp.arange(block)
    stop = prompts + max_new_tokens

    def first_guess(length: Array) -> Array:
        """int32[B, n]: tokens of the prompt."""
        drawn = uniform(fold_in(keys, length), n) * prompts[:, None]
        return take_along(prompt, jnp.minimum(drawn.astype(jnp.int32), prompts[:, None] - 1), 1)

    def look(state: _State, width: int) -> tuple[PyTree, Array]:
        """A pass over `width` tokens, those that the cache lacks and then the guess: what is pending, and the next
        guess."""
        positions = state.held[:, None] + jnp.arange(width)
        behind = positions - state.length[:, None]
        text = take_along(state.tokens, jnp.minimum(positions, state.tokens.shape[1] - 1), 1)
        fed = jnp.where(behind < 0, text, take_along(state.guess, jnp.clip(behind, 0, n - 1), 1))
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((width, width), bool)), (batch, width, width))
        output, pending = model.forward(params, fed, state.cache, positions=positions, mask=mask)
        said = first_largest(output.logits)
        return pending, take_along(said, (state.length - state.held - 1)[:, None] + index, 1)

    def round_of(state: _State, width: int) -> _State:
        pending, guess = look(state, width)
        passes = state.passes + 1
        agrees = jnp.cumprod(guess == state.guess, 1)
        over = ~state.done & (jnp.all(agrees == 1, 1) | (passes >= limit))
        ends = jnp.any(guess[:, :, None] == eos, 2)
        count = jnp.minimum(jnp.where(jnp.any(ends, 1), jnp.argmax(ends, 1) + 1, n), stop - state.length)
        count = jnp.where(over, count, 0)
        # All that was read of the text but its last token; of a block that is over also that, and what was read of it.
        unread = state.length - state.held
        of_block = n if stale else 1 + jnp.sum(agrees[:, : n - 1], 1)
        taken = jnp.where(state.done, 0, unread - 1 + jnp.where(over, of_block, 0))
        path = jnp.broadcast_to(jnp.arange(width), (batch, width))
        place = jnp.where(index < count[:, None], state.length[:, None] + index, state.tokens.shape[1])
        length = state.length + count
        hit_eos = state.hit_eos | (over & jnp.any(ends & (index < count[:, None]), 1))
        return _State(
            cache=model.commit(state.cache, pending, path, taken),
            tokens=state.tokens.at[jnp.arange(batch)[:, None], place].set(guess, mode="drop"),
            length=length,
            held=state.held + taken,
            guess=jnp.where(over[:, None], first_guess(length), jnp.where(state.done[:, None], state.guess, guess)),
            passes=jnp.where(over, 0, passes),
            done=state.done | hit_eos | (length >= stop),
            hit_eos=hit_eos,
            all_passes=state.all_passes + ~state.done,
        )

    def body(state: _State) -> _State:
        if stale or n == 1:
            return round_of(state, n)
        catching_up = jnp.any(~state.done & (state.length - state.held > 1))
        return jax.lax.cond(catching_up, lambda: round_of(state, 2 * n - 1), lambda: round_of(state, n))

    cache = model.start_cache(params, inputs, prompts, prompt.shape[1])
    nothing = jnp.zeros((batch,), jnp.int32)
    state = _State(
        prefill(model, params, cache, prompt, prompts - 1), prompt, prompts, prompts - 1, first_guess(prompts), nothing,
        nothing >= max_new_tokens, nothing > 0, nothing,
    )  # fmt: skip
    state = jax.lax.while_loop(lambda state: ~jnp.all(state.done), body, state)
    return written(prompts, state.tokens, state.length, state.all_passes, state.hit_eos, max_new_tokens)
