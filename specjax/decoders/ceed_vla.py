"""Jacobi decoding in blocks, and CEED-VLA's early exit from it.

Santilli, Severino, Postolache, Maiorca, Mancusi, Marin, Rodolà: Accelerating Transformer Inference for Translation via
Parallel Decoding (ACL 2023), arXiv 2305.10427.
Song, Chen, Ding, Huang, Zhao, Wang, Li: CEED-VLA: Consistency Vision-Language-Action Model with Early-Exit Decoding
(2025), arXiv 2506.13725.

Rule: a block of n tokens starts as a guess y^0, drawn from the tokens of the prompt. One causal pass over it computes
  y^{j+1}_i = argmax p(. | text, y^j_{<i})  for all i in parallel,
so every pass makes at least one more token final. The block ends at the fixed point y^{j+1} = y^j, which is the greedy
text, or after `iterations` passes. Then the next block starts.
Guarantee: lossy; greedy without a limit of iterations, or with a limit of at least n.

A target that was distilled to jump to the fixed point from any guess (Kou et al. 2024, CLLM, arXiv 2403.00835) needs
few passes; see `specjax.training.methods.consistency`. For other targets a pass decides little more than one token.

Deviations: keys and values of a block that ended early belong to its second to last guess. They are computed again,
together with the first pass of the next block. `stale_keys=True` does not recompute them, which is cheaper and less
exact.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import first_largest, take_along
from specjax.arrays.modes import with_standard_modes
from specjax.catalog import Method, Option
from specjax.decoders.loop_setup import LoopInputs, build_result, check_rows, init_loop
from specjax.engine.packing import Prompts
from specjax.engine.prefill import prefill
from specjax.engine.prepare import Settings
from specjax.engine.results import DecodeResult
from specjax.engine.value_checks import are_sound
from specjax.numerics.sampling import fold_in, uniform
from specjax.numerics.validation import MAX_NODES, check_integer
from specjax.types import Array, PyTree, Target

METHOD = Method(
    name="ceed_vla",
    kind="decoder",
    guarantee="lossy",
    summary="decodes a block by Jacobi iterations with early exit; equals greedy decoding if they converge",
    paper="Song et al. 2025, arXiv 2506.13725; Santilli et al. 2023, arXiv 2305.10427",
    options=(
        Option("block", "int", 16, "tokens per block"),
        Option("iterations", "int", 8, "maximum number of passes per block; as many as its tokens: the greedy text"),
        Option("stale_keys", "yes_or_no", False, "keep the cache entries of guesses that did not converge"),
    ),
    arguments=("target",),
    settings=("key",),
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
    """Decode blocks of `block` tokens in at most `iterations` passes each, in one compiled program.

    Args:
      iterations: maximum number of passes per block; None: iterate to the fixed point, the greedy text.
      stale_keys: do not recompute the cache entries of blocks that ended before the fixed point.
      key: PRNG key of the first guesses.
      prompts, eos, capacity, inputs: see `decode`.

    Returns: DecodeResult, in which `stats.target_passes` counts the passes.

    Raises: UsageError for a setting out of range, or a model that returns NaN or Inf.
    """
    check_options(block=block, iterations=iterations)
    settings = Settings(eos=eos, capacity=capacity)
    loop_inputs = init_loop(
        target, prompts, settings, key=key, max_new_tokens=max_new_tokens, room=2 * block, inputs=inputs
    )
    limit = jnp.int32(block if iterations is None else min(iterations, block))
    result = _run(target, loop_inputs, limit, block=block, stale=stale_keys, max_new_tokens=int(max_new_tokens))
    return check_rows(result, target)


def check_options(*, block: int, iterations: int | None) -> Settings:
    """Check the options, and return the settings, which are greedy. Raises: UsageError."""
    check_integer("block", block, 1, MAX_NODES)
    if iterations is not None:
        check_integer("iterations", iterations, 1)
    return Settings()


class State(NamedTuple):
    cache: PyTree  # cache of the first `num_cached` tokens
    tokens: Array  # int32[B, L]
    length: Array  # int32[B]
    num_cached: Array  # int32[B], number of cached tokens, below the length
    guess: Array  # int32[B, n], the tokens after the text
    passes: Array  # int32[B], passes of the current block
    done: Array  # bool[B]
    finite: Array  # bool[B], false for rows that failed
    hit_eos: Array  # bool[B]
    all_passes: Array  # int32[B]


@functools.partial(jax.jit, static_argnames=("block", "stale", "max_new_tokens"))
@with_standard_modes
def _run(
    target: Target, loop_inputs: LoopInputs, limit: Array, *, block: int, stale: bool, max_new_tokens: int
) -> DecodeResult:
    model, params, n = target.model, target.params, block
    prompt, prompts, stop, eos = loop_inputs.tokens, loop_inputs.prompts, loop_inputs.stop, loop_inputs.eos
    batch, index = len(prompts), jnp.arange(block)

    def first_guess(length: Array) -> Array:
        """Draw a guess int32[B, n] from the tokens of the prompt."""
        drawn = uniform(fold_in(loop_inputs.keys, length), n) * prompts[:, None]
        return take_along(prompt, jnp.minimum(drawn.astype(jnp.int32), prompts[:, None] - 1), 1)

    def run_pass(state: State, width: int) -> tuple[PyTree, Array, Array]:
        """Run a pass over `width` tokens: the tokens that are not cached yet, then the guess.

        Returns: the pending cache entries, the next guess, and bool[B], False for rows without a next guess.
        """
        positions = state.num_cached[:, None] + jnp.arange(width)
        offset = positions - state.length[:, None]
        text = take_along(state.tokens, jnp.minimum(positions, state.tokens.shape[1] - 1), 1)
        fed = jnp.where(offset < 0, text, take_along(state.guess, jnp.clip(offset, 0, n - 1), 1))
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((width, width), bool)), (batch, width, width))
        output, pending = model.forward(params, fed, state.cache, positions=positions, mask=mask)
        predictions, sound = first_largest(output.logits), are_sound(output.logits)
        slots = (state.length - state.num_cached - 1)[:, None] + index
        return pending, take_along(predictions, slots, 1), jnp.all(take_along(sound, slots, 1), 1)

    def run_round(state: State, width: int) -> State:
        pending, guess, sound = run_pass(state, width)
        passes, finite = state.passes + 1, state.finite & (sound | state.done)
        agrees = jnp.cumprod(guess == state.guess, 1)
        is_finished = ~state.done & finite & (jnp.all(agrees == 1, 1) | (passes >= limit))
        ends = jnp.any(guess[:, :, None] == eos, 2)
        count = jnp.minimum(jnp.where(jnp.any(ends, 1), jnp.argmax(ends, 1) + 1, n), stop - state.length)
        count = jnp.where(is_finished, count, 0)
        # Commit the text that was read, without its last token. If the block is finished, also commit this token and
        # the exact tokens of the block.
        unread = state.length - state.num_cached
        block_tokens = n if stale else 1 + jnp.sum(agrees[:, : n - 1], 1)
        committed = jnp.where(state.done, 0, unread - 1 + jnp.where(is_finished, block_tokens, 0))
        path = jnp.broadcast_to(jnp.arange(width), (batch, width))
        target_slots = jnp.where(index < count[:, None], state.length[:, None] + index, state.tokens.shape[1])
        length = state.length + count
        hit_eos = state.hit_eos | (is_finished & jnp.any(ends & (index < count[:, None]), 1))
        return State(
            cache=model.commit(state.cache, pending, path, committed),
            tokens=state.tokens.at[jnp.arange(batch)[:, None], target_slots].set(guess, mode="drop"),
            length=length,
            num_cached=state.num_cached + committed,
            guess=jnp.where(
                is_finished[:, None], first_guess(length), jnp.where(state.done[:, None], state.guess, guess)
            ),
            passes=jnp.where(is_finished, 0, passes),
            done=state.done | hit_eos | ~finite | (length >= stop),
            finite=finite,
            hit_eos=hit_eos,
            all_passes=state.all_passes + ~state.done,
        )

    def body(state: State) -> State:
        if stale or n == 1:
            return run_round(state, n)
        has_unread = jnp.any(~state.done & (state.length - state.num_cached > 1))
        return jax.lax.cond(has_unread, lambda: run_round(state, 2 * n - 1), lambda: run_round(state, n))

    cache = model.start_cache(params, loop_inputs.inputs, prompts, prompt.shape[1])
    zeros = jnp.zeros((batch,), jnp.int32)
    state = State(
        prefill(model, params, cache, prompt, prompts - 1), prompt, prompts, prompts - 1, first_guess(prompts), zeros,
        ~loop_inputs.usable, loop_inputs.usable, zeros > 0, zeros,
    )  # fmt: skip
    state = jax.lax.while_loop(lambda state: ~jnp.all(state.done), body, state)
    return build_result(
        prompts, state.tokens, state.length, state.all_passes, state.hit_eos, state.finite, max_new_tokens
    )
