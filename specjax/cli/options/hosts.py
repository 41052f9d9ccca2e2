"""Options of commands that run on several hosts and devices, and that continue after a restart."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from specjax.errors import UsageError, require

DistributedOption = Annotated[
    bool,
    typer.Option("--distributed", help="Run on all hosts: start the same command on each of them; host 0 prints."),
]
CoordinatorOption = Annotated[
    str | None,
    typer.Option(
        "--coordinator",
        help="HOST:PORT of process 0; not needed on Cloud TPU, GKE, Slurm and Open MPI.",
        show_default=False,
    ),
]
NumProcessesOption = Annotated[
    int | None,
    typer.Option("--num-processes", help="Number of processes, with --coordinator.", show_default=False),
]
ProcessIdOption = Annotated[
    int | None,
    typer.Option("--process-id", help="Number of this process from 0, with --coordinator.", show_default=False),
]
ConnectOption = Annotated[float, typer.Option("--connect-timeout", help="Seconds to wait for all hosts.")]
HeartbeatOption = Annotated[
    float,
    typer.Option("--heartbeat", help="Seconds without a signal after which a host counts as dead; the others end."),
]
DataOption = Annotated[
    int | None,
    typer.Option(
        "--data", help="Number of devices that share the batch. Default: the number of hosts.", show_default=False
    ),
]
ModelOption = Annotated[
    int | None,
    typer.Option(
        "--model", help="Number of devices that share the weights. Default: all remaining devices.", show_default=False
    ),
]
ExpertOption = Annotated[
    int,
    typer.Option(
        "--expert",
        help="Number of devices that share the experts of a mixture. Other weights are split over them as by --model.",
    ),
]
SequenceOption = Annotated[
    int,
    typer.Option(
        "--sequence", help="Number of devices that share the cache's slots, for long contexts; not their attention."
    ),
]
CheckpointOption = Annotated[
    str | None,  # a Path would change gs://
    typer.Option(
        "--checkpoint",
        help="Folder for the state of the run, visible to all hosts. The same command continues from it.",
        show_default=False,
    ),
]
EveryOption = Annotated[int, typer.Option("--checkpoint-every", help="Steps between two checkpoints.")]

LONGEST = 1_000_000
"""Maximum timeout in seconds."""

OF_ONE_HOST = ("coordinator", "process_id", "batch_file", "connect_timeout", "no_cache", "host", "port", "api_key")
"""Flags that may differ between hosts. The prompts themselves are compared."""


@dataclass(frozen=True)
class HostOptions:
    """Hosts and devices."""

    distributed: DistributedOption = False
    coordinator: CoordinatorOption = None
    num_processes: NumProcessesOption = None
    process_id: ProcessIdOption = None
    connect_timeout: ConnectOption = 300
    heartbeat: HeartbeatOption = 30
    data: DataOption = None
    model: ModelOption = None
    expert: ExpertOption = 1
    sequence: SequenceOption = 1


@dataclass(frozen=True)
class CheckpointOptions:
    """Checkpoints of the run."""

    checkpoint: CheckpointOption = None
    checkpoint_every: EveryOption = 64

    def __post_init__(self):
        from specjax.files.untrusted import is_text

        require(self.checkpoint_every >= 1, f"--checkpoint-every must be at least 1, not {self.checkpoint_every}")
        is_folder = self.checkpoint is None or (bool(self.checkpoint.strip()) and is_text(self.checkpoint))
        require(is_folder, "--checkpoint is empty or not UTF-8 text; name a folder")


def join(flags: Mapping[str, Any]) -> None:
    """Connect the hosts with --distributed, and check that all of them have the same flags.

    flags: the values of the command's flags by name.

    Raises: UsageError for flags that are missing, wrong or different between hosts, and for hosts that do not connect.
    """
    names = ("coordinator", "num_processes", "process_id")
    if not flags["distributed"]:
        for name in names:
            flag = "--" + name.replace("_", "-")
            require(flags[name] is None, f"{flag} needs --distributed; add it, or remove {flag}")
        return
    for name in ("connect_timeout", "heartbeat"):
        flag = "--" + name.replace("_", "-")
        is_valid = 1 <= flags[name] <= LONGEST
        require(is_valid, f"{flag} must be from 1 to {LONGEST:,} seconds, not {flags[name]:g}")
    from specjax.parallel import hosts

    _reserve_stdout()
    try:
        hosts.initialize(
            *(flags[name] for name in names), timeout=flags["connect_timeout"], heartbeat=flags["heartbeat"]
        )
    except UsageError as error:
        message = str(error)
        for name in names:
            message = message.replace(name, "--" + name.replace("_", "-"))
        raise UsageError(message) from None
    hosts.check_same(hosts.versions(), "versions of specjax or jax")
    hosts.check_same({name: value for name, value in flags.items() if name not in OF_ONE_HOST}, "options")


def _reserve_stdout() -> None:
    """Send output of libraries such as gloo to stderr, and keep stdout for this program."""
    sys.stdout.flush()
    descriptor = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(descriptor, "w", encoding=sys.stdout.encoding, errors="replace", buffering=1)


def is_first() -> bool:
    """Return True on the host that prints."""
    import jax

    return jax.process_index() == 0


def make_mesh(options: HostOptions):
    """Build the mesh of the flags; return None without these flags. Raises: UsageError for too few devices."""
    data, model, expert, sequence = options.data, options.model, options.expert, options.sequence
    if not options.distributed and data is None and model is None and expert == sequence == 1:
        return None
    import jax

    from specjax.parallel import mesh

    try:
        return mesh(jax.process_count() if data is None else data, model, sequence=sequence, expert=expert)
    except UsageError as error:
        raise UsageError(f"--data, --model, --expert, --sequence: {error}") from None


def check_models(*targets) -> None:
    """Raise a UsageError on every host if their models differ."""
    import jax

    from specjax.parallel import hosts
    from specjax.persistence import fingerprint

    if jax.process_count() > 1:
        hosts.check_same([fingerprint.digest_model(target) for target in targets if target is not None], "models")
