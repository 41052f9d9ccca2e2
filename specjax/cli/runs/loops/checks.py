"""Checks of methods with loops of their own that need no model: flags, options, and the settings that they use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specjax.catalog import METHODS, REQUIRED, Method
from specjax.cli.options.drafter_flags import MethodOptions
from specjax.cli.options.groups import flag_of, refuse_flags
from specjax.cli.runs.decoding import name_flags
from specjax.engine.prepare import Settings
from specjax.errors import UsageError, require
from specjax.types import Draws

REASON = "does not apply to a method with a loop of its own"
"""The reason of errors about flags that only drafters have."""
LOOP_DRAWS: Draws = "point_mass"
"""The form of a loop's drafts. With the guarantee `distribution` a key gives the text of plain decoding."""
LOOP_WIDTH = 16
"""The width of the pass that measures rounding for a loop, whose passes have widths of their own."""
OWN_ERRORS = {"num_draft_tokens", "tree", "draft_stop", "stop", "exit_layer", "datastore", "costs", "source"}
"""Flags of drafters whose own checks refuse them, unless the method has the option."""
FREE = {"settings", "batch_file", "batch_size", "stop_string", "compare", "show", "as_json"}
"""Flags that every loop has."""


def only_loops(names: Sequence[str]) -> list[str]:
    """Return the methods with loops of their own."""
    return [name for name in names if METHODS[name].kind == "decoder"]


def refuse_other_flags(*groups: Any) -> None:
    """Raise a UsageError for a flag of some option groups that only drafters have."""
    unset = {"connect_timeout", "heartbeat", "checkpoint_every"}  # without effect on one host
    refuse_flags(groups, frozenset(OWN_ERRORS | FREE | unset), REASON)


def check_loop(name: str, options: MethodOptions, explicit: Mapping[str, Any]) -> Settings:
    """Check a method before its models are loaded, and return the settings that it uses.

    explicit: settings that flags set, such as temperature. The method's defaults replace the others.

    Raises: UsageError for too few devices, a missing option, or a value that the method refuses.
    """
    row, values = METHODS[name], options.values(name)
    if "devices" in row.needs:
        _check_devices(name)
    for option in row.options:
        is_missing = option.default is REQUIRED and option.name not in values
        require(
            not is_missing,
            f"method {name} needs {option.name}, the {option.help}; add --set {option.name}={option.form}",
        )
    used = loop_settings(row, explicit)
    values = {option.name: values.get(option.name, option.default) for option in row.options}
    values = {key: value for key, value in values.items() if not isinstance(value, bool)}
    try:
        return row.load_check()(**values | used)  # type: ignore[no-any-return]
    except UsageError as error:
        raise UsageError(name_flags(options.name_flags(name, str(error)))) from None


def loop_settings(row: Method, explicit: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of flags that are arguments of a loop.

    Raises: UsageError for another one. A temperature of 0 may be set for greedy loops.
    """
    is_greedy = "key" in row.settings and "temperature" not in row.settings
    flags = " and ".join(flag_of(name) for name in row.settings if name != "key")
    for name, value in explicit.items():
        fits = name in row.settings or (name == "temperature" and value == 0 and is_greedy)
        reason = f"which takes {flags}" if flags else "which is greedy"
        require(fits, f"{flag_of(name)} {value} does not apply to method {row.name}, {reason}; remove it")
    return {name: value for name, value in explicit.items() if name in row.settings}


def _check_devices(name: str) -> None:
    """Raise a UsageError unless each of two models can have a device of its own."""
    import jax

    count = len(jax.local_devices())
    require(
        count > 1,
        f"method {name} runs each model on its own device, and this machine has {count}; use --method two_model, or on "
        "a CPU set the environment variable JAX_NUM_CPU_DEVICES=2",
    )
