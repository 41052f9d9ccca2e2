"""The public functions `load`, `decode`, `denoise`, `stream` and `serve`.

They resolve names of methods, verifiers and controllers, and call the engine.
"""

from __future__ import annotations

import contextlib
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
from specjax.models.requirements import check_complete_cache
from specjax.numerics.global_arrays import check_active_mesh, gather, spans_hosts, with_auto_shardings
from specjax.parallel.hosts import check_all_same
from specjax.persistence import fingerprint
from specjax.persistence.checkpoint import Checkpoints
from specjax.persistence.program_cache import ProgramCache, programs_of
from specjax.serving.automata import table_of
from specjax.serving.detokenizer import TextDecoder
from specjax.serving.loop import ServeSetup, Serving
from specjax.serving.pace import MAX_SLOWDOWN
from specjax.serving.prefixes import PREFIX_GIB
from specjax.serving.requests import Cancel, Limits, Request, processor_settings, row_settings
from specjax.types import Array, Controller, Drafter, Processor, PyTree, Source, Target, VerifyFn
from specjax.verifiers import Verifier
from specjax.verifiers.parsing import parse_rule


def load(source: str | Path | None = None, **options: Any) -> tuple[Target, Tokenizer]:
    """Load an autoregressive model with its weights, and its tokenizer.

    Args:
      source, options: as for `specjax.models.loading.read_model`: dtype, stacked, joined, cache_dtype,
        same_bits, max_positions, mesh, over.

    Raises: UsageError, in one sentence, if `source` is missing, damaged, unsupported or a diffusion model. Use
      `load_denoiser` for diffusion models.
    """
    loaded = read_model(source, kind="autoregressive", **options)
    return loaded.target, loaded.tokenizer


