"""What a command needs before it decodes: the compilation cache, the models, the machine."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import shlex
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from rich.text import Text

from specjax import controllers
from specjax import costs as costs_of
from specjax.adaptive import DepthPolicy, skip_layers
from specjax.bench import near_ties
from specjax.catalog import METHODS
from specjax.catalog.defaults import defaults
from specjax.cli.options.common import Models, Settings, parsed, require
from specjax.cli.options.drafter_flags import AS_EACH_DOES, Drafting
from specjax.cli.output.console import Console, visible
from specjax.diffusion import Denoiser
from specjax.drafters.default import default_options
from specjax.drafters.making import make_drafter
from specjax.errors import UsageError
from specjax.files.atomic import cache_folder
from specjax.models.heads.contract import DraftHead
from specjax.models.layout import axis_that_changes_bits
from specjax.models.loading import ModelKindError
from specjax.models.loading.heads import LoadedHead, read_head
from specjax.models.loading.heads.checking import ANSWER, QUESTION, SelfCheck, check_head
from specjax.models.loading.heads.vocabulary import read_token_map
from specjax.persistence.program_cache import ProgramCache
from specjax.retrieval.datastore import Datastore, check_tokenizer, open_datastore
from specjax.types import Drafter, Processor, Target
from specjax.verifiers.parsing import parse_rule

if TYPE_CHECKING:
    from specjax.cli.options.processing import Processing

Part = TypeVar("Part", Drafter, Processor)


class Session(NamedTuple):
    """The loaded models."""

    target: Target
    tokenizer: Any
    draft: Target | None
    dtype: str
    load_seconds: float
    datastore: Datastore | None = None
    cache_dtype: str | None = None  # of both models; None: dtype
    costs: costs_of.Curve | None = None  # of wide passes; None: the rule of thumb
    draft_pass: float | None = None  # of the draft model, in passes of the target; None: the rule of thumb
    head: LoadedHead | None = None  # a learned one, in place of a draft model
    check: SelfCheck | None = None  # of the head
    same_bits: bool = False  # of the target

    @property
    def coarsest(self) -> str:
        """The dtype that decides how near a near-tie is."""
        return near_ties.SAME_BITS if self.same_bits else self.cache_dtype or self.dtype

    @property
    def capacity(self) -> int:
        """Largest length of prompt and new tokens."""
        return min(self._lengths.values())

    @property
    def shortest(self) -> str:
        """What has that length."""
        return min(self._lengths, key=lambda who: self._lengths[who])

    @property
    def _lengths(self) -> dict[str, int]:
        known = {"the model": self.target.model.max_positions}
        if self.draft is not None:
            known["the draft model"] = self.draft.model.max_positions
        if self.head is not None and self.head.max_positions is not None:
            known[f"the head of {self.head.kind}"] = self.head.max_positions
        return known

    def show_token(self, token: int) -> str:
        """Its text, quoted, as `visible` has it; of what is no text its id."""
        text = self.tokenizer.decode([token])
        return visible(repr(text)) if text else f"<{token}>"

    def draft_cost(self, method: str) -> float:
        """A pass of what drafts by passes, in passes of the target."""
        row = METHODS[method]
        if "draft" not in row.needs or self.draft is None:
            return row.draft_cost
        return costs_of.of_draft(self.target, self.draft) if self.draft_pass is None else self.draft_pass

    def drafter(self, method: str, drafting: Drafting = AS_EACH_DOES) -> Drafter:
        """The drafter of a method, with what the flags say of it."""
        import jax

        row = METHODS[method]
        draft: Target | DraftHead | None = self.draft if "draft" in row.needs else None
        if self.head is not None and row.uses("head"):
            draft = self.head.head
        values = drafting.values(method)
        choice = defaults(self.target, draft, jax.default_backend(), drafter=method)
        if values.keys() & {"tree", "num_tokens"}:
            choice = choice._replace(tree=None)
        options = default_options(choice) | values
        if row.uses("costs") and self.costs is not None:
            options["costs"] = self.costs
        if row.uses("source") and drafting.source is not None:
            options["source"] = [list(self.tokenizer.encode(drafting.source, special=False))]
        try:
            drafter = make_drafter(method, self.target, draft, datastore=self.datastore, **options)
        except UsageError as error:
            raise UsageError(drafting.in_flags(method, str(error))) from None
        return self.on_mesh(drafter)

    def on_mesh(self, drafter: Drafter) -> Drafter:
        """With its own arrays whole on every device of the target's mesh, if there is one."""
        mesh = self.target.model.mesh
        return drafter if mesh is None else _on_mesh(drafter, mesh)

    def processors(self, processing: Processing) -> tuple[Processor, ...]:
        """What the flags ask for, where the target's arrays lie."""
        mesh = self.target.model.mesh
        chosen = processing.processors(self.tokenizer, self.target.model.vocab_size)
        return chosen if mesh is None else tuple(_on_mesh(processor, mesh) for processor in chosen)

    def keywords(self, settings: Settings, method: str) -> dict[str, Any]:
        """The settings as `decode` and `stream` want them, for a method."""
        spec = settings.controller
        return {
            "max_new_tokens": settings.max_new_tokens,
            "temperature": settings.temperature,
            "top_k": settings.top_k,
            "top_p": settings.top_p,
            "min_p": settings.min_p,
            "eos": self.tokenizer.eos,
            "sampling": settings.sampling,
            "verifier": settings.verifier and parse_rule(settings.verifier),
            "controller": spec and controllers.parse(spec, self.costs, self.dtype, draft_cost=self.draft_cost(method)),
        }


