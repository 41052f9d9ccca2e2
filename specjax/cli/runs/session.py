"""The loaded models of a command, and the drafters and settings that it builds with them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
from jax.sharding import Mesh

from specjax import controllers, parallel
from specjax import costs as costs_of
from specjax.adaptive import DepthPolicy, skip_layers
from specjax.catalog import METHODS
from specjax.catalog.defaults import NATIVE, defaults
from specjax.catalog.schemes import compressed_form, of_drafts
from specjax.cli.options.common import parse_flag, parse_template_args
from specjax.cli.options.drafter_flags import NO_FLAGS, MethodOptions
from specjax.cli.options.groups import ModelOptions
from specjax.cli.options.processing import ProcessingOptions
from specjax.cli.output.console import Console, visible
from specjax.cli.runs.decoding import Decoding
from specjax.cli.runs.environment import (
    choose_dtype,
    describe_command,
    stage,
    use_compilation_cache,
)
from specjax.diffusion import Denoiser
from specjax.drafters.default import default_options
from specjax.drafters.making import make_drafter
from specjax.engine.packing import Prompts
from specjax.engine.prepare import Settings
from specjax.engine.results import DecodeResult
from specjax.errors import UsageError, require
from specjax.files.homes import in_home
from specjax.files.untrusted import QUOTED, quote, read_json_object, shorten
from specjax.models.heads.contract import DraftHead, has_confidence
from specjax.models.loading import ModelKindError, first_difference
from specjax.models.loading.heads import LoadedHead, read_head
from specjax.models.loading.heads.checking import ANSWER, QUESTION, SelfCheck, check_head
from specjax.models.loading.heads.target_fit import TARGET_QUANTIZED
from specjax.models.loading.heads.vocabulary import read_token_map
from specjax.models.storage import num_bytes
from specjax.models.storage.format_names import describe_formats
from specjax.models.variants.shared_encoder import share_equal_encoder
from specjax.numerics.same_bits import SameBitsError, check_same_bits
from specjax.numerics.text_identity import describe_identity
from specjax.persistence.cards import CARD, describe_machine, describe_target, template_args_of
from specjax.processors import forced
from specjax.retrieval.datastore import Datastore, check_tokenizer, open_datastore
from specjax.speech import is_speech_model
from specjax.trees import stops
from specjax.types import Array, Drafter, Processor, Target

Part = TypeVar("Part", Drafter, Processor)

DEMO_NAME = "SmolLM2-135M-Instruct"
"""The model that is loaded without --target."""


class Session(NamedTuple):
    """The loaded models."""

    target: Target
    tokenizer: Any
    draft: Target | None
    dtype: str
    load_seconds: float
    datastore: Datastore | None = None
    cache_dtype: str | None = None  # of both models, or a compressed form of the target's cache; None: dtype
    costs: costs_of.Curve | None = None  # costs of wide target passes; None: the rule of thumb
    draft_pass: float | None = None  # cost of a pass of the draft model, in target passes; None: the rule of thumb
    head: LoadedHead | None = None  # a draft head, in place of a draft model
    check: SelfCheck | None = None  # the comparison of the head with the target
    same_bits: bool = False  # the target's logits do not depend on the pass
    quantize: str | None = None  # the scheme to which the target was rounded
    denoiser: Denoiser | None = None  # a diffusion model that drafts, in place of a draft model

    @property
    def lossy_cache(self) -> str | None:
        """Return the form of a compressed cache of the target, or None."""
        return self.cache_dtype if compressed_form(self.cache_dtype) is not None else None

    @property
    def capacity(self) -> int:
        """Return the maximum length of prompt and new tokens."""
        return min(self._limits.values())

    @property
    def capacity_owner(self) -> str:
        """Return the model that limits the length, in words."""
        return min(self._limits, key=lambda name: self._limits[name])

    @property
    def _limits(self) -> dict[str, int]:
        limits = {"the model": self.target.model.max_positions}
        if self.draft is not None:
            limits["the draft model"] = self.draft.model.max_positions
        if self.denoiser is not None:
            limits["the diffusion model that drafts"] = self.denoiser.model.max_positions
        return limits

    @property
    def formats(self) -> str | None:
        """Return the scheme or the origin of the target's quantised formats, in words; None: it is not quantised."""
        if self.quantize is not None:
            return self.quantize
        return "the formats of its file" if getattr(self.target.model.config, "quantized", ()) else None

    @property
    def baseline(self) -> str:
        """Return the name of plain decoding in a comparison."""
        same = "" if self.formats is None else f" of the same quantised model ({self.formats})"
        return f"plain decoding{same}"

    def show_token(self, token: int) -> str:
        """Return the text of a token in quotes, without control characters; its id if it has no text."""
        text = self.tokenizer.decode([token])
        return visible(repr(text)) if text else f"<{token}>"

    def drafter(self, method: str, flags: MethodOptions = NO_FLAGS, *, serving: bool = False) -> Drafter:
        """Build the drafter of a method with the options of the flags and the method's defaults.

        serving: True for a server, whose default stop condition and controller consider all rows.

        Raises: UsageError that names the flag of a wrong option.
        """
        row, values = METHODS[method], flags.values(method)
        draft: Target | DraftHead | Denoiser | None = self.draft if "draft" in row.needs else None
        if self.head is not None and row.uses("head"):
            draft = self.head.head
        if "denoiser" in row.needs:
            draft = self.denoiser
        choice = defaults(self.target, draft, jax.default_backend(), drafter=method)
        if values.keys() & {"tree", "num_tokens"}:
            choice = choice._replace(tree=None)
        options = default_options(choice) | values
        if serving and row.serving_stop and self.has_budget(method, flags):
            options |= {"stop": stops.parse(row.serving_stop), "keep_confidence": True}
        if row.uses("costs") and self.costs is not None:
            options["costs"] = self.costs
        if row.uses("source") and flags.source is not None:
            options["source"] = [list(self.tokenizer.encode(flags.source, special=False))]
        if isinstance(draft, Target):
            draft = share_equal_encoder(draft, self.target)
        try:
            drafter = make_drafter(method, self.target, draft, datastore=self.datastore, **options)
        except UsageError as error:
            raise UsageError(flags.name_flags(method, str(error))) from None
        return self.on_mesh(drafter)

    def has_budget(self, method: str, flags: MethodOptions) -> bool:
        """Return True if a server drafts chains of a head with a confidence, whose length a budget limits."""
        head = None if self.head is None else self.head.head
        is_chain = not flags.values(method).keys() & {"stop", "tree"}
        return bool(METHODS[method].serving_stop) and is_chain and has_confidence(head)

    def loop(self, method: str, flags: MethodOptions, settings: Mapping[str, Any]) -> Callable[..., DecodeResult]:
        """Return the loop of a method, a function `(prompts, *, key, max_new_tokens) -> DecodeResult`.

        A draft length that the first call measures holds for all calls: times vary, and another length needs another
        program. settings: values of `Method.settings` that flags set. The function raises UsageErrors that name the
        flags.
        """
        row, options = METHODS[method], flags.values(method) | dict(settings)
        draft = self.draft if self.head is None else self.head.head
        models = [{"target": self.target, "draft": draft}[argument] for argument in row.arguments]
        if self.datastore is not None and row.uses("datastore"):
            options["corpus"] = self.datastore.to_device()
        options |= {"eos": self.tokenizer.eos}

        def decode(prompts: Prompts, *, key: Array, max_new_tokens: int) -> DecodeResult:
            keys = {"key": key} if "key" in row.settings else {}
            try:
                result: DecodeResult = row.load()(*models, prompts, max_new_tokens=max_new_tokens, **keys, **options)
            except UsageError as error:
                message = f"--target: {error}" if str(error).startswith("the model ") else str(error)
                raise UsageError(flags.name_flags(method, message)) from None
            if row.size is not None and hasattr(result, row.size):
                options[row.size] = getattr(result, row.size)
            return result

        return decode

    def on_mesh(self, drafter: Drafter) -> Drafter:
        """Copy the drafter's own arrays to every device of the target's mesh, if there is one."""
        mesh = self.target.model.mesh
        return drafter if mesh is None else _on_mesh(drafter, mesh)

    def processors(self, flags: ProcessingOptions) -> tuple[Processor, ...]:
        """Build the processors of the flags, on every device of the target's mesh."""
        mesh = self.target.model.mesh
        processors = flags.processors(self.tokenizer, self.target.model.vocab_size)
        return processors if mesh is None else tuple(_on_mesh(processor, mesh) for processor in processors)

    def ending(self, max_new_tokens: int) -> tuple[Processor, ...]:
        """Return the processor that ends texts of the maximum length, if the files of the model demand it."""
        token = getattr(self.target.model.config, "last_token", None)
        return () if token is None else (forced({max_new_tokens - 1: token}),)

    def settings(self, decoding: Decoding, method: str, processors: tuple[Processor, ...] = ()) -> Settings:
        """Return the engine's settings with the end-of-text ids, the processors and the controller of a method."""
        controller = None
        if decoding.controller is not None:
            cost = self._draft_cost(method)
            controller = controllers.parse(
                decoding.controller, self.costs, self.dtype, draft_cost=cost, shares=costs_of.shares_of(self.target)
            )
        return dataclasses.replace(
            decoding.settings, eos=self.tokenizer.eos, processors=processors, controller=controller
        )

    def _draft_cost(self, method: str) -> float:
        """Return the cost of one drafting pass, in target passes."""
        row = METHODS[method]
        if "draft" not in row.needs or self.draft is None:
            return row.draft_cost
        return costs_of.of_draft(self.target, self.draft) if self.draft_pass is None else self.draft_pass