def load_denoiser(source: str | Path | None = None, **options: Any) -> tuple[Denoiser, Tokenizer]:
    """Load a diffusion language model with the denoiser settings of its files, and its tokenizer.

    Args:
      source, options: as for `load`. Also `block`, the columns of a block of block-causal attention, and `mask_token`,
        the id of the mask token, for files that do not state them. Without them the values of the model's release
        apply, with a `CheckpointWarning`.

    Raises: UsageError in the cases of `load`, and for an autoregressive model.
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
    logprobs: bool | Literal["processed", "tempered", "raw", "untempered"] = False,
    debug: bool = False,
    inputs: PyTree = None,
    min_p: float | Array | None = None,
    processors: Sequence[Processor] = (),
    samples_per_prompt: int = 1,
) -> DecodeResult:
    """Decode a batch of prompts, with prefill and the complete loop in one compiled program.

    The function may be called inside the caller's own `jit`, with `target`, `drafter`, `prompts` and `key` as
    arguments. A second call with the same batch size is not compiled again if its prompts and new tokens fit the same
    buffer. Buffers grow by a third or a half, so a growing chat compiles only a few programs. A caller's own
    `shard_map` over rows needs `check_vma=False`. JAX assumes that the constants in the initial state of the loop are
    equal on all shards.

    Guarantee: with the default verifier, greedy text equals plain greedy decoding. Sampled text has exactly the
    distribution of the target after temperature, top-k, top-p and min-p. A verifier with guarantee "lossy" guarantees
    neither. A row's text depends only on its key and prompt, unless rows share learned state or draft lengths.

    Args:
      target: the model and its parameters.
      drafter: a drafter of `specjax.drafters`, whose parameters are its pytree leaves, or the name of a method in
        METHODS that needs only the target. A draft model, a draft head and None use the defaults of the command line
        (`specjax.catalog.defaults`). A draft model drafts with the goodput controller, and a head drafts in "auto"
        (`ppd` drafts alone). None is "auto" with the draft head that specjax provides for the target, if any. For
        targets that accept only chains, None is "prompt_lookup". Inside of `jit`, None uses no head.
      prompts: a list of token lists, or (tokens int32[B, P], lengths int32[B]) padded on the right.
      key: PRNG key or seed, from which row b derives `fold_in(key, b)`, or one key per row, key[B]. All kinds of keys
        are accepted, legacy `PRNGKey` arrays included.
      max_new_tokens: exact number of new tokens, unless the row ends with an eos.
      temperature: the Python number 0 compiles a greedy program. Any other float or float[B] is traced, and rows with 0
        are greedy.
      top_k, top_p: None, a number, or one number per row [B]. They apply to target and draft, after the temperature.
      eos: ids that end a row. The eos is the last token of its row. () and None: no token ends a row.
      sampling: "speculative" accepts a drafted token with probability min(1, p/q) and keeps the distribution of the
        text. "coupled" draws target and draft with the same noise. Then the text for a key equals plain sampling, for
        any drafter, tree, batch or mesh. It accepts slightly less on single chains and more on wide trees
        (docs/verifiers.md).
      verifier: a verifier of `specjax.verifiers`, its name, or your own `VerifyFn`. Default: the exact verifier for the
        drafter's `draws`.
      controller: a controller of `specjax.controllers` or its name, which sets the draft length. Default: goodput for a
        draft model given as `drafter`, else the maximum length.
      capacity: maximum length of prompt plus new tokens. Default: the model's own limit. It also limits buffer sizes.
      logprobs: also return the log-probability of each token. True or "processed": under the distribution that it was
        drawn from, after temperature, top-k and top-p. It is 0 for a greedy token, and -inf for a token that only a
        lossy verifier accepts. "tempered": after temperature only, as trainers compute it (1 instead of 0).
        "untempered": after the processors only, at temperature 1.
        "raw": by the target's own logits.
      debug: check that every draft is valid for its verifier (`specjax.engine.value_checks`). Inside the caller's
        `jit`, where no error can be raised, read `stats.violations`.
      inputs: arrays [B, ...] that condition the texts in addition to their tokens, for models with such inputs.
      min_p: None, a number, or one number per row [B]. It removes tokens below `min_p` times the largest probability,
        after top-k and top-p.
      processors: logits processors of `specjax.processors`, applied before the temperature.
      samples_per_prompt: number n of texts per prompt. Each prompt is read once. Prompt b has the n rows from b n on,
        and its sample s has the key `fold_in(key of b, s)`. Per-row arguments have one entry per prompt.

    Returns: DecodeResult, with tokens int32[B, max_new_tokens] without the prompts, then -1, and lengths int32[B].

    Raises: UsageError for an empty prompt, a prompt over the capacity, or ids outside of the vocabulary. The same is
      raised for a setting outside its range, and for a drafter or verifier that does not fit. These checks run before
      anything is compiled. After the run, it is raised for a target that returned NaN or Inf and for processors that
      allow no token, and with debug for an invalid draft. Inside of the caller's `jit`, no value can raise an error.
      There `result.finite` is False for rows with such an input or such an end.
    """
    if isinstance(target, Denoiser):
        raise UsageError("decode takes an autoregressive target; use specjax.denoise for diffusion models")
    settings = settings_of(
        temperature=temperature, top_k=top_k, top_p=top_p, eos=eos, sampling=sampling, verifier=verifier,
        controller=controller, capacity=capacity, logprobs=logprobs, debug=debug, min_p=min_p, processors=processors,
    )  # fmt: skip
    job = job_of(
        target, drafter, prompts, settings, key=key, max_new_tokens=max_new_tokens, inputs=inputs,
        samples=samples_per_prompt,
    )  # fmt: skip
    result = run(job).cut(max_new_tokens)
    value_checks.raise_failure(result.finite, target, job.parts.processors)
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
    """Continue a batch of prompts with a diffusion language model, in one compiled program.

    Like `decode`, the function may be called inside the caller's own `jit`, and a second call is not compiled again.

    Args:
      denoiser: the model with its denoiser settings, as `load_denoiser` returns it.
      method: the name of a method of kind diffusion in METHODS, or a `specjax.diffusion.Procedure`, such as
        `specjax.diffusion.methods.sdar(denoiser, tau=0.9)`. None decides one position per pass.
      prompts, key, max_new_tokens, samples_per_prompt: as in `decode`. A row's text depends only on its prompt and key.
      settings: `temperature`, `top_k`, `top_p`, `min_p`, `eos`, `capacity` and `logprobs` of `decode`. The
        log-probability of a token belongs to the pass that decided it.

    Returns: Denoised, a `DecodeResult` with the statistics of the denoising loop.

    Raises: UsageError if denoiser, method and settings do not fit each other, and in the cases of `decode`.
    """
    if not isinstance(denoiser, Denoiser):
        raise UsageError("denoise takes a specjax.Denoiser; use decode for autoregressive models")
    job = job_of(
        denoiser, method, prompts, settings_of(**settings), key=key, max_new_tokens=max_new_tokens,
        samples=samples_per_prompt,
    )  # fmt: skip
    result: Denoised = run(job)
    value_checks.raise_failure(result.finite, denoiser.target)
    return result.cut(max_new_tokens)


def job_of(
    target: Target | Denoiser,
    drafter: Drafter | DraftHead | Target | Procedure | str | None,
    prompts: Prompts,
    settings: Settings,
    **call: Any,
) -> Job:
    """Build the checked job that `decode`, `denoise`, `stream` and `serve` run."""
    target, drafter, prompts, call = with_auto_shardings((target, drafter, prompts, call))
    settings = _with_auto_shardings(settings)
    if isinstance(target, Target | Denoiser):
        settings.check_eos(target.model.vocab_size)
    if isinstance(target, Target | Denoiser) and target.model.mesh is not None:
        check_active_mesh()
        _check_hosts(target, prompts, settings, call)
    if isinstance(target, Denoiser):
        if call.pop("inputs", None) is not None:
            raise UsageError("a denoiser reads tokens only; leave inputs out")
        return prepare_canvas(target, _procedure(target, drafter), prompts, settings, **call)
    _check_target(target)
    if isinstance(drafter, Procedure):
        raise UsageError("procedures need a Denoiser as target; pass a drafter for other models")
    drafter, settings = _with_defaults(target, drafter, settings)
    return prepare(target, drafter, prompts, settings, **call)


def _with_auto_shardings(settings: Settings) -> Settings:
    """Return settings whose arrays are on meshes with axes of JAX's type Auto."""
    values = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    converted = with_auto_shardings(values)
    return settings if converted is values else dataclasses.replace(settings, **converted)


