"""Compile the programs of a job and report on them; results are kept on disk by what they depend on."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import math
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from specjax.errors import UsageError
from specjax.planning import chips, cost, hlo, programs
from specjax.planning.programs import Job, Program
from specjax.planning.report import Fit, Memory, ProgramReport, Report, SpeedUp, gib, needed_bytes
from specjax.types import Drafter

Notify = Callable[[str], None]
"""Told what is about to be compiled."""

TRIES = 4  # compilations per kind of change, when a program does not fit
ROUNDS_AT = 0.7  # acceptance rate at which the whole loop is timed


def make_job(
    target: str | Any,
    topology: str,
    *,
    draft: str | Any | None = None,
    method: str | None = None,
    tree: str | None = None,
    num_draft_tokens: int | None = None,
    batch: int = 1,
    context: int = 1024,
    max_new_tokens: int = 128,
    dtype: str = "bfloat16",
    cache_dtype: str | None = None,
    temperature: float = 0.0,
    data: int = 1,
    model: int | None = None,
    layer: int = 1,
    sequence: int = 1,
) -> Job:
    """Check what is asked for, before anything is compiled.

    Args:
      data, layer, sequence, model: axes of the mesh, as of `specjax.mesh`; model None: as many as there are and the
        target's heads can be split over.
      cache_dtype: "int8" for both models' caches; None: as their configs say, else their dtype.

    Raises: UsageError that names the option at fault.
    """
    from specjax.catalog import find_drafter, of_kind
    from specjax.models.bridge import check_cache_dtype
    from specjax.trees import inline

    check_cache_dtype(cache_dtype, "--cache-dtype")
    slice_ = chips.parse_topology(topology)
    method = method or ("two_model" if draft is not None else "autoregressive")
    try:
        row = find_drafter(method)
    except UsageError as error:
        raise UsageError(f"--method: {error}") from None
    if row.needs - {"draft"}:
        what = " and ".join(sorted(row.needs - {"draft"}))
        raise UsageError(f"--method {method} needs a {what}, of which nothing is known here; choose another method")
    if ("draft" in row.needs) != (draft is not None):
        fix = "give one with --draft" if draft is None else "leave --draft out or use --method two_model"
        raise UsageError(f"--method {method} needs {'a' if draft is None else 'no'} draft model; {fix}")
    if tree is not None:
        option = row.option("tree")
        if option is None or num_draft_tokens is not None:
            grown = " and ".join(name for name, other in of_kind("drafter").items() if other.option("tree"))
            raise UsageError(f"--tree applies to {grown}, and without --num-draft-tokens, which sets the size too")
        option.parse(tree, "--tree")
        tree = inline(tree)  # results are kept by the job, not by what a file once held
    for flag, value in (("--batch-size", batch), ("--context", context), ("--max-new-tokens", max_new_tokens),
                        ("--data", data), ("--layer", layer), ("--sequence", sequence),
                        ("--num-draft-tokens", 1 if num_draft_tokens is None else num_draft_tokens),
                        ("--model", 1 if model is None else model)):  # fmt: skip
        if value < 1:
            raise UsageError(f"{flag} must be at least 1, not {value}")
    if not (temperature >= 0 and math.isfinite(temperature)):
        raise UsageError(f"--temperature must be at least 0, not {temperature:g}; 0 is greedy")
    if batch % data:
        raise UsageError(f"--batch-size {batch} cannot be split over --data {data}; make it a multiple")

    def load(source, flag: str):
        config = programs.load_config(source, dtype, flag) if isinstance(source, str | Path) else source
        return config if cache_dtype is None else dataclasses.replace(config, cache_dtype=cache_dtype)

    target_config = load(target, "--target")
    draft_config = None if draft is None else load(draft, "--draft")
    if draft_config is not None and draft_config.vocab_size != target_config.vocab_size:
        raise UsageError(
            f"--draft has {draft_config.vocab_size} tokens in its vocabulary and the target "
            f"{target_config.vocab_size}; choose a draft model of the same family"
        )
    most = min(c.max_positions for c in (target_config, draft_config) if c is not None)
    if context + max_new_tokens > most:
        raise UsageError(f"--context plus --max-new-tokens is {context + max_new_tokens}, over the models' {most}")
    if method == "easyspec" and layer > 1:
        _check_layers(draft_config, layer)
    model = _model_axis(target_config, slice_, {"--data": data, "--layer": layer, "--sequence": sequence}, model)
    return Job(
        target_config, slice_, draft_config, method, tree, num_draft_tokens, batch, context, max_new_tokens,
        float(temperature), data, model, layer, sequence,
    )  # fmt: skip


def _check_layers(draft: Any, layer: int) -> None:
    """Raises: UsageError for a draft model with too few layers for a group of `layer`."""
    if draft.num_layers < layer + 2:
        raise UsageError(
            f"--layer {layer}: {draft.name} has {draft.num_layers} layers, too few for such a group between the first "
            "and the last; lower it"
        )


def _model_axis(config: Any, slice_: chips.Topology, others: dict[str, int], model: int | None) -> int:
    """The size of the axis "model". Raises: UsageError for too many devices, or heads that they do not divide."""
    from specjax.models.layout import fits_heads

    left, layer = slice_.num_devices // math.prod(others.values()), others["--layer"]
    if left < (model or 1):
        asked = " times ".join(f"{flag} {n}" for flag, n in (others | {"--model": model or 1}).items() if n > 1)
        raise UsageError(f"{asked} is more than the {slice_.num_devices} devices of {slice_.name}")
    fitting = [n for n in range(1, left + 1) if fits_heads(config, layer * n)]
    if model is None and fitting:
        return fitting[-1]
    if model not in fitting:
        what = f"{config.num_heads} query and {config.num_kv_heads} key/value heads of {config.name}"
        flags = (
            f"--layer {layer}" if model is None else f"--model {model}" + (f" x --layer {layer}" if layer > 1 else "")
        )
        fix = f"--model {' or '.join(map(str, fitting))}" if fitting else "a lower --layer"
        raise UsageError(f"{flags} does not divide the {what}; choose {fix}")
    return model


def compile_report(
    target: str | Any, topology: str, *, cache: bool = True, on_step: Notify | None = None, **options: Any
) -> Report:
    """Compile a decode for TPUs that are not here: does it fit, what does it move, how fast might it be.

    Args:
      target: a built-in config name, a Hugging Face folder or a GGUF file (no weights are read), or a config.
      topology: a slice of chips such as "v5e:2x4".
      cache: keep results on disk. on_step: told what is about to be compiled.
      options: of `make_job`: draft, method, tree, num_draft_tokens, batch, context, max_new_tokens, dtype, cache_dtype,
        temperature, data, model, layer, sequence.

    Raises: UsageError for bad options or a missing compiler. A program that does not compile is a result.
    """
    return report_on(make_job(target, topology, **options), cache, on_step or (lambda name: None))


def report_on(job: Job, cache: bool, notify: Notify) -> Report:
    """As `compile_report`, for a job."""
    plain = dataclasses.replace(job, method="autoregressive", draft=None, tree=None, num_draft_tokens=None)
    found: list[ProgramReport] = []
    speedups: list[SpeedUp] = []
    ratio: dict[str, float] = {}
    if job.method == "autoregressive":
        found = compile_programs(job, cache, notify)
    else:
        found += compile_programs(plain, cache, notify, only=("step",), rename={"step": "plain step"})
        found += compile_programs(job, cache, notify, rename={"step": f"{job.method} step"})
        steps = found[0], next(p for p in found if p.name == f"{job.method} step")
        if all(p.compiles for p in steps):
            ratio = {side: steps[1].seconds[side] / steps[0].seconds[side] for side in ("roofline", "schedule")}
            tokens = tokens_of(job)
            for rate in cost.ACCEPTANCE_RATES:
                e = tokens(rate)
                speedups.append(SpeedUp(rate, e, e / ratio["roofline"], e / ratio["schedule"]))
    fits = suggest(job, found, cache, notify)
    return Report(describe(job), _chip(job), versions(), tuple(found), tuple(speedups), ratio, tuple(fits))


def tokens_of(job: Job) -> Callable[[float], float]:
    """Expected tokens per pass of the job's drafter, by acceptance rate."""
    drafter = _drafter_shape(job)
    return cost.draft_shape(job, drafter.num_nodes, drafter.max_depth)