def open_session(
    log: Console,
    models: ModelOptions,
    datastore: Path | None = None,
    *,
    mesh: Mesh | None = None,
    has_head: bool = False,
    has_denoiser: bool = False,
    apart: bool = False,
    token_map: Path | None = None,
    flag: str = "--draft",
    reads_sources: bool = False,
) -> Session:
    """Load the models, over the mesh if there is one, and print a progress line on `log`.

    Args:
      has_head: True if the draft is a draft head, which is then compared with the target. has_denoiser: True if it is
        a diffusion model. apart: True if target and draft model are placed on different devices.
      token_map: the ids that the head drafts. flag: the flag of the head, for errors.
      reads_sources: True if the command reads the source of an encoder-decoder.

    Raises: UsageError for models and datastores that cannot be loaded, and for different vocabularies.
    """
    models.check_head(has_head)
    same_bits = models.same_bits
    for name, value in (("--block", models.block), ("--mask-token", models.mask_token)):
        fits = value is None or has_denoiser
        require(fits, f"{name} applies to diffusion models, and neither target nor draft is one; remove it")
    if same_bits:
        with _named_same_bits():
            check_same_bits("bfloat16", models.cache_dtype, mesh)
    use_compilation_cache(not models.no_cache)
    store = None if datastore is None else parse_flag("--datastore", open_datastore, datastore)
    dtype = "bfloat16" if same_bits else choose_dtype(models.dtype)
    loading = f"loading {models.target or DEMO_NAME}"
    with stage(log, loading, "loaded") as clock:
        target, tokenizer = _load(
            "--target", models.target, dtype=dtype, cache_dtype=models.cache_dtype, mesh=mesh, same_bits=same_bits,
            max_positions=models.max_positions, quantize=models.quantize, keep_quantized=models.keep_quantized,
            reads_sources=reads_sources,
        )  # fmt: skip
        tokenizer = _with_template_args(tokenizer, models)
        if store is not None:
            check_tokenizer(store, tokenizer, f"--datastore: {datastore}")
            parallel.check_same(store.summary, "datastores")
        draft, denoiser, head = None, None, None
        if has_head:
            head = _load_head(flag, models, target, tokenizer, token_map)
        elif models.draft is not None:
            over = None if mesh is None else ()  # a copy on every device
            options: dict[str, Any] = {
                "dtype": dtype, "cache_dtype": of_drafts(models.cache_dtype), "mesh": mesh, "over": over,
                "keep_quantized": models.keep_quantized, "quantize": models.draft_quantize,
            }  # fmt: skip
            if has_denoiser:
                options |= {"block": models.block, "mask_token": models.mask_token}
                advice = "drafts with a diffusion model; use --method two_model"
                denoiser, other = _load_denoiser("--draft", models.draft, advice, **options)
            else:
                has_source = target.model.capabilities.requires_inputs
                draft, other = _load("--draft", models.draft, reads_sources=has_source, **options)
                if apart:
                    target, draft = (jax.device_put(x, jax.local_devices()[i]) for i, x in enumerate((target, draft)))
            check_vocabularies(tokenizer, other)
    _print_identity(target, dtype, models, log)
    check = None if head is None else compare_head(head, target, tokenizer, log)
    if models.draft is not None:
        note_training(models.draft, "template_args", template_args_of(tokenizer), log)
        if head is None or head.other_scheme is None:  # one warning is enough
            note_training(models.draft, TARGET_QUANTIZED, describe_formats(target.model.config), log)
    return Session(
        target, tokenizer, draft, dtype, clock.seconds, store, models.cache_dtype, head=head, check=check,
        same_bits=same_bits, quantize=models.quantize, denoiser=denoiser,
    )  # fmt: skip


