"""Flags that set how to draft: they are resolved and checked before anything is loaded."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from specjax.catalog.inputs import missing_inputs
from specjax.cli.options.common import parse_flag
from specjax.cli.options.groups import DraftOptions
from specjax.cli.output.files import read_text
from specjax.errors import UsageError, require
from specjax.files.untrusted import MAX_BYTES, parse_json

if TYPE_CHECKING:
    from specjax.adaptive import DepthPolicy
    from specjax.catalog import Kind, Method, Option
    from specjax.costs import Curve


class FlagValue(NamedTuple):
    """The value of an option, and the flag that set it."""

    flag: str
    value: Any


class MethodOptions(NamedTuple):
    """The options that flags set, by method. Options that no flag sets keep the defaults of their method."""

    options: Mapping[str, Mapping[str, FlagValue]] = MappingProxyType({})  # by method and name
    source: str | None = None  # the text to edit

    def values(self, method: str) -> dict[str, Any]:
        """Return the options of a method."""
        return {name: entry.value for name, entry in self.options.get(method, {}).items()}

    def name_flags(self, method: str, message: str) -> str:
        """Return a factory's error message with flags in place of the names of its arguments."""
        options = self.options.get(method, {})
        for name, entry in options.items():
            message = re.sub(rf"(?<![\w-]){name}\b", entry.flag, message, count=1)
        if "--" in message or not options:
            return message
        # The error is about a drafter inside of this one, whose options have names of their own.
        (first, *more) = options.values()
        return f"{f'--method {method}' if more or ' must be ' not in message else first.flag}: {message}"


NO_FLAGS = MethodOptions()
"""The options of a run without flags."""

FEW = 4
"""Number of methods that an error lists."""

LARGEST = 4096
"""Maximum number of drafted tokens per step. Useful sizes are far smaller; a tree's memory grows with the square."""


def _stop_option(method: Method) -> Option | None:
    option = method.option("stop")
    return option if option and option.type == "stop" else None  # that of swift is a number


NAMED: dict[str, Callable[[Method], Option | None]] = {
    "--num-draft-tokens": lambda method: method.option(method.size) if method.size else None,
    "--tree": lambda method: method.option("tree"),
    "--draft-stop": _stop_option,
    "--exit-layer": lambda method: method.option("exit_layer"),
}
"""Flags that set one option of a method, and the option that each of them sets."""


class DraftFiles(NamedTuple):
    """The inputs of drafters that flags name."""

    draft: str | None = None  # a draft model or a draft head
    head: str | None = None  # the kind of the draft head; None: `draft` is a model
    datastore: Path | None = None


def read_method_options(
    methods: Sequence[str], files: DraftFiles, flags: DraftOptions, named: Mapping[str, Any], *, batch_size: int = 1,
    kinds: Sequence[Kind] = ("drafter",),
) -> MethodOptions:  # fmt: skip
    """Check the flags of the methods, and parse their values.

    Args:
      named: values of the flags in NAMED; None: not given. kinds: the kinds of methods that the run has.

    Raises: UsageError for an unknown method, a missing input, or a flag that applies to none of the methods.
    """
    from specjax.catalog import METHODS

    _check_old_stop(flags.stop)
    for name in methods:
        _check_method(name, files, kinds)
    rows = {name: METHODS[name] for name in methods}
    _check_files(rows, files)
    options = _read_named(named, rows)
    for text in flags.settings or ():
        name, option, value = read_setting(text, rows)
        earlier = options[name].get(option.name)
        if earlier is not None:
            raise UsageError(f"--set {text}: {earlier.flag} sets {option.name} already; remove one of them")
        flag = f"--set {option.name}" if len(rows) == 1 else f"--set {name}.{option.name}"
        options[name][option.name] = FlagValue(flag, option.parse(value, flag))
    for name, row in rows.items():
        _check_size(row, options[name])
        _check_acceptance_head(named.get("--draft-stop"), name, options[name])
    return MethodOptions(options, None if flags.source is None else _read_source(flags.source, rows, batch_size))