@functools.cache
def _drafter_shape(job: Job) -> Drafter:
    """The job's drafter, of which only the static fields are used."""
    from specjax.models import abstract_params, make_model
    from specjax.types import Target

    whole = lambda config: Target(make_model(config), abstract_params(config))
    return programs.drafter_of(job, whole(job.target), None if job.draft is None else whole(job.draft))


def describe(job: Job) -> dict[str, Any]:
    """What was asked for, as JSON."""
    names = (
        "method", "tree", "num_draft_tokens", "batch", "context", "max_new_tokens", "temperature", "data", "layer",
        "sequence", "model",
    )  # fmt: skip
    return {
        "target": job.target.name,
        "target_params": programs.num_params(job.target),
        "draft": job.draft.name if job.draft else None,
        "draft_params": programs.num_params(job.draft) if job.draft else None,
        "dtype": str(job.target.dtype),
        "cache_dtype": job.target.cache_dtype,
        "topology": job.topology.name,
        "devices": job.devices,
        **{name: getattr(job, name) for name in names},
    }


def _chip(job: Job) -> dict[str, Any]:
    return dataclasses.asdict(job.topology.chip) | {"clock": job.topology.chip.clock}


# --- one program ------------------------------------------------------------------------------------------------------


def compile_programs(
    job: Job,
    cache: bool,
    notify: Notify,
    *,
    only: tuple[str, ...] = ("prefill", "step", "loop"),
    rename: dict[str, str] | None = None,
    nodes: int | None = None,
) -> list[ProgramReport]:
    """Reports on the programs of a job named `only`. nodes: verify so many with a draft that costs nothing."""
    rename = rename or {}
    reports: dict[str, ProgramReport] = {}
    for name in only:
        stored = _load(job, name, nodes) if cache else None
        if stored is not None:
            reports[name] = stored
    missing = [name for name in only if name not in reports]
    if missing:
        devices = chips.describe_devices(job.topology)
        drafter = None if nodes is None else programs.probe(nodes)
        rounds = math.ceil(job.max_new_tokens / (tokens_of(job)(ROUNDS_AT) if nodes is None else 1.0))
        built = programs.build(job, devices, drafter=drafter, rounds=rounds)
        passes = 0 if nodes is not None else cost.draft_passes(job, _drafter_shape(job).max_depth)
        needed = cost.must_bytes(job, built.arguments, built.state, passes, rounds)
        for program in built.programs:
            if program.name in missing:
                notify(rename.get(program.name, program.name))
                reports[program.name] = _compile(job, program, needed[program.name])
                if cache:
                    _save(job, program.name, nodes, reports[program.name])
    return [dataclasses.replace(reports[name], name=rename.get(name, name)) for name in only]