def open_denoiser(log: Console, models: ModelOptions) -> tuple[Session, Denoiser]:
    """Load a diffusion model. Raises: UsageError for a model that cannot be loaded, or is autoregressive."""
    use_compilation_cache(not models.no_cache)
    dtype, source = choose_dtype(models.dtype), models.target or DEMO_NAME
    with stage(log, f"loading {source}", "loaded") as clock:
        denoiser, tokenizer = _load_denoiser(
            "--target", models.target,
            "is for diffusion models; choose a drafter of `specjax methods`, or remove --method",
            dtype=dtype, cache_dtype=models.cache_dtype, max_positions=models.max_positions, block=models.block,
            mask_token=models.mask_token, quantize=models.quantize, keep_quantized=models.keep_quantized,
        )  # fmt: skip
    _print_identity(denoiser.target, dtype, models, log)
    tokenizer = _with_template_args(tokenizer, models)
    session = Session(
        denoiser.target, tokenizer, None, dtype, clock.seconds, None, models.cache_dtype, quantize=models.quantize
    )
    return session, denoiser


@contextlib.contextmanager
def _named_same_bits() -> Iterator[None]:
    """Name flags in the error of a model or device for which --same-bits was not shown to hold."""
    try:
        yield
    except SameBitsError as error:
        reason = _SETTINGS.sub(lambda match: "--" + match[0].replace("_", "-"), error.reason)
        raise SameBitsError(reason, "--same-bits", "leave --same-bits out") from None