def with_distributions(options: MethodOptions, methods: Sequence[str], controller: str | None) -> MethodOptions:
    """Return the options, with the draft's distributions or confidences kept for a controller that reads them.

    A value of --set stays, and so do methods without the option.
    """
    from specjax import controllers
    from specjax.catalog import METHODS

    read = None if controller is None else controllers.parse(controller)
    if read is None or not (read.reads_signals or read.reads_confidence):
        return options
    name_of_option = "keep_logits" if read.reads_signals else "keep_confidence"
    keep = {name_of_option: FlagValue("--controller", True)}
    able = [name for name in methods if METHODS[name].option(name_of_option) is not None]
    values = {name: {**keep, **options.options[name]} for name in able}
    return options._replace(options={**options.options, **values})


def _check_files(rows: Mapping[str, Method], files: DraftFiles) -> None:
    """Raise a UsageError for an input that none of the methods uses."""
    names = " and ".join(rows)
    uses = {need: any(row.uses(need) for row in rows.values()) for need in ("draft", "head", "datastore", "denoiser")}
    require(
        files.head is None or uses["head"],
        f"--draft is a draft head of kind {files.head}, and {names} does not use one; remove --draft, or use --method "
        f"{files.head}",
    )
    require(
        files.draft is None or uses["draft"] or uses["denoiser"] or files.head is not None,
        f"--draft is a draft model, and {names} does not use one; remove --draft, or use --method two_model",
    )
    require(
        files.datastore is None or uses["datastore"],
        f"--datastore is given, and {names} does not use one; remove it, or use --method rest",
    )


def _read_named(named: Mapping[str, Any], rows: Mapping[str, Method]) -> dict[str, dict[str, FlagValue]]:
    """Parse the flags in NAMED, for each method that has the option."""
    from specjax.catalog import of_kind

    size = named.get("--num-draft-tokens")
    require(size is None or size >= 1, f"--num-draft-tokens must be at least 1, not {size}")
    values: dict[str, dict[str, FlagValue]] = {name: {} for name in rows}
    for flag, value in named.items():
        if value is None:
            continue
        options = {name: NAMED[flag](row) for name, row in rows.items()}
        # All methods of a comparison have the same size; the other flags apply to the methods that have the option.
        lacking = [name for name, option in options.items() if option is None]
        if lacking and (flag == "--num-draft-tokens" or len(lacking) == len(rows)):
            able = [name for name, row in of_kind("drafter").items() if NAMED[flag](row)]
            listed = " and ".join(able[:FEW]) + (f" and {len(able) - FEW} others" if len(able) > FEW else "")
            raise UsageError(
                f"{flag} does not apply to method {' or '.join(lacking)}, only to {listed}; remove it, or choose one "
                "with --method"
            )
        for name, option in options.items():
            if option is not None:
                values[name][option.name] = FlagValue(flag, option.parse(str(value), flag))
    return values


def _check_size(row: Method, values: Mapping[str, FlagValue]) -> None:
    """Raise a UsageError if the size of the draft is set twice, or too large."""
    size, tree = values.get(row.size or ""), values.get("tree")
    if size is None:
        return
    if tree is not None:
        raise UsageError(f"{tree.flag} and {size.flag} both set the size of the draft; remove one of them")
    require(size.value <= LARGEST, f"{size.flag} must be at most {LARGEST}, not {size.value}")


def _check_acceptance_head(stop: str | None, name: str, values: Mapping[str, FlagValue]) -> None:
    """Raise a UsageError for --draft-stop trained without the acceptance head that it needs."""
    require(
        stop is None or not stop.startswith("trained") or "stop" not in values or "acceptance" in values,
        f"--draft-stop {stop} needs a trained acceptance head, and {name} has none; add --set acceptance=FOLDER to "
        "--method two_model, or choose another rule",
    )


def _check_old_stop(text: str | None) -> None:
    """Raise a UsageError that names the flag for the value of --stop."""
    from specjax.trees import stops

    if text is None:
        return
    try:
        stops.parse(text)
    except UsageError:
        raise UsageError(
            "--stop is no flag; stop strings are --stop-string, rules that end drafts --draft-stop"
        ) from None
    raise UsageError(f"--stop is no flag; write --draft-stop {text}")