def _compile(job: Job, program: Program, must_bytes: float) -> ProgramReport:
    chip = job.topology.chip
    start = time.perf_counter()
    try:
        compiled = program.lower().compile()
    except Exception as error:  # what the compiler refuses is a result: too large, an unsupported shape, ...
        return _refused(job, program, str(error) or type(error).__name__)
    seconds = time.perf_counter() - start
    module = hlo.parse(compiled.as_text())
    totals = hlo.totals(module, program.trips)
    m = compiled.memory_analysis()
    memory = Memory(
        m.argument_size_in_bytes, m.temp_size_in_bytes, m.output_size_in_bytes, m.alias_size_in_bytes, chip.hbm_bytes
    )
    found = hlo.findings(module, program.trips, vocab_size=job.target.vocab_size, large=program.large)
    return ProgramReport(
        name=program.name,
        compiles=True,
        compile_seconds=seconds,
        memory=memory,
        flops=totals.flops,
        moved_bytes=totals.hbm_bytes,
        must_bytes=must_bytes,
        cycles=totals.cycles,
        kernel_calls=totals.kernels.calls,
        seconds=dataclasses.asdict(cost.estimate(chip, totals, must_bytes)),
        collectives=tuple(dataclasses.asdict(entry) for entry in totals.collectives),
        findings=tuple(dataclasses.asdict(entry) for entry in found),
        assumed=program.assumed if hlo.dynamic_loops(module) else {},
    )


def _refused(job: Job, program: Program, message: str) -> ProgramReport:
    needed = needed_bytes(message)
    reason = " ".join(message.split())[:300]
    if needed is not None:
        chip = job.topology.chip
        reason = f"it needs {gib(needed)} of HBM and a {chip.name} device has {gib(chip.hbm_bytes)}"
    return ProgramReport(program.name, False, reason=reason, needed_bytes=needed)


