"""What the command line says of the drafters, checked before anything is loaded."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from specjax.cli.options.common import parsed, require
from specjax.cli.options.completion import LOADABLE
from specjax.cli.output.files import read_text
from specjax.errors import UsageError
from specjax.files.untrusted import MAX_BYTES, parse_json

if TYPE_CHECKING:
    from specjax.adaptive import DepthPolicy
    from specjax.catalog import Method, Option
    from specjax.cli.options.common import Settings


class Given(NamedTuple):
    """The value of an option, and the flag that set it."""

    flag: str
    value: Any


class Drafting(NamedTuple):
    """What the flags say; where they say nothing each method does as it does."""

    options: Mapping[str, Mapping[str, Given]] = MappingProxyType({})  # by method and name
    source: str | None = None  # the text to be edited

    def values(self, method: str) -> dict[str, Any]:
        """The options of a method."""
        return {name: given.value for name, given in self.options.get(method, {}).items()}

    def in_flags(self, method: str, sentence: str) -> str:
        """A factory's complaint with the flags in place of its own names."""
        found = self.options.get(method, {})
        for name, given in found.items():
            sentence = re.sub(rf"(?<![\w-]){name}\b", given.flag, sentence, count=1)
        if "--" in sentence or not found:
            return sentence
        # Of a drafter inside of this one, whose options have names of their own.
        (first, *others) = found.values()
        return f"{f'--method {method}' if others or ' must be ' not in sentence else first.flag}: {sentence}"


AS_EACH_DOES = Drafting()

FEW = 4
"""Methods that a sentence names."""

LARGEST = 4096
"""Tokens that may be drafted per round. Far more than pays anywhere; a tree takes the square of it to describe."""


def _stop(method: Method) -> Option | None:
    option = method.option("stop")
    return option if option and option.type == "stop" else None  # that of swift is a number


NAMED: dict[str, Callable[[Method], Option | None]] = {
    "--num-draft-tokens": lambda method: method.option(method.size) if method.size else None,
    "--tree": lambda method: method.option("tree"),
    "--draft-stop": _stop,
    "--exit-layer": lambda method: method.option("exit_layer"),
}
"""Flags of their own, and the option of a method that each sets."""


def read_drafting(
    names: list[str],
    draft: str | None,
    datastore: Path | None = None,
    *,
    named: Mapping[str, Any] = MappingProxyType({}),
    settings: Sequence[str] | None = None,
    source: Path | None = None,
    batch_size: int = 1,
    old_stop: str | None = None,
    head: str | None = None,
) -> Drafting:
    """Check the flags of the methods, and read their values.

    Args:
      head: the kind of head that `draft` is; None: it is a whole model.
      named: values of the flags of NAMED, None: not given. settings: of --set. old_stop: of --stop, as it was called.

    Raises: UsageError for an unknown method, one that lacks something, or a flag that no method has a use for.
    """
    from specjax.catalog import METHODS

    _check_old_stop(old_stop)
    for name in names:
        _check_method(name, draft, datastore, head)
    rows = {name: METHODS[name] for name in names}
    drafting, retrieving, learned = (
        any(row.uses(what) for row in rows.values()) for what in ("draft", "datastore", "head")
    )
    require(
        head is None or learned,
        f"--draft is a head of {head}, but {' and '.join(names)} drafts without one; leave one out, or use --method "
        f"{head}",
    )
    require(
        draft is None or drafting or head is not None,
        f"--draft is given, but {' and '.join(names)} drafts without a model; leave it out or use --method two_model",
    )
    require(
        datastore is None or retrieving,
        f"--datastore is given, but {' and '.join(names)} retrieves nothing; leave it out or use --method rest",
    )
    found = _read_named(named, rows)
    for text in settings or ():
        name, option, value = read_setting(text, rows)
        earlier = found[name].get(option.name)
        if earlier is not None:
            raise UsageError(f"--set {text}: {earlier.flag} has set {option.name} already; leave one out")
        flag = f"--set {option.name}" if len(rows) == 1 else f"--set {name}.{option.name}"
        found[name][option.name] = Given(flag, option.parse(value, flag))
    for name, row in rows.items():
        _check_size(row, found[name])
        _check_trained(named.get("--draft-stop"), name, found[name])
    return Drafting(found, None if source is None else _read_source(source, rows, batch_size))


