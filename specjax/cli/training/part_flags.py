"""Checks and parsing of the flags of `specjax train` for trained parts of methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from specjax.catalog import REQUIRED
from specjax.catalog.options import Option
from specjax.cli.options import common as o
from specjax.cli.options.groups import ModelOptions, flag_of, refuse_flags
from specjax.cli.runs.collaboration.checks import check_reward_options
from specjax.cli.training.files import SourceFile, check_folder, check_sources, read_files
from specjax.cli.training.part_run import PartFlags
from specjax.errors import require
from specjax.training.data.judged_files import check_judged, read_judged
from specjax.training.parts import PARTS

PART_FLAGS = frozenset((
    "method", "draft", "prompts", "texts", "system", "template_args", "length", "seed", "settings",
))  # fmt: skip
"""Flags that the training of every part of a method reads or refuses itself. `PartKind.flags` has the others."""


class PartRun(NamedTuple):
    """The parsed flags of a run, and the models that it loads."""

    flags: PartFlags
    models: ModelOptions


def is_part(method: str | None) -> bool:
    """Return True if a method has trained parts that are no draft head."""
    return method in PARTS


def read_part(flags: SimpleNamespace, groups: tuple[Any, ...]) -> PartRun:
    """Return the parsed flags of a part. Raises: UsageError for flags that are missing, wrong or do not fit."""
    method = flags.method
    _refuse_unread(flags, groups)
    options = parse_options(method, flags.settings)
    _check_models(flags, method, options)
    texts = _read_texts(flags, method)
    for flag, folder in (("--out", flags.out), ("--answers", flags.answers)):
        check_folder(folder, flag)
    _check_numbers(flags)
    models = ModelOptions(
        flags.target, flags.draft, flags.dtype, flags.no_cache, max_positions=flags.max_positions,
        template_args=flags.template_args, quantize=flags.quantize, keep_quantized=flags.keep_quantized,
    )  # fmt: skip
    return PartRun(PartFlags(method, options, *texts, flags), models)


def _refuse_unread(flags: SimpleNamespace, groups: tuple[Any, ...]) -> None:
    """Raise a UsageError for flags that the training of the part does not read."""
    part, reason = PARTS[flags.method], f"does not fit --method {flags.method}"
    refuse_flags(groups, PART_FLAGS | part.flags, reason)
    if flags.texts and part.data == "responses":
        read = (PART_FLAGS | part.settings) - {"prompts"}
        refuse_flags(groups, read, "does not fit --texts, which has the texts to train on")
    for name in ("target_name", "report"):
        require(getattr(flags, name) is None, f"{flag_of(name)} {reason}; remove it")


def _check_models(flags: SimpleNamespace, method: str, options: Mapping[str, Any]) -> None:
    """Raise a UsageError for models that are missing, not used, or overwritten by the result."""
    part = PARTS[method]
    require(part.takes_draft or flags.draft is None, f"--draft does not fit --method {method}; leave it out")
    require(
        flags.draft is not None or not part.takes_draft or method == "s2d",
        f"--method {method} needs a draft model; add --draft MODEL",
    )
    require(flags.out is not None, "--out FOLDER is missing; name the folder of the result")
    models = {f"--set {name}": options.get(name) for name in ("reward", "router")}
    check_sources(flags.out, {"--target": flags.target, "--draft": flags.draft} | models, ("base", "head"))
    require(not part.denoises or not flags.own_prompts, "--own-prompts needs an autoregressive target; give --prompts")
    if method == "arbitrage":
        words = "--method arbitrage needs a process reward model; add --set reward=FOLDER"
        require(options["reward"] is not None, words)
        check_reward_options("reward", {name: value for name, value in options.items() if value is not None})


def _read_texts(flags: SimpleNamespace, method: str) -> tuple[list[SourceFile], list[SourceFile], list[dict[str, Any]]]:
    """Return the files of prompts and of texts, and judged responses. Raises: UsageError."""
    data = PARTS[method].data
    if data == "judged":
        require(bool(flags.texts) and not flags.prompts, "--method judge reads judged responses; give --texts FILE")
        judged = [entry for path in flags.texts for entry in o.parse_flag("--texts", read_judged, path)]
        check_judged(judged)
        return [], [], judged
    has_texts = bool(flags.texts) and data == "responses"
    require(
        bool(flags.prompts) or flags.own_prompts > 0 or has_texts,
        "give --prompts FILE, or --own-prompts N to have the target write them",
    )
    require(data == "responses" or not flags.texts, f"--method {method} reads prompts; give --prompts FILE")
    return read_files(flags.prompts or [], "--prompts"), read_files(flags.texts or [], "--texts"), []


def _check_numbers(flags: SimpleNamespace) -> None:
    """Raise a UsageError for numbers out of range."""
    o.check_seed(flags.seed)
    for name, minimum in (("rows", 1), ("length", 8), ("epochs", 1), ("max_new_tokens", 2), ("batch_size", 1)):
        o.check_minimum(f"--{name.replace('_', '-')}", getattr(flags, name), minimum)
    rate = flags.learning_rate
    require(rate is None or 0 < rate < float("inf"), f"--learning-rate must be a number above 0, not {rate}")


def parse_options(kind: str, settings: Sequence[str] | None) -> dict[str, Any]:
    """Return all options of a part, from the flags --set. Raises: UsageError for an unknown or missing option."""
    rows = {option.name: option for option in PARTS[kind].options}
    values: dict[str, Any] = {}
    for text in settings or ():
        name, equals, value = text.partition("=")
        require(bool(equals), f'--set must be NAME=VALUE, such as steps=300, not "{text}"')
        require(
            name in rows, f'--set {text}: training of {kind} has no option "{name}"; its options are {", ".join(rows)}'
        )
        require(name not in values, f"--set {text}: --set sets {name} already; remove one of them")
        values[name] = rows[name].parse(value, f"--set {name}")
    return {name: _value(option, values) for name, option in rows.items()}


def _value(option: Option, values: Mapping[str, Any]) -> Any:
    value = values.get(option.name, option.default)
    require(value is not REQUIRED, f"add --set {option.name}={option.form}: {option.help}")
    return value