def find_head_kind(draft: str | None, flag: str = "--draft") -> str | None:
    """Return the kind of draft head that a source is; None: a model, or no source. Raises: UsageError if damaged."""
    from specjax.catalog.defaults import NATIVE, NATIVE_METHOD

    if draft is None or draft == NATIVE:  # the files of the target have it, or loading refuses it
        return draft and NATIVE_METHOD
    from specjax.models.loading.heads import recognise

    match = parse_flag(flag, recognise, draft)
    return match and match[0]


def read_depth(adapt: str | None, max_new_tokens: int, head: str | None) -> DepthPolicy | None:
    """Parse --adapt. Raises: UsageError for an unknown method, or a draft head, which needs the whole target."""
    if adapt is None:
        return None
    from specjax.adaptive.parsing import parse_depth

    require(
        head is None, "--adapt changes the target, and the draft head of --draft needs the whole target; remove one"
    )
    return parse_flag("--adapt", lambda text: parse_depth(text, max_new_tokens), adapt)


def default_method(
    draft: str | None, head: str | None, flags: Iterable[Any] = (), settings: Sequence[str] | None = None
) -> str:
    """Return the method that drafts if none is named.

    A draft head drafts in `auto`. It drafts by its own method if a flag sets how to draft or verify, or if --set has
    an option that `auto` lacks.

    Args:
      head: the kind of draft head that `draft` is, or None. flags: values of the flags that set how to draft or verify.
    """
    from specjax.catalog import METHODS
    from specjax.catalog.defaults import default_method

    method = default_method(head or ("model" if draft is not None else None))
    if head is None or method == head:
        return method
    is_own = any(_has_option(METHODS[head], text) and not _has_option(METHODS["auto"], text) for text in settings or ())
    return head if is_own or any(value is not None for value in flags) else method


class Resolved(NamedTuple):
    """The flags of one run, with defaults for the missing ones."""

    method: str
    controller: str | None
    named: Mapping[str, Any]  # values of the flags in NAMED


def resolve_defaults(method: str | None, files: DraftFiles, flags: DraftOptions) -> Resolved:
    """Return the flags with defaults for the missing ones.

    A draft model drafts as deep as the goodput controller chooses, unless a flag sets how to draft.
    """
    named = flags.named
    if method is not None:
        return Resolved(method, flags.controller, named)
    method = default_method(files.draft, files.head, (*named.values(), flags.verifier), flags.settings)
    is_set = flags.settings or any(value is not None for value in (*named.values(), flags.controller))
    if method != "two_model" or is_set:
        return Resolved(method, flags.controller, named)
    from specjax.catalog.defaults import DRAFT_MODEL

    size = DRAFT_MODEL.options["num_tokens"]
    return Resolved(method, DRAFT_MODEL.controller, {**named, "--num-draft-tokens": size})


def _has_option(row: Method, setting: str) -> bool:
    """Return True if the text of a --set names this method or, without a method, one of its options."""
    name, _, option = setting.partition("=")[0].rpartition(".")
    return name == row.name if name else row.option(option) is not None


def _check_method(name: str, files: DraftFiles, kinds: Sequence[Kind]) -> None:
    """Raise a UsageError for an unknown method, one of another kind, or one that lacks an input."""
    from specjax.catalog import METHODS, find_drafter

    is_other = name in METHODS and METHODS[name].kind in kinds
    row, head = METHODS[name] if is_other else parse_flag("--method", find_drafter, name), files.head
    needs, takes = row.needs, row.takes
    require(
        not missing_inputs(row),
        f"--method: the command line cannot load the inputs of {name}; call {row.path} in Python",
    )
    require(files.draft is not None or "draft" not in needs, f"method {name} needs a draft model; add --draft MODEL")
    require(
        (files.draft is not None and head is None) or "denoiser" not in needs,
        f"method {name} drafts with a diffusion model; add --draft MODEL, a model of docs/diffusion.md",
    )
    require(
        head is None or "draft" not in needs or "head" in takes,
        f"--draft {files.draft} is a draft head of kind {head}, and method {name} needs a draft model; use --method "
        f"{head}, or remove --method",
    )
    if "head" in needs:
        expected = row.head_kind
        require(files.draft is not None, f"method {name} needs a draft head of the target; add --draft HEAD")
        kind = f"a draft head of kind {head}" if head else "no draft head of a known kind"
        fix = f"use --method {head}, or remove --method" if head else "choose a draft head, or use --method two_model"
        require(
            head == expected, f"--draft {files.draft} is {kind}, and method {name} needs one of kind {expected}; {fix}"
        )
    require(
        files.datastore is not None or "datastore" not in needs,
        f"method {name} needs a datastore; make one with `specjax datastore build` and add --datastore FOLDER",
    )