_SETTINGS = re.compile(r"(?<!-)\b(cache_dtype|dtype)\b")
"""The settings that have a flag, in the reasons of a `SameBitsError`."""


def _print_identity(target: Target, dtype: str, models: ModelOptions, log: Console) -> None:
    """Print the dtype, and what rounding can do to the texts."""
    source = " (chosen by --dtype auto)" if models.dtype == "auto" and not models.same_bits else ""
    if getattr(target.model.config, "quantized", ()):
        source += f"; {target.model.name}, quantised, takes {num_bytes(target.params) / 2**20:,.0f} MiB"
    log.print(f"dtype {dtype}{source}; {describe_identity(target)}", style="dim", soft_wrap=True)
    if compressed_form(models.cache_dtype) is not None:
        log.print(f"lossy: {models.cache_dtype} compresses the cache of {target.model.name}", style="yellow")


def _with_template_args(tokenizer: Any, models: ModelOptions) -> Any:
    """Return the tokenizer with the variables of --template-args. Raises: UsageError if the template rejects them."""
    variables = parse_template_args(models.template_args)
    if not variables:
        return tokenizer

    def use(variables: dict[str, Any]) -> Any:
        result = tokenizer.with_template_args(variables)
        result.chat(QUESTION)
        return result

    return parse_flag("--template-args", use, variables)


def _load(flag: str, source: str | None, *, reads_sources: bool = False, **options: Any) -> tuple[Target, Any]:
    """Load an autoregressive model.

    Raises: UsageError for a model that cannot be loaded, for a diffusion model, and for an encoder-decoder if nothing
      reads a source for it.
    """
    import specjax

    other_kind = (
        "is a diffusion model; in `specjax generate` and `specjax bench` use these as --target, or draft with them by "
        "--method deer, diffuspec or failfast"
    )
    with _named_same_bits(), _named_errors(flag, source, other_kind):
        target, tokenizer = specjax.load(source, **options)
    if target.model.capabilities.requires_inputs and not reads_sources:
        kind, command = ("speech model", "transcribe") if is_speech_model(target) else ("encoder-decoder", "generate")
        raise UsageError(
            f"{flag}: the {kind} {target.model.name} works in `specjax {command}` with a drafter only; choose a "
            "decoder-only model"
        )
    return target, tokenizer


def load_beside(session: Session, source: str, flag: str) -> Target:
    """Load another model of a run, in the target's dtype. Raises: UsageError, also for another vocabulary."""
    model, tokenizer = _load(flag, source, dtype=session.dtype, cache_dtype=of_drafts(session.cache_dtype))
    check_vocabularies(session.tokenizer, tokenizer, flag)
    return model


def _load_denoiser(flag: str, source: str | None, advice: str, **options: Any) -> tuple[Denoiser, Any]:
    """Load a diffusion model. Raises: UsageError, with `advice` about --method for an autoregressive model."""
    import specjax

    other_kind = f"is an autoregressive model, but --method {advice}"
    with _named_errors(flag, source or DEMO_NAME, other_kind):
        return specjax.load_denoiser(source, **options)