def open_session(
    log: Console,
    models: Models,
    datastore: Path | None = None,
    *,
    mesh=None,
    has_head: bool = False,
    token_map: Path | None = None,
    flag: str = "--draft",
) -> Session:
    """Load the models, spread over the mesh if there is one, with a progress line on `log`.

    has_head: --draft is a learned head, which is compared with the target. token_map: of its ids. flag: what gave it.
    Raises: UsageError for models and datastores that cannot be loaded or whose vocabularies differ.
    """
    from specjax.parallel import check_same

    same_bits, draft = models.same_bits, models.draft
    axis = axis_that_changes_bits(mesh.shape) if same_bits and mesh is not None else None
    require(axis is None, f"--same-bits is not promised where a mesh splits rows or slots; leave it or --{axis} out")
    use_cache(not models.no_cache)
    store = _open_datastore(datastore)
    chosen = "bfloat16" if same_bits else choose_dtype(models.dtype)
    said = "bfloat16, the same bits in every pass" if same_bits else describe_dtype(models.dtype, chosen)
    doing, done = f"loading {models.target or 'SmolLM2-135M-Instruct'}", f"loaded ({said})"
    with stage(log, doing, done) as clock:
        model, tokenizer = _load(
            "--target", models.target, chosen, models.cache_dtype, mesh, same_bits=same_bits,
            max_positions=models.max_positions,
        )  # fmt: skip
        if store is not None:
            check_tokenizer(store, tokenizer, f"--datastore: {datastore}")
            check_same(store.summary, "datastores")
        draft_model, head = None, None
        if draft is not None and has_head:
            read = lambda source: read_token_map(source, model.model.vocab_size)
            ids = None if token_map is None else parsed("--speculative-token-map", read, token_map)
            head = parsed(flag, lambda source: read_head(source, model, token_map=ids), draft)
        elif draft is not None:
            everywhere = None if mesh is None else ()  # whole on every device
            draft_model, other = _load("--draft", draft, chosen, models.cache_dtype, mesh, over=everywhere)
            _check_vocabularies(tokenizer, other)
    check = None if head is None else tell_head(head, model, tokenizer, log)
    return Session(
        model, tokenizer, draft_model, chosen, clock.seconds, store, models.cache_dtype, head=head, check=check,
        same_bits=same_bits,
    )  # fmt: skip


def with_default_draft(session: Session, method: str, log: Console) -> tuple[Session, str]:
    """Return the session with the draft head that comes with specjax for its target, if any, and the method for both.

    method: the default method, chosen before the target was loaded.
    """
    import jax

    choice = defaults(session.target, None, jax.default_backend())
    if session.draft is not None or session.head is not None:
        return session, method
    if choice.head is None:
        return session, choice.drafter
    log.print("the draft head of the demo model drafts too; use --method auto to draft without it", style="dim")
    return session._replace(head=read_head(choice.head, session.target)), choice.drafter


def adapted(session: Session, depth: DepthPolicy | None, log: Console) -> Session:
    """With a target that runs a part of its layers, which is said."""
    if depth is None:
        return session
    log.print(f"lossy: {depth.name} leaves layers of {session.target.model.name} out, token by token", style="yellow")
    return session._replace(target=parsed("--adapt", lambda depth: skip_layers(session.target, depth), depth))