def read_settings(settings: Sequence[str], method: str) -> dict[str, str]:
    """Return the values of --set for one method, unparsed.

    Raises: UsageError for an unknown method or option, or an option that is set twice.
    """
    from specjax.catalog import find_drafter, of_kind

    rows = {method: of_kind("diffusion").get(method) or parse_flag("--method", find_drafter, method)}
    values: dict[str, str] = {}
    for text in settings:
        _, option, value = read_setting(text, rows)
        require(option.name not in values, f"--set {text}: --set sets {option.name} already; remove one of them")
        values[option.name] = value
    return values


def read_options(settings: Sequence[str] | None, rows: Mapping[str, Method]) -> dict[str, dict[str, Any]]:
    """Return the parsed values of --set for methods of any kind, by method.

    Raises: UsageError for an unknown method or option, a wrong value, or an option that is set twice.
    """
    values: dict[str, dict[str, Any]] = {name: {} for name in rows}
    for text in settings or ():
        name, option, value = read_setting(text, rows)
        require(option.name not in values[name], f"--set {text}: --set sets {option.name} already; remove one of them")
        values[name][option.name] = option.parse(value, f"--set {option.name}")
    return values


def read_setting(text: str, rows: Mapping[str, Method], flag: str = "--set") -> tuple[str, Option, str]:
    """Return the method, the option and the value of one --set, or of another flag of this form.

    Raises: UsageError for an unknown method or option.
    """
    target, equals, value = text.partition("=")
    name, dot, word = target.rpartition(".")
    require(bool(equals and word), f'{flag} must be NAME=VALUE, such as group=3, not "{text}"')
    require(
        bool(dot) or len(rows) == 1,
        f"{flag} {text} names no method, and there are several; write {flag} {next(iter(rows))}.{text}",
    )
    name = name or next(iter(rows))
    require(name in rows, f"{flag} {text}: {name} is not a method of this run; choose one of {', '.join(rows)}")
    option, names = rows[name].option(word), ", ".join(option.name for option in rows[name].settable)
    if option is None:
        fix = f"its options are {names}" if names else "it has no options; remove the flag"
        raise UsageError(f'{flag} {text}: method {name} has no option "{word}"; {fix}')
    return name, option, value


def _read_source(path: Path, rows: Mapping[str, Method], batch_size: int) -> str:
    """Return the text to edit. Raises: UsageError if no method edits a text, or the file is empty."""
    from specjax.catalog import METHODS

    editing = " and ".join(name for name, row in METHODS.items() if row.uses("source"))
    require(
        any(row.uses("source") for row in rows.values()),
        f"--source does not apply to method {' or '.join(rows)}, only to {editing}; remove it",
    )
    require(batch_size == 1, f"--source works with one prompt at a time; remove --batch-size {batch_size}")
    text = read_text(path, "--source")
    require(bool(text.strip()), f"--source: {path} is empty; choose a file with the text to edit")
    return text


def read_costs(costs: str | None, methods: Sequence[str], controller: str | None) -> Curve | str | None:
    """Return the value of --costs: None, "measured" or the curve of a plan.

    Raises: UsageError if no method uses costs, or for a file that is not a plan.
    """
    from specjax.catalog import METHODS
    from specjax.costs import planned

    if costs is None:
        return None
    able = [name for name, method in METHODS.items() if method.uses("costs")]
    require(
        controller == "goodput" or any(name in able for name in methods),
        f"--costs does not apply to method {' or '.join(methods)}, only to {' and '.join(able)} and to --controller "
        "goodput; remove it",
    )
    if costs == "measured":
        return costs
    require(os.path.exists(costs), f'--costs must be measured or a JSON file of `specjax plan --json`, not "{costs}"')
    text = read_text(Path(costs), "--costs", MAX_BYTES)
    plan = parse_json(text.encode(), f"--costs: {costs}", "write it with `specjax plan --json`")
    return parse_flag(f"--costs: {costs}", planned, plan)