@contextlib.contextmanager
def _named_errors(flag: str, source: str | None, other_kind: str) -> Iterator[None]:
    """Convert errors of loading to UsageErrors that name the flag, with `other_kind` for a model of the other loop."""
    try:
        yield
    except ModelKindError:
        raise UsageError(f"{flag}: {source} {other_kind}") from None
    except SameBitsError:
        raise
    except UsageError as error:
        raise _name_flag(flag, error) from None


def _load_head(flag: str, models: ModelOptions, target: Target, tokenizer: Any, token_map: Path | None) -> LoadedHead:
    """Load a draft head of the target. Raises: UsageError that names the flag."""
    read_map = lambda path: read_token_map(path, target.model.vocab_size)
    ids = None if token_map is None else parse_flag("--speculative-token-map", read_map, token_map)
    read = lambda folder: read_head(folder, target, token_map=ids, settings=models.head_settings(), tokenizer=tokenizer)
    return parse_flag(flag, read, models.draft)


def _name_flag(flag: str, error: UsageError) -> UsageError:
    """Return an error of loading with the flag that it is about."""
    option, _, message = str(error).partition(" ")
    if option in ("max_positions", "block", "mask_token"):
        return UsageError(f"--{option.replace('_', '-')} {message}")
    return UsageError(f"{flag}: {error}")


def check_vocabularies(tokenizer: Any, other: Any, flag: str = "--draft") -> None:
    """Raise a UsageError if the models' ids differ. Ids that only one model has, such as padding, are never drafted."""
    difference = first_difference(tokenizer, other)
    if difference is not None and difference[0] < min(len(tokenizer.vocab), len(other.vocab)):
        index, target_text, draft_text = difference
        raise UsageError(
            f"{flag}: its vocabulary differs from the target's, first at id {index} ({quote(draft_text)} in this "
            f"model, {quote(target_text)} in the target); choose a model of the same family"
        )


def with_default_draft(session: Session, method: str, log: Console) -> tuple[Session, str]:
    """Return the session with the default draft head of its target, if any, and the method for both.

    The head is the module in the target's own files, or one that comes with specjax.

    method: the default method, chosen before the target was loaded.
    """
    if session.draft is not None or session.head is not None:
        return session, method
    choice = defaults(session.target, None, jax.default_backend())
    if choice.head is None:
        note_native(session.target, log)
        return session, choice.drafter
    is_native = choice.head == NATIVE
    head = "multi-token-prediction module of the target's files" if is_native else "draft head of the demo model"
    log.print(f"the {head} drafts too; use --method auto to draft without it", style="dim", soft_wrap=True)
    return session._replace(head=read_head(choice.head, session.target)), choice.drafter


def note_native(target: Target, log: Console) -> None:
    """Print a line about a module in the target's files that cannot draft, if there is one."""
    native = target.native
    if native is not None and native.lacking is not None:
        log.print(
            f"the target's files have a multi-token-prediction module (form {native.dialect}), which cannot draft: its "
            f"layer has {native.lacking}",
            style="dim", soft_wrap=True,
        )  # fmt: skip


def with_adapted_target(session: Session, depth: DepthPolicy | None, log: Console) -> Session:
    """Return the session with a target that runs some of its layers, and print a note."""
    if depth is None:
        return session
    name = session.target.model.name
    log.print(f"lossy: {depth.name} skips layers of {name}, per token", style="yellow")
    return session._replace(target=parse_flag("--adapt", lambda policy: skip_layers(session.target, policy), depth))


def with_costs(
    session: Session, costs: costs_of.Curve | str | None, batch_size: int, log: Console, settings: Settings
) -> Session:
    """Return the session with the costs of wide passes; "measured" times them now, with the run's sampling."""
    if not isinstance(costs, str):
        return session._replace(costs=costs)
    draft_pass = None
    with stage(log, "measuring passes", "measured passes"):
        sampling = settings.to_sampling()
        curve = costs_of.measured(session.target, batch=batch_size, sampling=sampling)
        if session.draft is not None:
            [[draft_time], [target_time]] = (
                costs_of.timed(model, (1,), batch_size, sampling=sampling) for model in (session.draft, session.target)
            )
            draft_pass = draft_time / target_time
    listed = ", ".join(f"{width}: {cost:.2f}" for width, cost in zip(*curve, strict=True))
    listed += "" if draft_pass is None else f"; draft model: {draft_pass:.2f}"
    log.print(f"cost of a pass by its width, in passes of one token: {listed}", style="dim")
    return session._replace(costs=curve, draft_pass=draft_pass)


