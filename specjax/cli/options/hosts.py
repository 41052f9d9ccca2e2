"""Options of a command that may run on several hosts and devices, and survive a restart."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from specjax.cli.options.common import require
from specjax.errors import UsageError

DistributedOption = Annotated[
    bool,
    typer.Option("--distributed", help="One program on all hosts: start the same command on each; host 0 prints."),
]
CoordinatorOption = Annotated[
    str | None,
    typer.Option(
        "--coordinator", help="HOST:PORT of process 0, off Cloud TPU, GKE, Slurm and Open MPI.", show_default=False
    ),
]
NumProcessesOption = Annotated[
    int | None, typer.Option("--num-processes", help="With --coordinator: how many.", show_default=False)
]
ProcessIdOption = Annotated[
    int | None, typer.Option("--process-id", help="With --coordinator: which this is, from 0.", show_default=False)
]
ConnectOption = Annotated[float, typer.Option("--connect-timeout", help="Seconds to wait until all hosts are there.")]
HeartbeatOption = Annotated[
    float, typer.Option("--heartbeat", help="Seconds of silence after which a host is dead, and the others end.")
]
DataOption = Annotated[
    int | None,
    typer.Option("--data", help="Devices that the batch is split over; default: as many as hosts.", show_default=False),
]
ModelOption = Annotated[
    int | None,
    typer.Option(
        "--model", help="Devices that the weights are split over; default: all that are left.", show_default=False
    ),
]
CheckpointOption = Annotated[
    str | None,  # not a Path, which would spoil gs://
    typer.Option(
        "--checkpoint",
        help="A folder, seen by all hosts, for the state of the run: the same command continues from it.",
        show_default=False,
    ),
]
EveryOption = Annotated[int, typer.Option("--checkpoint-every", help="Steps between two writes.")]

LONGEST = 1_000_000
"""Seconds to wait for anything."""

OF_ONE_HOST = ("coordinator", "process_id", "batch_file", "connect_timeout", "no_cache")
"""Arguments that may differ between hosts (the prompts themselves are compared)."""


def join(arguments: dict[str, Any]) -> None:
    """Connect the hosts if asked to, and see that all were started alike.

    arguments: of the command, by name.

    Raises: UsageError.
    """
    names = ("coordinator", "num_processes", "process_id")
    if not arguments["distributed"]:
        for name in names:
            flag = "--" + name.replace("_", "-")
            require(arguments[name] is None, f"{flag} is given without --distributed; add it or leave {flag} out")
        return
    for name in ("connect_timeout", "heartbeat"):
        flag = "--" + name.replace("_", "-")
        good = 1 <= arguments[name] <= LONGEST
        require(good, f"{flag} must be at least 1 second and at most {LONGEST:,}, not {arguments[name]:g}")
    from specjax.parallel import hosts

    _keep_stdout()
    try:
        hosts.initialize(
            *(arguments[name] for name in names),
            timeout=arguments["connect_timeout"],
            heartbeat=arguments["heartbeat"],
        )
    except UsageError as error:
        sentence = str(error)
        for name in names:
            sentence = sentence.replace(name, "--" + name.replace("_", "-"))
        raise UsageError(sentence) from None
    hosts.check_same(hosts.versions(), "versions of specjax or jax")
    settings = {name: value for name, value in arguments.items() if name not in OF_ONE_HOST}
    hosts.check_same(settings, "options")


def _keep_stdout() -> None:
    """Only what this program prints goes to stdout; what libraries print there, such as gloo, to stderr."""
    sys.stdout.flush()
    ours = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(ours, "w", encoding=sys.stdout.encoding, errors="replace", buffering=1)


def is_first() -> bool:
    """Whether this host prints."""
    import jax

    return jax.process_index() == 0


def make_mesh(distributed: bool, data: int | None, model: int | None):
    """The mesh of the options; None: none was asked for.

    Raises: UsageError if there are not that many devices.
    """
    if not distributed and data is None and model is None:
        return None
    import jax

    from specjax.parallel import mesh

    try:
        return mesh(jax.process_count() if data is None else data, model)
    except UsageError as error:
        raise UsageError(f"--data, --model: {error}") from None


def check_models(*targets) -> None:
    """Raises: UsageError on every host if their models differ."""
    import jax

    from specjax.parallel import hosts
    from specjax.persistence import fingerprint

    if jax.process_count() > 1:
        hosts.check_same([fingerprint.of_model(target) for target in targets if target is not None], "models")
