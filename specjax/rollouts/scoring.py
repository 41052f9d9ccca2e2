"""Log-probabilities of finished texts, by passes whose form does not depend on the way in which a text was drawn.

Passes of different widths sum in different orders, so the log-probabilities that a sampler returns differ by about 1e-4
in float32 between drafts and plain decoding. They differ as much from those of float64, and from those of a trainer. A
score reads each text alone, in chunks of one size. So a text has the same bits in every batch, whatever drew it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays.indexing import take_along
from specjax.arrays.modes import jit
from specjax.engine.prefill import CHUNK, chunk_reader, in_chunks, wide_chunk
from specjax.engine.prepare import Settings
from specjax.engine.step import round_up
from specjax.errors import UsageError
from specjax.models.requirements import check_complete_cache
from specjax.numerics.sampling import is_greedy, warp
from specjax.rollouts.store import prompt_of_each
from specjax.types import Array, PyTree, Sampling, Target

Form = Literal["processed", "tempered", "raw"]


def score(
    target: Target,
    prompts: Sequence[Sequence[int] | np.ndarray],
    samples: Sequence[Sequence[int] | np.ndarray],
    *,
    form: Form = "tempered",
    length: int | None = None,
    **settings: Any,
) -> list[np.ndarray]:
    """Return log p float32[n] of the tokens of each sample, given its prompt.

    On one device each text is read alone. Its bits depend only on the weights, the text, the settings and `length`, not
    on the other texts. On a mesh all texts are read together, and the bits depend on their number too.

    Args:
      prompts, samples: token ids. Each prompt has equally many samples, in succession. A sample may be empty.
      form: as `logprobs` of `specjax.decode`. Texts have no processors here, so "untempered" would equal "raw".
      length: number of tokens of the longest text that a later call may have. Calls with one length share a program,
        and equal texts have equal bits in them. Default: the longest text of this call.
      settings: temperature, top_k, top_p and min_p of the draw, as in `specjax.decode`: one value, or one per sample.

    Raises: UsageError for an empty prompt, a text beyond the model's limit or `length`, or samples that are not equally
      many for each prompt.
    """
    prompts = prompt_of_each(prompts, len(samples))
    if form not in get_args(Form):
        raise UsageError(f"form must be raw, tempered or processed, not {form!r}")
    check_complete_cache(target.model, "score")
    sampling = Settings(**settings).to_sampling()
    starts = np.array([len(prompt) for prompt in prompts], np.int32)
    lengths = starts + np.array([len(sample) for sample in samples], np.int32)
    limit = target.model.max_positions if length is None else length
    if not 1 <= starts.min() <= lengths.max() <= limit:
        raise UsageError(
            f"prompts must not be empty, and texts must have at most {limit} tokens; the shortest prompt has "
            f"{starts.min()} tokens, and the longest text has {lengths.max()}"
        )
    tokens = np.zeros((len(prompts), round_up((length or int(lengths.max())) + CHUNK)), np.int32)
    for row, prompt, sample in zip(tokens, prompts, samples, strict=True):
        row[: len(prompt) + len(sample)] = [*prompt, *sample]
    log_p = np.asarray(_score(target, tokens, lengths, sampling, form))
    return [row[start - 1 : end - 1] for row, start, end in zip(log_p, starts, lengths, strict=True)]


@jit(static_argnames="form")
def _score(target: Target, tokens: Array, lengths: Array, sampling: Sampling, form: Form) -> Array:
    """Return log p float32[B, L] of the token after each place of texts int32[B, L]; 0 after their ends."""
    column = lambda value: None if value is None else jnp.broadcast_to(value, lengths.shape)
    per_row = Sampling(*map(column, sampling))
    if target.model.mesh is not None:
        return _score_rows(target, tokens, lengths, per_row, form)

    def one_row(row: tuple[Array, Array, Sampling]) -> Array:
        texts, sizes, options = jax.tree.map(lambda x: x[None], row)
        return _score_rows(target, texts, sizes, options, form)[0]

    return jax.lax.map(one_row, (tokens, lengths, per_row))


def _score_rows(target: Target, tokens: Array, lengths: Array, sampling: Sampling, form: Form) -> Array:
    """Return the scores of some rows, which are read together."""
    model, params = target.model, target.params
    batch, size = tokens.shape
    following = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))

    def read(carry: tuple[Array, Array], window: Array, count: Array, output: PyTree) -> tuple[Array, Array]:
        start, log_p = carry
        chunk = window.shape[1]
        next_tokens = jax.lax.dynamic_slice_in_dim(following, start, chunk, 1)
        values = jnp.where(jnp.arange(chunk) < count[:, None], _log_p(output.logits, next_tokens, sampling, form), 0.0)
        return start + chunk, jax.lax.dynamic_update_slice_in_dim(log_p, values, start, 1)

    cache = model.start_cache(params, None, lengths, size)
    carry = cache, (jnp.int32(0), jnp.zeros((batch, size)))
    read_chunk = chunk_reader(model, params, tokens, lengths - 1, read)
    return in_chunks(read_chunk, carry, jnp.max(lengths) - 1, wide_chunk(batch, slots=size), CHUNK)[1][1]


def _log_p(logits: Array, tokens: Array, sampling: Sampling, form: Form) -> Array:
    """Return log p float32[B, T] of tokens int32[B, T] by logits [B, T, V]."""
    batch = len(tokens)
    greedy = is_greedy(sampling, batch)
    if form != "processed":
        heat = jnp.float32(1) if sampling.temperature is None or form == "raw" else sampling.temperature
        sampling = Sampling(jnp.broadcast_to(jnp.where(greedy, 1.0, heat), (batch,)))
    elif sampling.temperature is None:
        return jnp.zeros(tokens.shape)
    logits = warp(logits.astype(jnp.float32), sampling)
    log_p = take_along(logits, tokens[..., None], 2)[..., 0] - jax.nn.logsumexp(logits, -1)
    return jnp.where(greedy[:, None] & (form == "processed"), 0.0, log_p)