def tell_head(head: LoadedHead, target: Target, tokenizer, log: Console) -> SelfCheck:
    """Compare it with its target, and say how it was read and how well they agree."""
    tokens = [*tokenizer.chat(QUESTION), *tokenizer.encode(ANSWER, special=False)][: target.model.max_positions]
    with stage(log, "comparing the head with the target", "compared the head with the target"):
        check = check_head(head, target, tokens)
    for line in lines_of(head, check):
        log.print(line, soft_wrap=True)
    return check


def lines_of(head: LoadedHead, check: SelfCheck) -> list[str]:
    """How it was read, what was assumed, and whether it says what the target does."""
    flags = ", ".join(f"{name}={value}" for name, value in head.flags.items())
    who = "its authors write" if head.dialect == "authors" else f"{head.dialect} writes"
    lines = [f"head: {head.kind} as {who} it ({flags})", *(f"note: {note}" for note in head.notes)]
    if head.unused:
        lines.append(f"note: not used: {', '.join(head.unused)}")
    said = f"its first draft is the target's token at {check.agreement:.0%} of {check.places} places"
    if check.reason is None:
        return [*lines, said]
    return [*lines, f"warning: {said}; the text will be right, but hardly faster. Likeliest: {check.reason}"]


def weigh(session: Session, costs: costs_of.Curve | str | None, batch_size: int, log: Console) -> Session:
    """With the costs of wide passes; "measured": by timing them now."""
    if not isinstance(costs, str):
        return session._replace(costs=costs)
    draft_pass = None
    with stage(log, "measuring passes", "measured passes"):
        costs = costs_of.measured(session.target, batch=batch_size)
        if session.draft is not None:
            [[of_draft], [of_target]] = (costs_of.timed(m, (1,), batch_size) for m in (session.draft, session.target))
            draft_pass = of_draft / of_target
    said = ", ".join(f"{width}: {cost:.2f}" for width, cost in zip(*costs, strict=True))
    said += "" if draft_pass is None else f"; one of the draft model: {draft_pass:.2f}"
    log.print(f"tokens per pass: cost in passes over one: {said}", style="dim")
    return session._replace(costs=costs, draft_pass=draft_pass)


def _on_mesh(part: Part, mesh) -> Part:
    """Its own arrays, whole on every device; those of a model or a datastore lie on the mesh already."""
    import jax

    from specjax.parallel import place

    here = lambda x: isinstance(x, jax.Array) and len(x.sharding.device_set) > 1
    return part.replace(params=jax.tree.map(lambda x: x if here(x) else place(x, mesh), part.params))


def _open_datastore(folder: Path | None) -> Datastore | None:
    try:
        return None if folder is None else open_datastore(folder)
    except UsageError as error:
        raise UsageError(f"--datastore: {error}") from None


def open_denoiser(log: Console, models: Models) -> tuple[Session, Denoiser]:
    """Load a diffusion model. Raises: UsageError for models that cannot be loaded, or are none."""
    use_cache(not models.no_cache)
    target, chosen = models.target, choose_dtype(models.dtype)
    with stage(log, f"loading {target}", f"loaded ({describe_dtype(models.dtype, chosen)})") as clock:
        model, tokenizer = _load_denoiser(target, chosen, models.cache_dtype, models.max_positions)
    return Session(model.target, tokenizer, None, chosen, clock.seconds, None, models.cache_dtype), model


def _load(
    flag: str, source: str | None, dtype: str, cache_dtype: str | None, mesh, over=None, same_bits=False,
    max_positions=None,
):  # fmt: skip
    """Load an autoregressive model. Raises: UsageError for a model that cannot be loaded, or is a diffusion model."""
    import specjax

    try:
        return specjax.load(
            source, dtype=dtype, cache_dtype=cache_dtype, same_bits=same_bits, max_positions=max_positions, mesh=mesh,
            over=over,
        )  # fmt: skip
    except ModelKindError:
        raise UsageError(
            f"{flag}: {source} is a diffusion model, which only `specjax generate` and `specjax bench` decode, as "
            "--target"
        ) from None
    except UsageError as error:
        raise _name_flag(flag, error) from None


def _load_denoiser(source: str | None, dtype: str, cache_dtype: str | None, max_positions: int | None):
    """Load a diffusion model. Raises: UsageError for a model that cannot be loaded, or is autoregressive."""
    import specjax

    try:
        return specjax.load_denoiser(source, dtype=dtype, cache_dtype=cache_dtype, max_positions=max_positions)
    except ModelKindError:
        raise UsageError(
            f"--target: {source or 'SmolLM2-135M-Instruct'} is an autoregressive model, but --method is for diffusion "
            "models; choose a drafter of `specjax methods`, or leave --method out"
        ) from None
    except UsageError as error:
        raise _name_flag("--target", error) from None