def _read_named(named: Mapping[str, Any], rows: Mapping[str, Method]) -> dict[str, dict[str, Given]]:
    """What the flags of NAMED say of each method, of those that have the option."""
    from specjax.catalog import of_kind

    size = named.get("--num-draft-tokens")
    require(size is None or size >= 1, f"--num-draft-tokens must be at least 1, not {size}")
    found: dict[str, dict[str, Given]] = {name: {} for name in rows}
    for flag, value in named.items():
        if value is None:
            continue
        options = {name: NAMED[flag](row) for name, row in rows.items()}
        # A size is for all of them: what is compared should be equally large.
        lacking = [name for name, option in options.items() if option is None]
        if lacking and (flag == "--num-draft-tokens" or len(lacking) == len(rows)):
            others = [name for name, row in of_kind("drafter").items() if NAMED[flag](row)]
            known = " and ".join(others[:FEW]) + (f" and {len(others) - FEW} others" if len(others) > FEW else "")
            raise UsageError(
                f"{flag} does not apply to method {' or '.join(lacking)}, only to {known}; leave it out, or choose one "
                "with --method"
            )
        for name, option in options.items():
            if option is not None:
                found[name][option.name] = Given(flag, option.parse(str(value), flag))
    return found


def _check_size(row: Method, given: Mapping[str, Given]) -> None:
    """Raises: UsageError if it is set twice, or huge."""
    size, tree = given.get(row.size or ""), given.get("tree")
    if size is None:
        return
    if tree is not None:
        raise UsageError(f"{tree.flag} and {size.flag} both set the size of the draft; leave one out")
    require(size.value <= LARGEST, f"{size.flag} must be at most {LARGEST}, not {size.value}")


def _check_trained(stop: str | None, name: str, given: Mapping[str, Given]) -> None:
    require(
        stop is None or not stop.startswith("trained") or "stop" not in given or "acceptance" in given,
        f"--draft-stop {stop} goes by a trained acceptance head, and {name} is given none; add --set "
        "acceptance=FOLDER to --method two_model, or choose another rule",
    )


def _check_old_stop(text: str | None) -> None:
    from specjax.trees import stops

    if text is None:
        return
    try:
        stops.parse(text)
    except UsageError:
        raise UsageError(
            "--stop: `specjax generate` takes stop strings with --stop-string; rules that stop drafts are --draft-stop"
        ) from None
    raise UsageError(f"--stop of drafts is called --draft-stop now; write --draft-stop {text}")


def recognised(draft: str | None, flag: str = "--draft") -> str | None:
    """The kind of head that --draft is; None: it is a whole model, or not given. Raises: UsageError if damaged."""
    if draft is None:
        return None
    from specjax.models.loading.heads import recognise

    found = parsed(flag, recognise, draft)
    return found and found[0]


def read_depth(adapt: str | None, max_new_tokens: int, head: str | None) -> DepthPolicy | None:
    """What --adapt says of the target's layers. Raises: UsageError."""
    if adapt is None:
        return None
    from specjax.adaptive.parsing import parse_depth

    require(head is None, "--adapt changes the target that the head of --draft was trained for; leave one of them out")
    return parsed("--adapt", lambda spec: parse_depth(spec, max_new_tokens), adapt)


def default_method(
    draft: str | None, head: str | None, flags: Iterable[Any] = (), settings: Sequence[str] | None = None
) -> str:
    """Return the method that drafts if none is named.

    A draft head drafts by its own method, not in `auto`, if a flag sets how to draft or verify, or if --set sets an
    option that only its own method has.

    Args:
      head: the kind of draft head that `draft` is, or None. flags: values of the flags that set how to draft or verify.
    """
    from specjax.catalog import METHODS
    from specjax.catalog.defaults import default_drafter

    chosen = default_drafter(head or ("model" if draft is not None else None))
    if head is None or chosen == head:
        return chosen
    own = any(_has_option(METHODS[head], text) and not _has_option(METHODS["auto"], text) for text in settings or ())
    return head if own or any(value is not None for value in flags) else chosen


def resolve_defaults(
    method: str | None, draft: str | None, head: str | None, decoding: Settings, named: Mapping[str, Any],
    settings: Sequence[str] | None,
) -> tuple[str, Settings, dict[str, Any]]:  # fmt: skip
    """Return the method, the settings, and the values of the flags in NAMED; defaults replace flags that are not given.

    A draft model drafts as deep as the goodput controller chooses, unless a flag sets how to draft.
    """
    if method is not None:
        return method, decoding, dict(named)
    chosen = default_method(draft, head, (*named.values(), decoding.verifier), settings)
    is_set = settings or any(value is not None for value in (*named.values(), decoding.controller))
    if chosen != "two_model" or is_set:
        return chosen, decoding, dict(named)
    from specjax.catalog.defaults import DRAFT_MODEL

    size = DRAFT_MODEL.options["num_tokens"]
    return (
        chosen,
        dataclasses.replace(decoding, controller=DRAFT_MODEL.controller),
        {**named, "--num-draft-tokens": size},
    )


def _has_option(row: Method, setting: str) -> bool:
    """Return True if the text of a --set names this method or, without a method, one of its options."""
    name, _, option = setting.partition("=")[0].rpartition(".")
    return name == row.name if name else row.option(option) is not None


