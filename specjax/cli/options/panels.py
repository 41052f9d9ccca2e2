"""The groups of flags in `--help`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

PANELS: Mapping[str, str] = MappingProxyType(
    {
        "Text": "--max-new-tokens --stop-string --batch-file --compress --raw --system --template-args --own-prompts "
        "--texts --prompts --limit --offset --answers --language --task --timestamps "
        "--condition-on-prev-tokens",
        "Models": "--target --draft --datastore --dtype --cache-dtype --max-positions --block --mask-token "
        "--same-bits --quantize --keep-quantized --draft-quantize --adapt",
        "Drafting": "--method --num-draft-tokens --tree --draft-stop --exit-layer --set --head-set --source "
        "--controller --costs --recipe --on-policy --layers",
        "Sampling": "--temperature --top-k --top-p --min-p --seed --sampling --verifier "
        "--fallback-temperatures --compression-ratio-threshold --logprob-threshold --no-speech-threshold",
        "Penalties and constraints": "--repetition-penalty --presence-penalty --frequency-penalty --logit-bias --ban "
        "--bad-word --regex --json-schema",
        "Training": "--epochs --learning-rate --optimizer --loss --depths --rows --length --chunk --keep-states "
        "--states --every --patience --budgets --held-out --start --shape --draft-vocab",
        "Server": "--host --port --slots --longest-prompt --prefix-gib --max-slowdown --max-waiting --queue-seconds "
        "--request-seconds --shutdown-seconds --api-key --served-model-name --per-request-metrics",
        "Devices and hosts": "--distributed --coordinator --num-processes --process-id --connect-timeout --heartbeat "
        "--data --model --expert --sequence --checkpoint --checkpoint-every",
    }
)
"""The flags of each group, in the order of the groups in help. Other flags come first."""

_PANEL = {flag: panel for panel, flags in PANELS.items() for flag in flags.split()}
FEW = 12
"""Maximum number of flags of a command without groups."""


def assign_panels(command: Any) -> None:
    """Put the flags of a click command, and of its subcommands, into their groups."""
    for sub in getattr(command, "commands", {}).values():
        assign_panels(sub)
    options = [param for param in command.params if param.param_type_name == "option" and not param.hidden]
    for param in options:
        panel = _PANEL.get(param.opts[0])
        if panel is not None and len(options) > FEW and param.rich_help_panel is None:
            param.rich_help_panel = panel
        if param.is_flag and param.metavar is None:
            param.metavar = ""  # else <bool>
