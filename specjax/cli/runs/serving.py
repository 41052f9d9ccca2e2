"""The run of `specjax serve`: the service of a session."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax

from specjax.api import serve
from specjax.catalog.defaults import IMAGE_PATCHES
from specjax.cli.options.common import parse_flag
from specjax.cli.output.console import Console
from specjax.cli.runs.decoding import Decoding
from specjax.cli.runs.session import DEMO_NAME, Session
from specjax.errors import require
from specjax.models import load_image_processor
from specjax.models.loading import resolve
from specjax.persistence.fingerprint import digest, digest_model
from specjax.persistence.program_cache import ProgramCache
from specjax.server.app import MAX_BODY, Service
from specjax.server.engine_thread import Engine, Policy
from specjax.server.images import ImageReader
from specjax.server.metrics import Metrics
from specjax.server.sampling import serve_options
from specjax.types import Drafter
from specjax.version import __version__

MAX_IMAGE_BODY = 64 << 20
"""Largest body of a request with images, in bytes."""
DEFAULT_LONGEST = 4096
"""Default of the largest number of tokens of a prompt."""


class ServingOptions(NamedTuple):
    """The limits and the address of a server."""

    slots: int
    longest_prompt: int | None
    prefix_gib: float
    constraint_mib: float
    max_slowdown: float
    policy: Policy
    names: tuple[str, ...]  # of the model in requests
    api_keys: tuple[str, ...]
    step_metrics: str
    address: tuple[str, int]  # host and port, for the line that is printed when the server is ready
    source: str | None = None  # of the target, whose folder has the image processor
    image_tiles: int = 0  # tiles of images per prompt; 0: the server reads text only
    image_patches: int = IMAGE_PATCHES  # patches of each image, for models that read images of any size


def build_service(
    session: Session, decoding: Decoding, drafter: Drafter, method: str, options: ServingOptions,
    programs: ProgramCache | None, log: Console,
) -> Service:  # fmt: skip
    """Build the service of a session. Raises: UsageError for lengths that exceed the model's."""
    length = decoding.max_new_tokens
    room = session.capacity - length
    require(room >= 1, f"--max-new-tokens {length} leaves no room in the {session.capacity} tokens of the model")
    longest = options.longest_prompt
    require(
        longest is None or longest <= room,
        f"--longest-prompt must be at most {room} for this model with --max-new-tokens {length}, not {longest}",
    )
    reader = _open_images(session, options)
    shared = serve_options(session.target.model.vocab_size, tuple(session.tokenizer.eos))
    settings = dataclasses.replace(
        session.settings(decoding, method, shared.pop("processors")), min_p=decoding.settings.min_p or 0.0
    )
    setup = serve(
        session.target, drafter, slots=options.slots, longest_prompt=longest or min(room, DEFAULT_LONGEST),
        max_new_tokens=length, tokenizer=session.tokenizer, programs=programs, prefix_gib=options.prefix_gib,
        max_slowdown=options.max_slowdown, constraint_mib=options.constraint_mib,
        inputs=None if reader is None else reader.blank, **shared, **vars(settings),
    ).setup  # fmt: skip
    names = options.names or (session.target.model.name or DEMO_NAME,)
    host, port = options.address
    ready = f"serving {names[0]} at http://{f'[{host}]' if ':' in host else host}:{port}/v1"
    engine = Engine(
        setup, options.policy, Metrics(names[0], setup.max_depth), on_ready=lambda: log.print(ready, soft_wrap=True)
    )
    fingerprint = digest((digest_model(session.target), method, __version__, jax.__version__))
    return Service(
        engine, session.tokenizer, names, f"fp_{fingerprint[:12]}", options.api_keys,
        step_metrics=options.step_metrics, images=reader, max_body=MAX_BODY if reader is None else MAX_IMAGE_BODY,
    )  # fmt: skip


def _open_images(session: Session, options: ServingOptions) -> ImageReader | None:
    """Return the reader of images, or None for a server of text. Raises: UsageError that names the flag."""
    if not options.image_tiles:
        return None
    load = lambda source: load_image_processor(resolve(source), session.target, session.tokenizer)
    processor = parse_flag("--image-tiles", load, options.source)
    if processor.config.tower.merge:
        return ImageReader(session.target, processor, options.image_tiles, options.image_patches)
    require(
        options.image_patches == IMAGE_PATCHES,
        f"--image-patches {options.image_patches}: {processor.config.name} reads tiles of one size; leave it out",
    )
    return ImageReader(session.target, processor, options.image_tiles)