def _check_hosts(target: Target | Denoiser, prompts: Prompts, settings: Settings, call: dict[str, Any]) -> None:
    """Check that all hosts of a target have the same prompts, keys and settings, or they would wait for each other.

    Arrays that are spread over the hosts are compared by their shapes. Raises: UsageError.
    """
    leaves = jax.tree.leaves((prompts, call))
    if not spans_hosts(target.params) or any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return
    shapes = lambda tree: jax.tree.map(lambda x: jnp.shape(x) if spans_hosts(x) else x, tree)
    arrays = "temperature", "top_k", "top_p", "min_p", "eos"
    blank: dict[str, Any] = dict.fromkeys(arrays) | {"temperature": 0.0}
    names = fingerprint.describe(dataclasses.replace(settings, **blank))
    values = [shapes([getattr(settings, name) for name in arrays]), names]
    lengths = {name: value for name, value in call.items() if name != "key"}
    check_all_same(
        {"prompts": shapes(prompts), "random keys": shapes(call["key"]), "settings": [values, shapes(lengths)]}
    )


def _check_target(target: Any) -> None:
    if not isinstance(target, Target | Denoiser):
        raise UsageError(
            f"target must be a specjax.Target, not {type(target).__name__}; load one with specjax.load, or convert "
            "your own model with specjax.as_target"
        )


def _procedure(denoiser: Denoiser, method: Any) -> Procedure:
    if method is None or isinstance(method, str | Procedure):
        return procedure_of(method or "llada", denoiser)
    raise UsageError(f"a denoiser takes a method of kind diffusion, not {type(method).__name__}; see specjax.METHODS")