def compare_head(head: LoadedHead, target: Target, tokenizer: Any, log: Console) -> SelfCheck:
    """Compare a draft head with its target, and print its format and their agreement."""
    tokens = [*tokenizer.chat(QUESTION), *tokenizer.encode(ANSWER, special=False)][: target.model.max_positions]
    require(len(tokens) > 2, "--max-positions must be at least 3 with a draft head, whose check reads that many tokens")
    with stage(log, "comparing the head with the target", "compared the head with the target"):
        check = check_head(head, target, tokens)
    for line in (*describe_head(head, check), *describe_length(head, target)):
        log.print(line, soft_wrap=True)
    return check


RECORDED = {"template_args": "--template-args", "system": "--system", "target_quantized": "the target in"}
"""Flags and properties of the target that a drafter is trained with, in words, by their name in its card."""


def note_training(source: str | None, name: str, value: Any, log: Console) -> None:
    """Print a warning if the card of a drafter has another value of one of RECORDED. `specjax train` writes it."""
    file = in_home(source or "") / CARD
    try:
        card = read_json_object(file) or {}
    except (UsageError, OSError):  # the file of another program
        return
    if name in card and card[name] != value:
        show = lambda value: shorten(json.dumps(value, ensure_ascii=False), QUOTED) if value else "none"
        log.print(
            f"warning: the drafter was trained with {RECORDED[name]} {show(card[name])}, and this run has "
            f"{show(value)}; the text stays right, but drafting may be slow",
            style="yellow", soft_wrap=True,
        )  # fmt: skip


def describe_head(head: LoadedHead, check: SelfCheck) -> list[str]:
    """Return the format of a draft head, assumptions of its loading, and its agreement with the target, in words."""
    flags = ", ".join(f"{name}={value}" for name, value in head.flags.items())
    dialect = "its authors" if head.dialect == "authors" else head.dialect
    notes = [f"note: {note}" for note in (*head.notes, *head.warnings)]
    lines = [f"head: {head.kind} in the format of {dialect} ({flags})", *notes]
    if head.unused:
        lines.append(f"note: not used: {', '.join(head.unused)}")
    agreement = f"its first draft equals the target's token at {check.agreement:.0%} of {check.places} positions"
    if len(check.depths) > 1:
        later = ", ".join(f"{depth:.0%}" for depth in check.depths[1:])
        agreement += f", and the later drafts after the text's own tokens at {later}"
    if check.reason is None:
        return [*lines, agreement]
    return [*lines, f"warning: {agreement}; the text stays right, but drafting is slow. Likely cause: {check.reason}"]


def describe_length(head: LoadedHead, target: Target) -> list[str]:
    """Return a line about texts that are longer than those of the head's training, if the target takes longer ones."""
    length = head.max_positions
    if length is None or length >= target.model.max_positions:
        return []
    return [f"note: the head was trained for texts of {length:,} tokens; in longer ones it reads the last {length:,}"]


def _on_mesh(part: Part, mesh: Mesh) -> Part:
    """Copy the arrays of a drafter or processor to every device, except those that lie on the mesh already."""
    is_placed = lambda x: isinstance(x, jax.Array) and len(x.sharding.device_set) > 1
    return part.replace(params=jax.tree.map(lambda x: x if is_placed(x) else parallel.place(x, mesh), part.params))


def provenance(session: Session) -> dict[str, Any]:
    """Return the facts that a measurement needs: command, date, machine, models."""
    return {
        **describe_command(),
        "machine": describe_machine(),
        **describe_target(session.target, session.tokenizer),
        "draft": next((draft.model.name for draft in (session.draft, session.denoiser) if draft), None),
        "head": session.head.kind if session.head else None,
        "datastore": session.datastore.summary if session.datastore else None,
        "dtype": session.dtype,
        "cache_dtype": session.cache_dtype,
        **({} if session.lossy_cache is None else {"cache_guarantee": "lossy"}),
        "same_bits": session.same_bits,
        "quantize": session.quantize,
        "quantized": session.formats is not None,
        "weights_bytes": num_bytes(session.target.params),
        "costs": session.costs and dict(zip(*session.costs, strict=True)),
        "draft_pass": session.draft_pass,
        "load_seconds": session.load_seconds,
    }
