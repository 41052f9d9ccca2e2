"""`load`, `decode`, `denoise`, `stream` and `serve`: the engine, with names for methods and folders for checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from specjax.controllers.parsing import parse
from specjax.diffusion import Denoised, Denoiser, Procedure
from specjax.diffusion.prepare import prepare as prepare_canvas
from specjax.diffusion.procedures import procedure_of
from specjax.drafters.default import default_drafter
from specjax.engine import value_checks
from specjax.engine.job import Job
from specjax.engine.packing import Prompts
from specjax.engine.prepare import Settings, prepare
from specjax.engine.results import DecodeResult, StreamStep
from specjax.engine.run import restore_params, run
from specjax.engine.stream import steps
from specjax.errors import UsageError
from specjax.models.heads.contract import DraftHead
from specjax.models.loading import Tokenizer, read_model
from specjax.numerics.global_arrays import gather
from specjax.persistence.checkpoint import Checkpoints
from specjax.persistence.program_cache import ProgramCache, programs_of
from specjax.serving.batch import Served
from specjax.serving.detokenizer import TextDecoder
from specjax.serving.loop import serve_requests
from specjax.serving.requests import Limits, Request, processor_settings, row_settings
from specjax.types import Array, Controller, Drafter, Processor, PyTree, Target, VerifyFn
from specjax.verifiers import Verifier
from specjax.verifiers.parsing import parse_rule


def load(source: str | Path | None = None, **options: Any) -> tuple[Target, Tokenizer]:
    """Load an autoregressive model with its weights, and its tokenizer.

    source, options: as for `specjax.models.loading.read_model`: dtype, stacked, cache_dtype, same_bits,
    max_positions, mesh, over.

    Raises: UsageError, in one sentence, for everything that can be wrong with `source`. A diffusion model is refused;
      `load_denoiser` loads it.
    """
    loaded = read_model(source, kind="autoregressive", **options)
    return loaded.target, loaded.tokenizer


def load_denoiser(source: str | Path | None = None, **options: Any) -> tuple[Denoiser, Tokenizer]:
    """Load a diffusion language model with the denoiser settings of its config, and its tokenizer.

    source, options: as for `load`.

    Raises: UsageError, as `load` does, and for an autoregressive model.
    """
    loaded = read_model(source, kind="diffusion", **options)
    assert loaded.denoiser_settings is not None
    settings: dict[str, Any] = loaded.denoiser_settings._asdict()
    return Denoiser(loaded.target.model, loaded.target.params, **settings), loaded.tokenizer


def decode(
    target: Target,
    drafter: Drafter | DraftHead | Target | str | None,
    prompts: Prompts,
    *,
    key: Array | int,
    max_new_tokens: int,
    temperature: float | Array = 0.0,
    top_k: int | Array | None = None,
    top_p: float | Array | None = None,
    eos: int | Sequence[int] | Array | None = (),
    sampling: Literal["speculative", "coupled"] = "speculative",
    verifier: Verifier | VerifyFn | str | None = None,
    controller: Controller | str | None = None,
    capacity: int | None = None,
    logprobs: bool = False,
    debug: bool = False,
    inputs: PyTree = None,
    min_p: float | Array | None = None,
    processors: Sequence[Processor] = (),
    samples_per_prompt: int = 1,
) -> DecodeResult:
    """Decode a batch of prompts: prefill and the whole loop in one compiled program.

    May be called inside the caller's own `jit` with `target`, `drafter`, `prompts` and `key` as arguments. A second
    call with the same batch compiles nothing, whatever its prompts and `max_new_tokens`, if prompt and new tokens fit
    the same buffer; buffers grow by a third or a half, so a chat that grows compiles a handful of programs in its life.
    Inside the caller's own `shard_map` over rows that needs `check_vma=False`: the loop starts from constants, which
    JAX takes for equal on all shards.

    Args:
      target: the model and its parameters.
      drafter: one of `specjax.drafters`, whose parameters are its leaves, or the name of a row of METHODS that needs
        only the target. A draft model, a draft head or None select the defaults of the command line
        (`specjax.catalog.defaults`): a draft model drafts with the goodput controller, a head drafts in "auto", and
        None is "auto" with the draft head that comes with specjax, if there is one ("prompt_lookup" for targets that
        accept chains only). Inside of `jit`, None uses no head.
      prompts: a list of token lists, or (tokens int32[B, P], lengths int32[B]) padded on the right.
      key: one PRNG key or seed, from which row b takes `fold_in(key, b)`, or one key per row [B]; of any kind, legacy
        `PRNGKey` arrays too. A row's text depends on its key and prompt only, not on the batch.
      max_new_tokens: exact, unless the row ends with an eos.
      temperature: a Python 0 compiles the greedy program; else a float or [B], traced, where 0 is greedy too.
      top_k, top_p: None, or a number or [B], applied to target and draft alike, after the temperature.
      eos: ids that end a row; the eos itself is the last token of the row.
      sampling: "speculative" accepts a drafted token by its p/q, as often as any rule for one token can, and keeps the
        distribution of the text. "coupled" draws target and draft with the same noise, so that the text for a key is
        that of plain sampling, whatever drafter, tree, batch or mesh; it accepts a little less of one chain, and more
        of wide trees (docs/verifiers.md).
      verifier: one of `specjax.verifiers`, its name, or your own `VerifyFn`; default: the exact rule for
        how the drafter draws.
      controller: how deep to draft, one of `specjax.controllers` or its name; default: always as deep as possible.
      capacity: largest length of prompt plus new tokens; default: the model's own limit. No buffer is larger than it
        takes.
      logprobs: also return the log-probability of each token under the target's distribution it was drawn from: after
        temperature, top-k and top-p, so 0 for a greedy token and -inf for one that only a lossy rule lets through.
      debug: check every draft for what its verifier needs (`specjax.engine.value_checks`) and raise UsageError if one lacks
        it; inside the caller's `jit`, where nothing can be raised, look at `stats.violations`.
      inputs: what the texts are conditioned on besides their tokens, arrays [B, ...], for models whose `begin` takes
        them.
      min_p: None, or a number or [B]: tokens of less than so many times the probability of the likeliest one go, after
        top-k and top-p.
      processors: what changes the target's logits by the text so far, before the temperature: `specjax.processors`.
      samples_per_prompt: n texts of each prompt, which is read once: rows b n, ..., b n + n - 1 of the result are those
        of prompt b, row b n + s with the key `fold_in(key of b, s)`. What is given per row is given per prompt.

    Returns: DecodeResult.
    Raises: UsageError for an empty prompt, one over the capacity, or a setting outside its range, before compiling.
    """
    if isinstance(target, Denoiser):
        raise UsageError("decode takes an autoregressive target; a diffusion model is decoded by specjax.denoise")
    settings = settings_of(
        temperature=temperature, top_k=top_k, top_p=top_p, eos=eos, sampling=sampling, verifier=verifier,
        controller=controller, capacity=capacity, logprobs=logprobs, debug=debug, min_p=min_p, processors=processors,
    )  # fmt: skip
    job = job_of(
        target, drafter, prompts, settings, key=key, max_new_tokens=max_new_tokens, inputs=inputs,
        samples=samples_per_prompt,
    )  # fmt: skip
    result = run(job).cut(max_new_tokens)
    result = dataclasses.replace(result, drafter=restore_params(job.parts.drafter, result.drafter))
    if debug and not isinstance(result.stats.violations, jax.core.Tracer):
        value_checks.raise_violation(gather(result.stats.violations), job.parts.drafter.traits.draws)
    return result


def denoise(
    denoiser: Denoiser,
    method: Procedure | str | None,
    prompts: Prompts,
    *,
    key: Array | int,
    max_new_tokens: int,
    samples_per_prompt: int = 1,
    **settings: Any,
) -> Denoised:
    """Let a diffusion language model continue a batch of prompts: the whole loop in one compiled program.

    May be called inside the caller's own `jit`, as `decode`, and compiles for a second call as little.

    Args:
      denoiser: the model, and how it is read.
      method: how its columns are decided: the name of a row of METHODS, or a `specjax.diffusion.Procedure`, such as
        `specjax.diffusion.methods.sdar(denoiser, tau=0.9)`; None: one column a pass.
      prompts, key, max_new_tokens, samples_per_prompt: as for `decode`. A row's text depends on its prompt and key
        alone, not on the batch.
      settings: `temperature`, `top_k`, `top_p`, `min_p`, `eos`, `capacity` and `logprobs` of `decode`.
        Log-probabilities are those of each token in the distribution that it was drawn from, in the pass that decided
        it.

    Raises: UsageError for parts that do not fit each other, and as `decode`.
    """
    if not isinstance(denoiser, Denoiser):
        raise UsageError("denoise takes a specjax.Denoiser, which says how a model is read; for others there is decode")
    job = job_of(
        denoiser, method, prompts, settings_of(**settings), key=key, max_new_tokens=max_new_tokens,
        samples=samples_per_prompt,
    )  # fmt: skip
    result: Denoised = run(job)
    return result.cut(max_new_tokens)


def job_of(
    target: Target | Denoiser,
    drafter: Drafter | DraftHead | Target | Procedure | str | None,
    prompts: Prompts,
    settings: Settings,
    **call: Any,
) -> Job:
    """What `decode`, `denoise`, `stream` and `serve` run: their arguments, checked and laid out."""
    if isinstance(target, Denoiser):
        if call.pop("inputs", None) is not None:
            raise UsageError("a denoiser reads tokens only; leave inputs out")
        return prepare_canvas(target, _procedure(target, drafter), prompts, settings, **call)
    _check_target(target)
    if isinstance(drafter, Procedure):
        raise UsageError("a procedure is of diffusion models; give a Denoiser for a target, or a drafter")
    drafter, settings = _with_defaults(target, drafter, settings)
    return prepare(target, drafter, prompts, settings, **call)


def _check_target(target: Any) -> None:
    if not isinstance(target, Target | Denoiser):
        raise UsageError(
            f"target must be a specjax.Target, not {type(target).__name__}; specjax.load reads one, and "
            "specjax.target_of makes one of a model of yours"
        )


def _procedure(denoiser: Denoiser, method: Any) -> Procedure:
    if method is None or isinstance(method, str | Procedure):
        return procedure_of(method or "llada", denoiser)
    raise UsageError(f"a denoiser takes a method of kind diffusion, not {type(method).__name__}; see specjax.METHODS")


def settings_of(verifier: Any = None, controller: Any = None, **others: Any) -> Settings:
    """With rules and controllers for their names."""
    return Settings(
        verifier=parse_rule(verifier) if isinstance(verifier, str) else verifier,
        controller=parse(controller) if isinstance(controller, str) else controller,
        **others,
    )


def _with_defaults(target: Target, drafter: Any, settings: Settings) -> tuple[Drafter, Settings]:
    """Build the drafter of a name, a draft model, a draft head or None, and its default controller.

    The draft head that comes with specjax is used only if neither a rule nor a controller was chosen.
    """
    if isinstance(drafter, Drafter):
        return drafter, settings
    if drafter is not None and not isinstance(drafter, str | Target | DraftHead):
        if callable(drafter):
            name = getattr(drafter, "__name__", "factory")
            raise UsageError(f"drafter is the function {name}; call it: {name}(...) makes the drafter")
        raise UsageError(f"drafter must be one of specjax.drafters or the name of a method, not {drafter!r}")
    name, draft = (drafter, None) if isinstance(drafter, str) else (None, drafter)
    is_plain = settings.verifier is None and settings.controller is None
    default, controller = default_drafter(target, draft, name=name, shipped=is_plain)
    return default, settings if controller is None or not is_plain else dataclasses.replace(
        settings, controller=controller
    )


def refuse(settings: dict[str, Any], where: str, names: Sequence[str]) -> None:
    """Raises: UsageError for a setting of `decode` whose outcome would be lost there."""
    for name in names:
        if settings.get(name):
            raise UsageError(f"{where} does not report {name}; leave it out, or use decode")


def stream(
    target: Target | Denoiser,
    drafter: Drafter | DraftHead | Target | Procedure | str | None,
    prompts: Prompts,
    *,
    key: Array | int,
    max_new_tokens: int,
    checkpoint: Checkpoints | None = None,
    inputs: PyTree = None,
    samples_per_prompt: int = 1,
    programs: ProgramCache | None = None,
    **settings: Any,
) -> Generator[StreamStep, None, None]:
    """Like `decode` or `denoise`, with the same arguments, but yields what each step added, as soon as it is known.

    The step is the one that `decode` loops. On several hosts each must run through all steps; every one sees all rows.
    What the drafter learnt is called for at the last step, `drafter = step.drafter()` (`StreamStep`).

    checkpoint: `specjax.persistence.Checkpoints`, to survive a restart. A run that finds its own state in the folder
    yields the text so far as its first step, without saying which of it was drafted, and goes on from there: together
    the tokens of an uninterrupted run. One that finds that of another run raises UsageError. Not with `logprobs`, which
    it does not keep.

    programs: `specjax.ProgramCache(folder)`, to have the compiled programs of an earlier process, and nothing traced.
    """
    refuse(settings, "stream", ("debug",))
    job = job_of(
        target, drafter, prompts, settings_of(**settings), key=key, max_new_tokens=max_new_tokens, inputs=inputs,
        samples=samples_per_prompt,
    )  # fmt: skip
    if checkpoint is not None and isinstance(target, Denoiser):
        raise UsageError("a checkpoint keeps runs of autoregressive models; leave it out")
    return stream_job(job, checkpoint, programs)


def stream_job(
    job: Job, checkpoint: Checkpoints | None = None, programs: ProgramCache | None = None
) -> Generator[StreamStep, None, None]:
    """Yield the steps of a job, as `stream` does."""
    compiled = programs_of(job, programs)
    if checkpoint is None:
        return steps(job, programs=compiled)
    if job.parts.keep.logprobs:
        raise UsageError("a checkpoint does not keep log-probabilities; leave logprobs or checkpoint out")
    from specjax.persistence.resume import RunCheckpoint

    record = RunCheckpoint(checkpoint, job)
    return record.closing(steps(job, record, compiled))


def serve(
    target: Target | Denoiser,
    drafter: Drafter | DraftHead | Target | Procedure | str | None,
    requests: Iterable[Request | None],
    *,
    slots: int,
    longest_prompt: int,
    max_new_tokens: int,
    tokenizer: TextDecoder | None = None,
    inputs: PyTree = None,
    programs: ProgramCache | None = None,
    **settings: Any,
) -> Generator[Served, PyTree, None]:
    """Decode requests as they come, `slots` of them at a time, and yield what each step adds to each of them.

    After the first request nothing is compiled any more, whatever the lengths and settings of the others. What the
    drafter learns from one text serves the next ones; `Served.drafter` has it, at the end of each, for a later call.

    Args:
      target, drafter: as for `decode`, or as for `denoise`.
      requests: asked for the next one whenever a slot is free; None where there is none yet, and it is asked again
        after the next step. While it makes one wait nothing is decoded: see `arrivals`.
      slots: rows of the batch. longest_prompt, max_new_tokens: of any request, which set the size of the cache.
      tokenizer: to have the text too (`Served.text`), and for requests with stop strings; its `decode(ids)` is used.
      inputs: those of one request, for their shapes, if the model takes any (`Request.inputs`).
      programs: as for `stream`.
      settings: those of `decode` but `logprobs`: sampling, verifier, controller and capacity for all requests alike;
        temperature, top_k, top_p, min_p, eos and processors of those that do not say. Requests have a min_p or
        processors only if `serve` has (0, and ones that change nothing, will do): others are not compiled.

    What is sent to the generator (`send`) are new parameters of the drafter from the next step on, of one that learns
    while it serves (`specjax.training.methods.online`).

    A request that does not fit is refused (`Served.error`), and the others go on. On several hosts each must give the
    same requests at the same times, and sees all of their texts.
    Raises: UsageError for a setting outside its range, or a mesh that splits the batch.
    """
    refuse(settings, "serve", ("debug", "logprobs"))
    _check_target(target)
    if slots < 1 or longest_prompt < 1:
        raise UsageError(f"slots and longest_prompt must be at least 1, not {slots} and {longest_prompt}")
    if target.model.mesh is not None and target.model.mesh.shape.get("data", 1) > 1:
        raise UsageError("serve reads one prompt at a time, which a mesh cannot split over data; use data=1")
    of_all = settings_of(**settings)
    limits = Limits(longest_prompt, max_new_tokens, target.model.vocab_size, of_all, inputs, tokenizer)
    processor_settings(limits)
    per_row = dataclasses.replace(of_all, **row_settings(limits).sampling._asdict(), eos=())
    widest = np.zeros((slots, longest_prompt), np.int32), np.full(slots, longest_prompt, np.int32)
    blank = jax.tree.map(lambda x: jnp.zeros((slots, *jnp.shape(x)), jnp.result_type(x)), inputs)
    key = jax.random.key(0)
    job = job_of(target, drafter, widest, per_row, key=key, max_new_tokens=max_new_tokens, inputs=blank)
    return serve_requests(job, requests, limits, programs)
