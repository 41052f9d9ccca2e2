"""Preparation of a denoising job from the arguments of `denoise`, with all validation that precedes compilation."""

from __future__ import annotations

from typing import Any

from specjax.arrays.modes import with_standard_modes
from specjax.diffusion.caches import WHOLE, append
from specjax.diffusion.loop import LOOP, DenoisingParts
from specjax.diffusion.types import CanvasCache, Denoiser, Procedure
from specjax.engine.job import Job, Keep
from specjax.engine.packing import Prompts, check_new_tokens, pack
from specjax.engine.prepare import Settings, check_samples, find_usable, repeat_per_sample, sample_keys
from specjax.errors import UsageError
from specjax.types import Array

UNIT = 32
"""The sizes of a fully computed canvas and of a window over all its new columns are multiples of this number."""


@with_standard_modes
def prepare(
    denoiser: Denoiser,
    procedure: Procedure,
    prompts: Prompts,
    settings: Settings,
    *,
    key: Array | int,
    max_new_tokens: int,
    samples: int = 1,
) -> Job:
    """Check the arguments of `denoise`, and build the job with its canvases.

    Raises: UsageError for invalid prompts, and for parts that do not fit the denoiser or each other.
    """
    memory = select_cache(denoiser, procedure)
    check_parts(denoiser, procedure, memory)
    for name in ("verifier", "controller", "processors", "debug"):
        if getattr(settings, name):
            raise UsageError(
                f"denoising does not support {name}; leave it out, and choose a method or its parts instead"
            )
    if settings.sampling != "speculative":
        raise UsageError(
            f'denoising does not support sampling="{settings.sampling}"; leave it out: the noise of all methods '
            "depends only on row, column and number of decided columns"
        )
    if settings.logprobs not in (False, True, "processed"):
        raise UsageError(f'denoising does not support logprobs="{settings.logprobs}"; use logprobs=True')
    samples = check_samples(samples)
    count = check_new_tokens(max_new_tokens)
    eos = settings.eos_ids()
    if procedure.score is not None and procedure.score.check is not None:
        procedure.score.check(procedure.score.params, count, eos)
    capacity = settings.capacity or denoiser.model.max_positions
    width = procedure.schedule.width or round_up(count)
    tokens, lengths = pack(prompts, count, 2 * width, capacity, denoiser.model.vocab_size)
    settings.check_batch(len(tokens))
    if not denoiser.is_causal:
        tokens = tokens[:, : round_up(longest_prompt(prompts) + count)]
    parts = DenoisingParts(
        denoiser=denoiser,
        procedure=procedure,
        sampling=repeat_per_sample(settings.to_sampling(filters_at_zero=True), samples),
        eos=eos,
        memory=memory,
        width=width,
        keep=Keep(logprobs=settings.logprobs),
        loop=LOOP,
    )
    keys = sample_keys(key, tokens.shape[0], samples)
    stop = repeat_per_sample(lengths, samples) + count
    usable = find_usable(settings, prompts, len(tokens), count, capacity, denoiser.model.vocab_size)
    return Job(parts, tokens, lengths, keys, stop, samples=samples, usable=usable)


def select_cache(denoiser: Denoiser, procedure: Procedure) -> CanvasCache:
    """Return the procedure's cache, or the exact cache for the denoiser's attention."""
    return procedure.memory or (append() if denoiser.is_causal else WHOLE)


def check_parts(denoiser: Denoiser, procedure: Procedure, memory: CanvasCache) -> None:
    """Raise a UsageError for parts that do not fit the denoiser or each other."""
    width, block = procedure.schedule.width, denoiser.block
    if memory.attention != denoiser.attention:
        raise UsageError(
            f"the cache `{memory.name}` needs a model with {memory.attention.replace('_', '-')} attention, and this "
            f"one has {denoiser.attention.replace('_', '-')} attention; leave the cache out"
        )
    if block is not None and width != block:
        raise UsageError(f"the schedule has a block of {width}, and the model one of {block}; set block={block}")
    if memory.check is not None:
        memory.check(procedure)
    if procedure.control is not None and procedure.control.wide:
        if memory != WHOLE:
            raise UsageError(f"the control reads the whole canvas, which the cache `{memory.name}` does not compute")
        if procedure.score is not None and procedure.score.transform is not None:
            raise UsageError(
                "the control reads logits of the whole canvas, which the score does not change; leave the control "
                "or the score out"
            )
    verify = procedure.verify
    if verify is None:
        return
    if verify.memory is not None and memory != verify.memory:
        raise UsageError(f"verification needs the cache `{verify.memory.name}`, not `{memory.name}`")
    if verify.exact_memory and not memory.exact:
        raise UsageError(f"verification needs an exact cache, and `{memory.name}` is not exact; leave the cache out")
    if verify.several and memory.several is None:
        raise UsageError(
            f"verification needs several canvases per pass, and the cache `{memory.name}` supports only one"
        )
    if verify.check is not None:
        verify.check(procedure)


def round_up(count: int) -> int:
    """Round up to a multiple of UNIT."""
    return -(-count // UNIT) * UNIT


def longest_prompt(prompts: Any) -> int:
    """Return the length of the longest prompt, or the width of an array of prompts."""
    if isinstance(prompts, tuple) and len(prompts) == 2 and hasattr(prompts[0], "ndim"):
        return prompts[0].shape[1]
    return max(len(row) for row in prompts)
