"""Checks of a collaboration that need no model: its inputs, its options, and the settings that it uses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from specjax.catalog import METHODS, Method
from specjax.catalog.inputs import missing_inputs
from specjax.cli.options.common import parse_flag
from specjax.cli.options.drafter_flags import find_head_kind
from specjax.cli.options.groups import GenerateSampling, ModelOptions
from specjax.cli.options.processing import ProcessingOptions
from specjax.cli.runs.decoding import name_flags
from specjax.engine.prepare import Settings
from specjax.errors import UsageError, require
from specjax.files.homes import in_home
from specjax.models.loading.reward_models import check_reward_folder
from specjax.processors import presence

REASON = "does not apply to texts that several models or samples write"
"""The reason of errors about flags that only drafts need."""

WARPS = "temperature", "top_k", "top_p", "min_p"
"""The settings that shape a distribution."""
STAND_IN = presence(0.0)
"""A processor for checks that are made before the tokenizer of the real ones is loaded."""


class CheckedMethod(NamedTuple):
    """A method, and the options and settings that flags set."""

    name: str
    options: Mapping[str, Any]
    sampling: Mapping[str, Any]  # temperature, top_k, top_p and min_p, without those that keep the method's default


def check_inputs(method: str, models: ModelOptions, drafter: str | None = None) -> None:
    """Raise a UsageError for a method that the command line cannot run, or a wrong number of models.

    drafter: the value of --set drafter.
    """
    row, draft = METHODS[method], models.draft
    missing = missing_inputs(row)
    require(
        not missing,
        f"--method: the command line cannot provide the {' and '.join(missing)} of {method}; call "
        f"specjax.collaborate.methods.{method} in Python",
    )
    drafts = drafter is not None and drafter.partition(":")[0] == "two_model"
    needs_model = uses_second_model(row) or drafts
    kind = "safe" if "safe" in row.needs else "smaller"
    subject = f"--set drafter={drafter}" if drafts and not uses_second_model(row) else f"method {method}"
    require(draft is not None or not needs_model, f"{subject} needs a {kind} model; add --draft MODEL")
    require(
        draft is None or needs_model,
        f"method {method} uses one model only; remove --draft"
        + (", or add --set drafter=two_model" if row.option("drafter") else ""),
    )
    head = find_head_kind(draft)
    require(head is None, f"--draft {draft} is a draft head of kind {head}, and method {method} needs a {kind} model")


def uses_second_model(row: Method) -> bool:
    """Return True if a second model is one of the writers."""
    return bool(row.needs & {"draft", "safe"})


def check_options(
    name: str, options: Mapping[str, Any], sampling: GenerateSampling, processing: ProcessingOptions
) -> Settings:
    """Check the options of a method before its models are loaded, and return the settings that it uses.

    Flags that are set replace the method's own temperature and top-p.

    Raises: UsageError that names the flag of a value that the method refuses.
    """
    row = METHODS[name]
    of_models = [option for option in row.words if option.type in ("reward_model", "model")]
    checked = [option for option in row.options if option.type not in ("yes_or_no", "writing_drafter")]
    values = {option.name: options.get(option.name, option.default) for option in (*checked, *of_models)}
    if processing.flags:
        values["processors"] = (STAND_IN,)
    try:
        settings: Settings = row.load_check()(**values | sampling.explicit)
    except UsageError as error:
        raise UsageError(_name_flags(str(error), options, processing)) from None
    for option in of_models:
        if option.type == "reward_model":
            check_reward_options(option.name, options)
    return settings


def check_reward_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise a UsageError for options of a reward model that is missing, or a local folder without a head."""
    source, extras = options.get(name), [f"{name}_{key}" for key in ("head", "link", "suffix")]
    for extra in extras:
        require(source is not None or extra not in options, f"--set {extra} is about a {name}; add --set {name}=FOLDER")
    if source is not None and in_home(source).exists() and extras[0] not in options:
        parse_flag(f"--set {name}", check_reward_folder, source)


def _name_flags(message: str, options: Mapping[str, Any], processing: ProcessingOptions) -> str:
    """Return an error message of a method with flags in place of the names of its arguments."""
    message = re.sub(r"^(reward|router|tuned) is needed", r"--set \1=FOLDER is needed", message)
    for name in options:
        message = re.sub(rf"^{name}\b", f"--set {name}", message)
    return name_flags(message.replace("processors", " and ".join(processing.flags), 1))


def describe_sampling(settings: Settings) -> str:
    """Return the temperature and the cuts of a run in words."""
    if settings.is_greedy:
        return "greedy"
    values = {name.replace("_", "-"): getattr(settings, name) for name in WARPS}
    return ", ".join(f"{name} {value:g}" for name, value in values.items() if value is not None)