def _check_method(name: str, draft: str | None, datastore: Path | None, head: str | None) -> None:
    from specjax.catalog import find_drafter

    row = parsed("--method", find_drafter, name)
    needs, takes = row.needs, row.takes
    require(
        needs <= LOADABLE,
        f"--method: the command line cannot load what {name} needs; call "
        f"specjax.{'diffusion.' if 'denoiser' in needs else ''}drafters.{name} in Python",
    )
    require(draft is not None or "draft" not in needs, f"method {name} needs a draft model; give one with --draft")
    require(
        head is None or "draft" not in needs or "head" in takes,
        f"--draft {draft} is a head of {head}, and method {name} drafts with a whole model; use --method {head}, or "
        "leave --method out",
    )
    if "head" in needs:
        require(draft is not None, f"method {name} needs a learned head of the target; give one with --draft")
        found = f"a head of {head}" if head else "no learned head that specjax knows"
        fix = f"use --method {head}, or leave --method out" if head else "give a head, or use --method two_model"
        require(head == name, f"--draft {draft} is {found}, and method {name} drafts with one of {name}; {fix}")
    require(
        datastore is not None or "datastore" not in needs,
        f"method {name} needs a datastore; make one with `specjax datastore build`, give it with --datastore",
    )


def read_settings(settings: Sequence[str], method: str) -> dict[str, str]:
    """The values of --set for one method, as they are written.

    Raises: UsageError for a method or an option that there is not, or one given twice.
    """
    from specjax.catalog import find_drafter, of_kind

    rows, found = {method: of_kind("diffusion").get(method) or parsed("--method", find_drafter, method)}, {}
    for text in settings:
        _, option, value = read_setting(text, rows)
        require(option.name not in found, f"--set {text}: --set has set {option.name} already; leave one out")
        found[option.name] = value
    return found


def read_options(settings: Sequence[str] | None, rows: Mapping[str, Method]) -> dict[str, dict[str, Any]]:
    """The values of --set for methods of any kind, by their names.

    Raises: UsageError for a method or an option that there is not, a value that it does not take, or one given twice.
    """
    found: dict[str, dict[str, Any]] = {name: {} for name in rows}
    for text in settings or ():
        name, option, value = read_setting(text, rows)
        require(option.name not in found[name], f"--set {text}: --set has set {option.name} already; leave one out")
        found[name][option.name] = option.parse(value, f"--set {option.name}")
    return found


def read_setting(text: str, rows: Mapping[str, Method], flag: str = "--set") -> tuple[str, Option, str]:
    """The method, the option and the value of one --set, or of another flag like it.

    Raises: UsageError for a method or an option that there is not.
    """
    left, equals, value = text.partition("=")
    name, dot, word = left.rpartition(".")
    require(bool(equals and word), f'{flag} wants NAME=VALUE, such as group=3, not "{text}"')
    require(
        bool(dot) or len(rows) == 1,
        f"{flag} {text}: there are several methods; say which one, such as {flag} {next(iter(rows))}.{text}",
    )
    name = name or next(iter(rows))
    require(name in rows, f"{flag} {text}: {name} is not among the methods of this run, {', '.join(rows)}")
    option, known = rows[name].option(word), ", ".join(option.name for option in rows[name].options)
    if option is None:
        fix = f"its options are {known}" if known else "it has none; leave it out"
        raise UsageError(f'{flag} {text}: method {name} has no option "{word}"; {fix}')
    return name, option, value


def _read_source(path: Path, rows: Mapping[str, Method], batch_size: int) -> str:
    from specjax.catalog import METHODS

    editing = " and ".join(name for name, row in METHODS.items() if row.uses("source"))
    require(
        any(row.uses("source") for row in rows.values()),
        f"--source does not apply to method {' or '.join(rows)}, only to {editing}; leave it out",
    )
    require(batch_size == 1, f"--source is one text, for one prompt at a time; leave --batch-size {batch_size} out")
    text = read_text(path, "--source")
    require(bool(text.strip()), f"--source: {path} is empty; give the text to be edited")
    return text


def read_costs(costs: str | None, names: list[str], controller: str | None):
    """What --costs stands for: None, "measured" or the curve of a plan.

    Raises: UsageError if nothing reads it, or for what is no plan.
    """
    from specjax.catalog import METHODS
    from specjax.costs import planned

    if costs is None:
        return None
    weighing = [name for name, method in METHODS.items() if method.uses("costs")]
    require(
        controller == "goodput" or any(name in weighing for name in names),
        f"--costs does not apply to method {' or '.join(names)}, only to {' and '.join(weighing)} and to --controller "
        "goodput; leave it out",
    )
    if costs == "measured":
        return costs
    require(
        os.path.exists(costs),
        f'--costs must be measured or the JSON that `specjax plan --json` printed, not "{costs}"',
    )
    text = read_text(Path(costs), "--costs", MAX_BYTES)
    plan = parse_json(text.encode(), f"--costs: {costs}", "write it with `specjax plan --json`")
    return parsed(f"--costs: {costs}", planned, plan)
