"""`specjax serve`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import typer

from specjax.catalog.defaults import IMAGE_PATCHES
from specjax.cli.options import common as o
from specjax.cli.options import completion, hosts
from specjax.cli.options.groups import DraftOptions, ModelOptions, SamplingOptions, flag_values, with_groups
from specjax.errors import optional_import, require

HELP = """Serve a model over HTTP, with the endpoints of the OpenAI API.

Endpoints: /v1/chat/completions, /v1/completions, /v1/models, /tokenize,
/detokenize, /health, /load, /version and /metrics (Prometheus). The page at / is a
chat.

Requests share one running batch of --slots rows. Each one has its own
temperature, filters, penalties, stop strings, length, seed and JSON schema,
and its text is the one that `specjax generate` would give it alone. The flags of sampling
are the defaults of requests. Prompts that begin with the same tokens, such as
the turns of a chat, are read once.

With --data and --model, the rows of the batch and the weights are split over
devices, with --expert the experts of a mixture, and with --sequence the slots
of the cache. With --distributed, the same command runs on every host; host 0 has
the port, and all hosts run the same steps.

One line is printed when the server is ready. Ctrl-C or SIGTERM ends it after
the running requests; a second Ctrl-C ends it immediately. On several hosts, a
signal to any of them ends all, and so does a host that fails.
"""


@dataclass(frozen=True)
class ServeSampling(SamplingOptions):
    """Defaults of the requests."""

    max_new_tokens: o.LengthOption = 1024
    temperature: o.OptionalTemperatureOption = None  # the value of the model, or else 1


@dataclass(frozen=True)
class ServerOptions:
    """The address and the limits of the server."""

    host: Annotated[str, typer.Option("--host", help="Address to listen on. 0.0.0.0 is all networks.")] = "127.0.0.1"
    port: Annotated[int, typer.Option("--port", help="Port to listen on; 0 is any free one.")] = 8000
    slots: Annotated[int, typer.Option("--slots", help="Requests that are decoded at the same time.")] = 8
    longest_prompt: Annotated[
        int | None,
        typer.Option(
            "--longest-prompt",
            help="Maximum tokens of a prompt. Default: the model's limit, at most 4096.",
            show_default=False,
        ),
    ] = None
    image_tiles: Annotated[
        int,
        typer.Option(
            "--image-tiles",
            help="Tiles of images that a prompt may have (images, for models that read any size). 0: text only.",
        ),
    ] = 0
    image_patches: Annotated[
        int, typer.Option("--image-patches", help="Patches of an image, for models that read images of any size.")
    ] = IMAGE_PATCHES
    prefix_gib: Annotated[
        float, typer.Option("--prefix-gib", help="GiB of memory for beginnings of prompts that were read.")
    ] = 0.5
    constraint_mib: Annotated[
        float,
        typer.Option(
            "--constraint-mib", help="MiB of memory for the automata of JSON schemas and regular expressions; 0: none."
        ),
    ] = 64.0
    max_slowdown: Annotated[
        float,
        typer.Option(
            "--max-slowdown",
            help="Mean time between two tokens of a row while prompts are read, in times without; inf: no limit.",
        ),
    ] = 1.5
    max_waiting: Annotated[
        int, typer.Option("--max-waiting", help="Requests that may wait for a row; others get status 429.")
    ] = 256
    queue_seconds: Annotated[float, typer.Option("--queue-seconds", help="Longest time of a request in the queue.")] = (
        120.0
    )
    request_seconds: Annotated[
        float, typer.Option("--request-seconds", help="Longest time from the arrival of a request to its end.")
    ] = 600.0
    shutdown_seconds: Annotated[
        float, typer.Option("--shutdown-seconds", help="Longest time for running requests after a signal.")
    ] = 30.0
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key",
            help="Key that requests need (bearer token). Repeatable. Requests with different keys share no prefixes.",
            envvar="SPECJAX_API_KEY",
            show_default=False,
            show_envvar=True,
        ),
    ] = None
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            "--served-model-name",
            help="Name of the model in requests. Repeatable. Default: --target.",
            show_default=False,
        ),
    ] = None
    generation_config: Annotated[
        str,
        typer.Option(
            "--generation-config",
            help="Defaults of temperature, top-k, top-p and min-p: auto (those of the model's folder) or none.",
            autocompletion=completion.one_of("auto", "none"),
        ),
    ] = "auto"
    per_request_metrics: Annotated[
        str,
        typer.Option(
            "--per-request-metrics",
            help="Drafting and times in each answer: none, summary or detailed.",
            autocompletion=completion.one_of("none", "summary", "detailed"),
        ),
    ] = "none"

    def __post_init__(self):
        require(0 <= self.port < 1 << 16, f"--port must be from 0 to 65535, not {self.port}")
        for name in ("slots", "longest_prompt", "max_waiting"):
            o.check_minimum("--" + name.replace("_", "-"), getattr(self, name), 1)
        for name, minimum in (
            ("image_tiles", 0), ("image_patches", 1), ("prefix_gib", 0), ("constraint_mib", 0), ("max_slowdown", 1),
            ("queue_seconds", 0), ("request_seconds", 0),
            ("shutdown_seconds", 0),
        ):  # fmt: skip
            value, flag = getattr(self, name), "--" + name.replace("_", "-")
            is_valid = minimum <= value < float("inf") or (name == "max_slowdown" and value == float("inf"))
            require(is_valid, f"{flag} must be a number of at least {minimum}, not {value}")
        require(
            self.image_tiles > 0 or self.image_patches == IMAGE_PATCHES,
            f"--image-patches {self.image_patches} needs images; add --image-tiles, or leave it out",
        )
        require(all(self.api_key or ()), "--api-key is empty; give a key, or leave it out")
        require(all(self.served_model_name or ()), "--served-model-name is empty; give a name, or leave it out")
        require(
            self.generation_config in ("auto", "none"),
            f'--generation-config must be auto or none, not "{self.generation_config}"',
        )
        require(
            self.per_request_metrics in ("none", "summary", "detailed"),
            f'--per-request-metrics must be none, summary or detailed, not "{self.per_request_metrics}"',
        )


@with_groups
def serve(
    models: ModelOptions,
    draft: DraftOptions,
    sampling: ServeSampling,
    server: ServerOptions,
    devices: hosts.HostOptions,
    name: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="The model, as with --target.", show_default=False)
    ] = None,
    method: o.MethodOption = None,
) -> None:  # fmt: skip
    with optional_import("server", "specjax serve needs"):
        import pydantic  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    from specjax.cli.output.console import Console
    from specjax.cli.runs.environment import open_program_cache
    from specjax.cli.runs.generation_config import with_recommended
    from specjax.cli.runs.selection import select
    from specjax.cli.runs.serving import ServingOptions, build_service
    from specjax.cli.runs.session import with_costs
    from specjax.server.engine_thread import Policy
    from specjax.server.run import follow_server, listen, run_server

    if name is not None:
        require(models.target is None, f"the model is given twice, as {name} and as --target {models.target}")
        models = replace(models, target=name)
    recommended = None if server.generation_config == "none" else models.target
    sampling = with_recommended(sampling, recommended, default_temperature=1.0)
    selection = select([method] if method else [], models, draft, sampling, batch_size=server.slots)
    require(
        not devices.distributed or draft.costs != "measured",
        "--costs measured differs between hosts, and all must run one program; give a file of `specjax plan`",
    )
    require(
        server.slots % (devices.data or 1) == 0,
        f"--slots {server.slots} cannot be split over --data {devices.data}; give a multiple",
    )
    flags = flag_values(models, draft, sampling, server, devices) | {"method": method}
    hosts.join(flags)
    is_first = hosts.is_first()
    log = Console(stderr=True, quiet=not is_first)
    listener = listen(server.host, server.port) if is_first else None
    mesh = hosts.make_mesh(devices)
    programs = open_program_cache(flags)
    session, method = selection.open(log, mesh)
    hosts.check_models(session.target, session.draft, session.head and session.head.head)
    session = with_costs(session, selection.costs, server.slots, log, selection.decoding.settings)
    drafter = session.drafter(method, selection.options, serving=True)
    options = ServingOptions(
        server.slots, server.longest_prompt, server.prefix_gib, server.constraint_mib, server.max_slowdown,
        Policy(server.max_waiting, server.queue_seconds, server.request_seconds),
        tuple(server.served_model_name or ()), tuple(server.api_key or ()), server.per_request_metrics,
        (server.host, server.port if listener is None else listener.getsockname()[1]), models.target,
        server.image_tiles, server.image_patches,
    )  # fmt: skip
    decoding = selection.decoding
    if decoding.controller is None and session.has_budget(method, selection.options):
        decoding = replace(decoding, controller=f"budget:{drafter.max_depth}")
    service = build_service(session, decoding, drafter, method, options, programs, log)
    if listener is None:
        follow_server(service.engine.setup)
    else:
        run_server(service, listener, shutdown_seconds=server.shutdown_seconds)


serve.__doc__ = HELP