# --- what would fit ---------------------------------------------------------------------------------------------------


def suggest(job: Job, found: list[ProgramReport], cache: bool, notify: Notify) -> list[Fit]:
    """The smallest change of each kind with which the largest program that did not fit is compiled; each was compiled.

    More devices for the model, then a smaller batch, then a shorter context. Changes whose arguments alone are too
    large are not compiled.
    """
    refused = [p for p in found if not p.compiles and p.needed_bytes is not None]
    if not refused:
        return []
    failed = max(refused, key=lambda p: p.needed_bytes or 0)
    plain = failed.name == "plain step"
    base = dataclasses.replace(job, method="autoregressive", draft=None, tree=None) if plain else job
    name = "step" if failed.name.endswith("step") else failed.name
    fits = []
    for changes in (_more_devices(base), _halved(base, "batch", "--batch-size", base.data), _halved(
            base, "context", "--context", programs.CHUNK)):  # fmt: skip
        for change, smaller in changes[:TRIES]:
            if _arguments(smaller) > smaller.topology.chip.hbm_bytes:
                continue
            notify(f"{name} with {change}")
            report = compile_programs(smaller, cache, lambda _: None, only=(name,))[0]
            if report.memory is not None and report.memory.total <= smaller.topology.chip.hbm_bytes:
                fits.append(Fit(change, report.memory.total))
                break
    return fits


def _more_devices(job: Job) -> list[tuple[str, Job]]:
    """The same slice with all of its devices, then larger slices; what the model cannot be split over is left out."""
    changes = []
    from specjax.models.layout import fits_heads

    model, topology, others = job.model, job.topology, job.devices // job.model
    fits = lambda model: fits_heads(job.target, job.layer * model)
    while others * model * 2 <= topology.num_devices and fits(model * 2):
        model *= 2
        changes.append((f"--model {model}", dataclasses.replace(job, model=model)))
    while (bigger := chips.larger(topology)) is not None:
        topology, model = bigger, bigger.num_devices // others
        if not fits(model) or job.target.mlp_width % model:
            break
        changes.append((f"--topology {topology.name}", dataclasses.replace(job, topology=topology, model=model)))
    return changes


def _halved(job: Job, name: str, flag: str, least: int) -> list[tuple[str, Job]]:
    changes, value = [], getattr(job, name)
    while value // 2 >= least and (value // 2) % (job.data if name == "batch" else 1) == 0:
        value //= 2
        changes.append((f"{flag} {value}", dataclasses.replace(job, **{name: value})))
    return changes


def _arguments(job: Job) -> int:
    """Bytes per device of the parameters and the cache of a job, without compiling."""
    built = programs.build(job, chips.describe_devices(job.topology))
    step = next(p for p in built.programs if p.name == "step")
    return programs.shard_bytes(step.arguments)


# --- kept on disk -----------------------------------------------------------------------------------------------------


@functools.cache
def versions() -> dict[str, str]:
    """Of everything that decides what is compiled."""
    from specjax import __version__

    found = {"specjax": __version__, "jax": jax.__version__}
    for name in ("jaxlib", "libtpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


@functools.cache
def _sources() -> str:
    """A hash of the package's own files: an editable checkout changes without its version."""
    import specjax
    from specjax import configs, models, pallas_kernels

    digest = hashlib.sha256()
    for package in (specjax, models, configs, pallas_kernels):
        for folder in package.__path__:
            for file in sorted(Path(folder).rglob("*.py")):
                digest.update(file.read_bytes())
    return digest.hexdigest()


def _file(job: Job, name: str, nodes: int | None) -> Path:
    from specjax.cli.session import cache_folder

    key = json.dumps([repr(job), name, nodes, versions(), _sources()])
    return cache_folder().parent / "plans" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _load(job: Job, name: str, nodes: int | None) -> ProgramReport | None:
    try:
        return ProgramReport.from_json(json.loads(_file(job, name, nodes).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _save(job: Job, name: str, nodes: int | None, report: ProgramReport) -> None:
    """Whole or not at all; without a writable folder, not at all."""
    path = _file(job, name, nodes)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(dataclasses.asdict(report), file)
        os.replace(temporary, path)
