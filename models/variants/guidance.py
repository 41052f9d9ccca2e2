"""Classifier-free guidance as a target: each row of a batch runs as a pair of rows.

Ho, Salimans: Classifier-Free Diffusion Guidance (2022), arXiv 2207.12598. Autoregressive models of images such
as LlamaGen (Sun et al. 2024, arXiv 2406.06525) use it.

Rule: logits = u + scale (c - u). c are the logits after the prompt, u those after an unconditional prompt. The rows of
a pair read the same tokens after their prompts, but each has its own length and its own positions. Processors,
temperature and filters apply to the guided logits. So every drafter and every rule keeps its guarantee for their
distribution.

The unconditional prompts are the `inputs` of the model. `init_cache` reads them. The tokens of the other prompts never
enter the unconditional rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays import batch_axes, platforms, texts
from specjax.arrays.indexing import take_along
from specjax.errors import UsageError
from specjax.models.image_tokens.captions import CaptionConfig
from specjax.numerics.global_arrays import gather
from specjax.numerics.validation import check_range, pad_token_lists
from specjax.types import Array, Model, Output, PyTree, Sublayers, Target

CHUNK = 128
"""Tokens of an unconditional prompt that one pass reads."""
PAIR = 2
"""Rows of a pair: the conditional row, then the unconditional one."""


class Unconditional(NamedTuple):
    """The unconditional prompts of a batch."""

    tokens: Array  # int32[B, U], then unspecified values
    length: Array  # int32[B]
    inputs: PyTree = None  # the inputs of the target for the prompts, and those for the unconditional ones


class GuidedCache(NamedTuple):
    """The cache of the base model, whose arrays have an axis of PAIR rows behind the row axis."""

    base: PyTree
    prompt_length: Array  # int32[B], tokens of the prompt
    start: Array  # int32[B], tokens of the unconditional prompt without the last one
    last: Array  # int32[B], last token of the unconditional prompt
    scale: Array  # float32[B]


class GuidedPending(NamedTuple):
    """Pending entries of the base model, with the axis of PAIR rows, and the positions of the new tokens."""

    base: PyTree
    positions: Array  # int32[B, T], in the conditional rows


def unconditional(
    prompts: Sequence[Sequence[int]], length: int | None = None, *, inputs: tuple[PyTree, PyTree] | None = None
) -> Unconditional:
    """Return the inputs of a guided target: one unconditional prompt per row, as token lists of any lengths.

    The last token of the unconditional prompt takes the place of the last token of the prompt.

    Args:
      length: tokens of the padded prompts, such as those of the longest one of a server. None: 1, or else the smallest
        multiple of 32.
      inputs: for a target with inputs, those of the prompts and those of the unconditional prompts.

    Raises: UsageError for no prompts, for a prompt that is empty, longer than `length` or no list of token ids, and for
      inputs that are not two.
    """
    if inputs is not None and not (type(inputs) is tuple and len(inputs) == PAIR):
        raise UsageError(
            "the inputs of unconditional prompts must be a pair, those of the prompts and those of the unconditional "
            f"prompts, not a {type(inputs).__name__}"
        )
    return Unconditional(*pad_token_lists("unconditional prompts", prompts, length, shortest=1), inputs)


def guided(target: Target, scale: Array | float, *, first: int = 0, end: int | None = None) -> Target:
    """Return `target` under classifier-free guidance. It needs `inputs=unconditional(...)`, one prompt per row.

    Every method is exact for the guided target. A pass runs two rows for each row of the batch, and reads the weights
    once. Hidden states and taps are those of the conditional rows. A draft model can be guided too: it reads the same
    inputs.

    Args:
      scale: 1 is the target itself, 0 the unconditional law. A number, or float32[B] with one scale per prompt. Another
        scale needs no compilation.
      first, end: tokens of the text, counted from 0, to which guidance applies. `end` is excluded; None: no end.

    A model that reads images reads texts only under guidance.

    Raises: UsageError for a scale or a range below 0, and for models with recurrent layers, compressed caches or other
      inputs, and for a mesh.
    """
    base = target.model
    capabilities = base.capabilities
    has_other_inputs = capabilities.requires_inputs and not isinstance(base.config, CaptionConfig)
    if has_other_inputs or capabilities.reads_in_order or base.finish_prompt or base.mark_prompt:
        raise UsageError(
            f"{base.name} cannot be guided, because its cache depends on more than the tokens; use a decoder whose "
            "layers all attend, without compression"
        )
    if base.mesh is not None:
        raise UsageError(f"{base.name} is sharded over a mesh, which guidance does not support yet; use one device")
    check_range("scale", scale, lambda x: (x >= 0) & (x < np.inf), "at least 0 and finite")
    check_range("first", first, lambda x: (x >= 0) & (x == x // 1), "a whole number of at least 0")
    check_range("end", end, lambda x: (x >= first) & (x == x // 1), "a whole number of at least first")
    stop = np.iinfo(np.int32).max if end is None else end
    places = jnp.asarray([first, stop], jnp.int32)
    return Target(_model(base), {"base": target.params, "scale": jnp.asarray(scale, jnp.float32), "range": places})


def combine(conditional: Array, unconditional: Array, scale: Array) -> Array:
    """Return u + scale (c - u) of logits c and u. Tokens that are impossible given the prompt stay impossible."""
    guided = unconditional + scale * (conditional - unconditional)
    return jnp.where(conditional > -jnp.inf, guided, -jnp.inf)


@functools.cache
def _model(base: Model) -> Model:
    """Build the guided model."""

    def init_cache(params, inputs, batch: int, capacity: int) -> GuidedCache:
        if not isinstance(inputs, Unconditional):
            raise UsageError(
                f"the guided model {base.name} needs unconditional prompts; pass "
                "inputs=specjax.models.unconditional(...), or use the target without guidance"
            )
        scale = params["scale"]
        if scale.shape not in ((), (1,), (batch,)):
            raise UsageError(f"scale must be one number or one per prompt, {batch}, but it has the shape {scale.shape}")
        tokens, length, of_base = inputs
        if of_base is not None and not base.capabilities.requires_inputs:
            raise UsageError(f"{base.name} reads texts only under guidance; leave out inputs of unconditional(...)")
        pairs = None if of_base is None else jax.tree.map(_pairs, *of_base)
        cache = base.init_cache(params["base"], pairs, PAIR * batch, capacity + tokens.shape[1])
        cache = _read_prompts(base, params["base"], cache, tokens, length - 1)
        last = take_along(tokens, length[:, None] - 1, 1)[:, 0]
        # A caller that does not set the prompt length has prompts of one token.
        one = jnp.ones((batch,), jnp.int32)
        return GuidedCache(split_rows(base, cache), one, length - 1, last, jnp.broadcast_to(scale, (batch,)))

    def check_inputs(inputs, tokens: Array, lengths: Array, max_new_tokens: int) -> None:
        if not isinstance(inputs, Unconditional):  # `init_cache` refuses it
            return
        if base.check_inputs is not None and inputs.inputs is not None:
            conditional, null = inputs.inputs
            base.check_inputs(conditional, tokens, lengths, max_new_tokens)
            try:
                base.check_inputs(null, inputs.tokens, inputs.length, max_new_tokens)
            except UsageError as error:
                raise UsageError(f"unconditional {error}") from None
        null_tokens, null_lengths = gather((inputs.tokens, inputs.length))
        for row, (prompt, length) in enumerate(zip(null_tokens, null_lengths, strict=True)):
            unknown = [token for token in prompt[:length] if not 0 <= token < base.vocab_size]
            if unknown:
                raise UsageError(
                    f"unconditional prompt {row} has the token {unknown[0]}, outside of the model's vocabulary of "
                    f"{base.vocab_size}"
                )
            if length + max_new_tokens > base.max_positions:
                raise UsageError(
                    f"unconditional prompt {row} has {length} tokens and max_new_tokens is {max_new_tokens}, more than "
                    f"the {base.max_positions} positions of {base.name}; shorten it, or lower max_new_tokens"
                )

    def mark_prompt(cache: GuidedCache, length: Array) -> GuidedCache:
        return cache._replace(prompt_length=length)

    def forward(
        params, tokens, cache: GuidedCache, *, positions, mask, taps=(), earlier: GuidedPending | None = None,
        layers: Sublayers | None = None, group: int = 1,
    ) -> tuple[Output, GuidedPending]:  # fmt: skip
        place = positions - cache.prompt_length[:, None] + 1  # 0: the last token of the prompt
        null_tokens = jnp.where(place == 0, cache.last[:, None], tokens)
        null_positions = jnp.maximum(cache.start[:, None] + place, 0)
        keys = place if earlier is None else jnp.concatenate(
            [earlier.positions - cache.prompt_length[:, None] + 1, place], 1
        )  # fmt: skip
        count = tokens.shape[1]
        is_self = jnp.arange(keys.shape[1]) == jnp.arange(count)[:, None] + keys.shape[1] - count
        mask = texts.traced_mask(mask)
        null_mask = mask & ((keys >= 0)[:, None] | is_self)
        optional: dict[str, Any] = {} if not taps else {"taps": taps}
        optional |= {} if earlier is None else {"earlier": merge_rows(base, earlier.base)}
        optional |= {} if layers is None else {"layers": Sublayers(*(jnp.repeat(x, PAIR, 0) for x in layers))}
        optional |= {} if group == 1 else {"group": group}
        output, pending = base.forward(
            params["base"], _pairs(tokens, null_tokens), merge_rows(base, cache.base),
            positions=_pairs(positions, null_positions), mask=_pairs(mask, null_mask), **optional,
        )  # fmt: skip
        first, end = params["range"]
        scale = jnp.where((place >= first) & (place < end), cache.scale[:, None], 1.0)[:, :, None]
        both = output.logits.reshape(-1, PAIR, *output.logits.shape[1:])
        of_conditional = lambda x: x.reshape(-1, PAIR, *x.shape[1:])[:, 0]
        logits = jnp.where(scale == 1, both[:, 0], combine(both[:, 0], both[:, 1], scale))
        output = Output(
            logits, of_conditional(output.hidden), tuple(map(of_conditional, output.taps)), experts=output.experts
        )
        return output, GuidedPending(split_rows(base, pending), positions)

    def commit(cache: GuidedCache, pending: GuidedPending, path: Array, num_nodes: Array) -> GuidedCache:
        path = jnp.asarray(path)
        index = jnp.arange(path.shape[1])
        on_path = take_along(pending.positions, jnp.maximum(path, 0), 1)
        in_prompt = (on_path < cache.prompt_length[:, None] - 1) & (index < num_nodes[:, None])
        skipped = jnp.sum(in_prompt, 1, dtype=jnp.int32)  # these tokens do not enter the unconditional row
        null_path = take_along(path, jnp.minimum(index + skipped[:, None], path.shape[1] - 1), 1)
        pairs = merge_rows(base, pending.base), _pairs(path, null_path), _pairs(num_nodes, num_nodes - skipped)
        committed = _in_a_loop(lambda cache: base.commit(cache, *pairs), merge_rows(base, cache.base), num_nodes)
        return cache._replace(base=split_rows(base, committed))

    def rewind(cache: GuidedCache, length: Array) -> GuidedCache:
        of_text = jnp.maximum(length - cache.prompt_length + 1, 0)
        remaining = base.rewind_cache(merge_rows(base, cache.base), _pairs(length, cache.start + of_text))
        return cache._replace(base=split_rows(base, remaining))

    def widen(pending: GuidedPending, slots: int) -> GuidedPending:
        wide = base.widen(merge_rows(base, pending.base), slots)
        return GuidedPending(split_rows(base, wide), batch_axes.widen(pending.positions, slots))

    def insert(pending: GuidedPending, new: GuidedPending, place) -> GuidedPending:
        of_pairs = jnp.repeat(place, PAIR, 0) if jnp.ndim(place) else place
        wide = base.insert(merge_rows(base, pending.base), merge_rows(base, new.base), of_pairs)
        positions = batch_axes.insert(pending.positions, new.positions, place)
        return GuidedPending(split_rows(base, wide), positions)

    def axes(arrays: GuidedCache | GuidedPending) -> PyTree:
        return batch_axes.rows_first(arrays)._replace(base=_axes_of_pairs(base, arrays.base))

    of_base = lambda function: function and (lambda params, *arguments: function(params["base"], *arguments))
    read = base.pass_params
    return base._replace(
        init_cache=init_cache,
        forward=forward,
        commit=commit,
        mark_prompt=mark_prompt,
        check_inputs=check_inputs,
        rewind=None if base.rewind is None else rewind,
        widen=widen,
        insert=insert,
        axes=axes,
        embed=of_base(base.embed),
        unembed=of_base(base.unembed),
        head=of_base(base.head),
        best=None,  # the head reads one row of a pair
        queries=None,
        images=None,
        pass_params=lambda params: params["base"] if read is None else read(params["base"]),
        config=None,
        base_config=base.config or base.base_config,
        name=f"{base.name} with guidance",
        capabilities=base.capabilities._replace(
            depth=False,
            mixtures=False,
            streams=False,
            vectors=False,
            inputs=True,
            needs_inputs=True,
            shared_keys=None,
            sees_ahead=False,
        ),
    )


def _read_prompts(base: Model, params: PyTree, cache: PyTree, tokens: Array, count: Array) -> PyTree:
    """Commit the first `count` int32[B] of `tokens` int32[B, U] to the unconditional rows of an empty cache."""
    batch, width = tokens.shape
    if width == 1:  # the last token of a prompt is read with the first draft
        return cache
    size = min(width, CHUNK)
    mask = texts.traced_mask(texts.causal_mask(PAIR * batch, size))
    path = texts.in_order(PAIR * batch, size) if base.config is not None else jnp.asarray(
        texts.in_order(PAIR * batch, size)
    )  # fmt: skip

    def read_chunk(start: Array, cache: PyTree) -> PyTree:
        places = start + jnp.arange(size)
        window = jnp.repeat(jnp.take(tokens, places, axis=1, mode="clip"), PAIR, 0)
        positions = jnp.broadcast_to(places, window.shape)
        _, pending = base.forward(params, window, cache, positions=positions, mask=mask)
        num_new = jnp.clip(count - start, 0, size)
        return base.commit(cache, pending, path, _pairs(jnp.zeros_like(num_new), num_new))

    return jax.lax.fori_loop(0, -(-width // size), lambda i, cache: read_chunk(i * size, cache), cache)


def _in_a_loop(commit: Callable[[PyTree], PyTree], cache: PyTree, num_nodes: Array) -> PyTree:
    """Return `commit(cache)`, on a CPU from a loop of one iteration.

    XLA on CPU would fuse the change of shape with the writes, and then copy the cache before and after them. The
    compiler cannot compute the number of iterations.
    """
    if platforms.of_program() != "cpu":
        return commit(cache)
    once = jnp.where(num_nodes[0] >= 0, 1, 0)
    return jax.lax.fori_loop(0, once, lambda i, cache: commit(cache), cache)


def _pairs(conditional: Array, unconditional: Array) -> Array:
    """Return [2 B, ...] of two arrays [B, ...], in which the two rows of a pair follow each other."""
    return jnp.stack([conditional, unconditional], 1).reshape(-1, *conditional.shape[1:])


def split_rows(base: Model, arrays: PyTree) -> PyTree:
    """Give arrays of 2 B rows an axis of pairs behind the row axis, so that a row of the result is a pair."""
    split = lambda axis, x: x.reshape(*x.shape[:axis], -1, PAIR, *x.shape[axis + 1 :])
    return jax.tree.map(split, base.axes(arrays), arrays)


def merge_rows(base: Model, arrays: PyTree) -> PyTree:
    """Return the arrays of `split_rows` with 2 B rows. Neither direction copies an array."""
    merge = lambda axis, x: x.reshape(*x.shape[:axis], -1, *x.shape[axis + PAIR :])
    return jax.tree.map(merge, _axes_of_pairs(base, arrays), arrays)


def _axes_of_pairs(base: Model, arrays: PyTree) -> PyTree:
    """Return the row axis of each array that has an axis of pairs. The base model sees arrays without one axis."""
    return base.axes(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), arrays))