def _name_flag(flag: str, error: UsageError) -> UsageError:
    """Return an error of loading with the flag that it is about."""
    if str(error).startswith("max_positions "):
        return UsageError(f"--max-positions {str(error).removeprefix('max_positions ')}")
    return UsageError(f"{flag}: {error}")


def _check_vocabularies(tokenizer, other) -> None:
    """Ids that only one of the two has, such as padding, do not matter: they are never drafted."""
    from specjax.files.untrusted import quote
    from specjax.models.loading import first_difference

    difference = first_difference(tokenizer, other)
    if difference is not None and difference[0] < min(len(tokenizer.vocab), len(other.vocab)):
        index, ours, theirs = difference
        raise UsageError(
            f"--draft: its vocabulary differs from the target's, first at id {index} ({quote(theirs)} in the draft, "
            f"{quote(ours)} in the target); choose a draft model of the same family"
        )


def choose_dtype(dtype: str) -> str:
    """auto: on CPU the type in which texts can be compared token by token, elsewhere the usual one.

    In bfloat16 SmolLM2 ran 1.4 times as fast on a CPU with AMX, but near-ties flipped in 16 of 18 texts.
    """
    import jax

    if dtype != "auto":
        return dtype
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def describe_dtype(asked: str, chosen: str) -> str:
    """The dtype and, where specjax chose it, why."""
    if asked != "auto":
        return chosen
    return f"{chosen}: in bfloat16 near-ties may flip" if chosen == "float32" else chosen


def use_cache(on: bool) -> None:
    """Keep compiled programs between processes, unless the user has set JAX's own cache up."""
    import jax

    if not on or jax.config.values["jax_compilation_cache_dir"]:
        return
    folder = cache_folder() / "compiled"
    with contextlib.suppress(OSError):  # a cache is a convenience
        folder.mkdir(parents=True, exist_ok=True)
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
        warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache")


OF_A_TEXT = ("prompt", "batch_file", "seed", "system")
"""Arguments that no program depends on."""


def kept_programs(arguments: Mapping[str, Any]) -> ProgramCache | None:
    """Compiled programs of earlier commands; those of the last one with the same flags are read from now on. None: with
    --no-cache."""
    if arguments["no_cache"]:
        return None
    kept = ProgramCache(cache_folder() / "programs", plain_first=True)
    kept.expect(repr(sorted((name, repr(value)) for name, value in arguments.items() if name not in OF_A_TEXT)))
    return kept


class Clock:
    """Seconds of a stage, once it is over."""

    seconds = 0.0


@contextlib.contextmanager
def stage(log: Console, doing: str, done: str) -> Iterator[Clock]:
    """A spinner while it lasts (on a terminal), one line when it is over."""
    clock, start = Clock(), time.perf_counter()
    with log.status(Text(visible(f"{doing} ..."))) if log.is_terminal else contextlib.nullcontext():
        yield clock
    clock.seconds = time.perf_counter() - start
    log.print(f"{done}, {clock.seconds:.1f} s", style="dim")


def provenance(session: Session) -> dict:
    """What a number needs to be believed: command, date, machine, models."""
    import jax

    from specjax import __version__

    device = jax.devices()[0]
    return {
        "command": shlex.join(["specjax", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "specjax": __version__,
        "machine": {
            "platform": platform.platform(),
            "cpu_count": os.cpu_count(),
            "python": platform.python_version(),
            "jax": jax.__version__,
            "backend": jax.default_backend(),
            "device_kind": device.device_kind,
            "device_count": jax.device_count(),
            "hosts": jax.process_count(),
        },
        "target": session.target.model.name,
        "draft": session.draft.model.name if session.draft else None,
        "head": session.head.kind if session.head else None,
        "datastore": session.datastore.summary if session.datastore else None,
        "dtype": session.dtype,
        "cache_dtype": session.cache_dtype,
        "same_bits": session.same_bits,
        "costs": session.costs and dict(zip(*session.costs, strict=True)),
        "draft_pass": session.draft_pass,
        "load_seconds": session.load_seconds,
    }


def peak_memory_bytes() -> int | None:
    """Peak of the first device since the process began, or of the process's own memory where devices do not tell."""
    import jax

    statistics = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in statistics:
        return int(statistics["peak_bytes_in_use"])
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