def settings_of(verifier: Any = None, controller: Any = None, **settings: Any) -> Settings:
    """Build the settings, with verifiers and controllers resolved by name. Raises: UsageError."""
    return Settings(
        verifier=parse_rule(verifier) if isinstance(verifier, str) else verifier,
        controller=parse(controller) if isinstance(controller, str) else controller,
        **settings,
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
            raise UsageError(f"drafter is the function {name}; call {name}(...), which returns the drafter")
        raise UsageError(f"drafter must be one of specjax.drafters or the name of a method, not {drafter!r}")
    name, draft = (drafter, None) if isinstance(drafter, str) else (None, drafter)
    is_plain = settings.verifier is None and settings.controller is None
    default, controller = default_drafter(target, draft, name=name, shipped=is_plain)
    return default, settings if controller is None or not is_plain else dataclasses.replace(
        settings, controller=controller
    )


def refuse(settings: dict[str, Any], where: str, names: Sequence[str]) -> None:
    """Raise UsageError for the first of `names` that is set, because the function `where` cannot report its result."""
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
    """Decode or denoise like `decode` and `denoise`, and yield the tokens of each step as soon as they are available.

    The arguments and the text are those of `decode` or `denoise`. On several hosts, each host must run all steps, and
    each one receives all rows.

    Args:
      checkpoint: `specjax.persistence.Checkpoints`, to continue after a restart. A run that finds its own state in the
        folder yields the text so far as its first step, without counts of drafted tokens. Then it continues. The tokens
        equal those of an uninterrupted run. Checkpoints do not support `logprobs`.
      programs: `specjax.ProgramCache(folder)`, to load the compiled programs of an earlier process without tracing.

    Yields: StreamStep. In the last step, `step.drafter()` returns the drafter with the parameters that it learned.

    Raises: UsageError in the cases of `decode`, after the first step in which a row failed, and if the folder contains
      the checkpoint of another run.
    """
    refuse(settings, "stream", ("debug",))
    job = job_of(
        target, drafter, prompts, settings_of(**settings), key=key, max_new_tokens=max_new_tokens, inputs=inputs,
        samples=samples_per_prompt,
    )  # fmt: skip
    if checkpoint is not None and isinstance(target, Denoiser):
        raise UsageError("checkpoints support autoregressive models only; leave checkpoint out")
    return _checked(stream_job(job, checkpoint, programs), job)


def _checked(steps: Generator[StreamStep, None, None], job: Job) -> Generator[StreamStep, None, None]:
    """Yield steps. Raises: UsageError after a step in which a row failed."""
    with contextlib.closing(steps):
        for step in steps:
            yield step
            value_checks.raise_failure(step.info.finite, job.parts.target, job.parts.processors)


def stream_job(
    job: Job, checkpoint: Checkpoints | None = None, programs: ProgramCache | None = None
) -> Generator[StreamStep, None, None]:
    """Yield the steps of a job, as `stream` does."""
    compiled = programs_of(job, programs)
    if checkpoint is None:
        return steps(job, programs=compiled)
    if job.parts.keep.logprobs:
        raise UsageError("checkpoints do not store log-probabilities; leave logprobs or checkpoint out")
    from specjax.persistence.resume import RunCheckpoint

    recorder = RunCheckpoint(checkpoint, job)
    return recorder.closing(steps(job, recorder, compiled))


def serve(
    target: Target | Denoiser,
    drafter: Drafter | DraftHead | Target | Procedure | str | None,
    requests: Iterable[Request | Cancel | None] = (),
    *,
    slots: int,
    longest_prompt: int,
    max_new_tokens: int,
    tokenizer: TextDecoder | None = None,
    inputs: PyTree = None,
    programs: ProgramCache | None = None,
    prefix_gib: float = PREFIX_GIB,
    max_slowdown: float = MAX_SLOWDOWN,
    max_alternatives: int | None = None,
    constraint_mib: float = 0.0,
    **settings: Any,
) -> Serving:
    """Decode requests in a running batch of `slots` rows, and yield the tokens that each step adds to each request.

    Only the first request compiles programs, for any lengths and settings of later requests. The parameters that the
    drafter learns from one text are used for the next ones. `Served.drafter` returns them at the end of each request.

    Args:
      target, drafter: as in `decode` or `denoise`.
      requests: an iterable, read whenever a slot is free. It may yield None while it has no request, and is read again
        after the next step. A blocking iterable stops the decoding of all rows; wrap it in `arrivals`.
      slots: number of rows of the batch.
      longest_prompt, max_new_tokens: limits of every request. They set the size of the cache.
      tokenizer: an object with `decode(ids) -> str`, to return text (`Served.text`) and to support stop strings.
      inputs: example inputs of one request, for their shapes, if the model reads any (`Request.inputs`).
      programs: as in `stream`.
      prefix_gib: GiB of device memory for chunks of prompts that were read. A prompt that begins with the same chunks,
        such as a system prompt or the history of a chat, does not read them again. Its text is the same, to the bit.
        Nothing is stored if the mesh has several parts of "sequence".
      max_slowdown: the largest mean time between two tokens of a row while other prompts are read, in times without.
        math.inf reads all waiting prompts before the next step. This gives the most tokens per second, and long pauses.
      max_alternatives: the most alternatives whose log-probabilities a request may have (`Request.alternatives`, 0 for
        those of its own tokens only). None: requests have none, and nothing is compiled for them.
      constraint_mib: MiB of device memory for the automata of running requests (`Request.constraint`). 0: requests have
        none, and nothing is compiled for them. A request waits while those of others fill it.
      settings: the settings of `decode` except `logprobs` and `debug`. Sampling, verifier, controller and capacity
        apply to all requests. The others are defaults, which a request can override. Requests can have a min_p or
        processors only if `serve` has them too (min_p=0, or processors without effect), because only these are
        compiled.

    Yields: Served. A request that does not fit is refused (`Served.error`), and the others continue.

    Sends: None, `Cancel(number of a request)`, or new parameters of the drafter, with `generator.send`. The requests
      may yield `Cancel` too. Parameters apply from the next step on. Use them for drafters that are trained while they
      serve (`specjax.training.methods.online`).

    On several hosts, each host must pass the same requests at the same times, and each one receives all texts.

    Returns: Serving, the generator. Its `setup` builds schedulers for drivers that do not iterate, such as the server.

    Raises: UsageError for a setting outside its range, or slots that the mesh axis "data" does not divide.
    """
    refuse(settings, "serve", ("debug", "logprobs"))
    _check_target(target)
    if isinstance(target, Target):
        check_complete_cache(target.model, "serve")
    if slots < 1 or longest_prompt < 1:
        raise UsageError(f"slots and longest_prompt must be at least 1, not {slots} and {longest_prompt}")
    parts = 1 if target.model.mesh is None else target.model.mesh.shape.get("data", 1)
    if slots % parts:
        raise UsageError(f'slots={slots} cannot be split over the {parts} devices of "data"; give a multiple')
    defaults = settings_of(**settings)
    if max_alternatives is not None and isinstance(target, Denoiser):
        raise UsageError("a denoiser has no log-probabilities by position; leave max_alternatives out")
    if max_alternatives is not None and not 0 <= max_alternatives <= target.model.vocab_size:
        raise UsageError(f"max_alternatives must be from 0 to the vocabulary size, not {max_alternatives}")
    vocab = target.model.vocab_size
    for name, value, minimum in (
        ("prefix_gib", prefix_gib, 0), ("max_slowdown", max_slowdown, 1), ("constraint_mib", constraint_mib, 0),
    ):  # fmt: skip
        is_unlimited = name == "max_slowdown" and value == float("inf")
        if not (is_unlimited or minimum <= value < float("inf")):
            raise UsageError(f"{name} must be a number of at least {minimum}, not {value}")
    limits = Limits(
        longest_prompt, max_new_tokens, vocab, defaults, inputs, tokenizer, max_alternatives, constraint_mib,
        model=target.model if isinstance(target, Target) else None,
    )  # fmt: skip
    processor_settings(limits)
    processors = *defaults.processors, *table_of(constraint_mib, vocab)
    per_row = dataclasses.replace(
        defaults, **row_settings(limits).sampling._asdict(), eos=(), processors=processors
    )  # fmt: skip
    widest = np.zeros((slots, longest_prompt), np.int32), np.full(slots, longest_prompt, np.int32)
    blank = jax.tree.map(lambda x: jnp.zeros((slots, *jnp.shape(x)), jnp.result_type(x)), inputs)
    if isinstance(blank, Source):  # one without tokens is refused
        blank = blank._replace(length=jnp.ones_like(blank.length))
    key = jax.random.key(0)
    job = job_of(target, drafter, widest, per_row, key=key, max_new_tokens=max_new_tokens, inputs=blank)
    can_score = max_alternatives is not None and job.parts.loop.read is not None and target.model.unembed is not None
    limits = limits._replace(can_score=can_score)
    return Serving(ServeSetup(job, limits, programs, int(prefix_gib * 2**30), max_slowdown), requests)
