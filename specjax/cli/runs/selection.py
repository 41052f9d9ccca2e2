"""The methods and models of a run: chosen from the flags, then loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jax.sharding import Mesh

from specjax.adaptive import DepthPolicy
from specjax.catalog import METHODS, Kind
from specjax.catalog.defaults import NATIVE, NATIVE_METHOD
from specjax.cli.options.drafter_flags import (
    DraftFiles,
    MethodOptions,
    find_head_kind,
    read_costs,
    read_depth,
    read_method_options,
    resolve_defaults,
    with_distributions,
)
from specjax.cli.options.groups import DraftOptions, ModelOptions, SamplingOptions
from specjax.cli.output.console import Console
from specjax.cli.runs.decoding import Decoding, build_decoding
from specjax.cli.runs.session import Session, open_session, with_adapted_target, with_default_draft
from specjax.costs import Curve
from specjax.errors import require


class Selection(NamedTuple):
    """The methods of a run, resolved and checked before anything is loaded."""

    methods: list[str]
    models: ModelOptions
    files: DraftFiles
    options: MethodOptions
    decoding: Decoding
    costs: Curve | str | None  # "measured": to be timed after loading
    depth: DepthPolicy | None
    token_map: Path | None
    is_default: bool  # True: no flag sets how to draft, so the draft head that comes with specjax may draft
    default_controller: bool  # True: the controller is not from a flag

    @property
    def method(self) -> str:
        return self.methods[0]

    def open(self, log: Console, mesh: Mesh | None = None, *, reads_sources: bool = False) -> tuple[Session, str]:
        """Load the models; return them and the method, which depends on the target if no flag sets it.

        reads_sources: as in `open_session`.
        """
        if self.decoding.remark:
            log.print(self.decoding.remark, soft_wrap=True)
        if self.default_controller:
            log.print("the draft length varies; --num-draft-tokens N always drafts N tokens", style="dim")
        session = open_session(
            log, self.models, self.files.datastore, mesh=mesh, has_head=self.files.head is not None,
            has_denoiser=any("denoiser" in METHODS[name].needs for name in self.methods),
            apart=any("devices" in METHODS[name].needs for name in self.methods), token_map=self.token_map,
            reads_sources=reads_sources,
        )  # fmt: skip
        session = with_adapted_target(session, self.depth, log)
        return with_default_draft(session, self.method, log) if self.is_default else (session, self.method)


class Extras(NamedTuple):
    """Flags that only `generate` has."""

    adapt: str | None = None
    token_map: Path | None = None
    heads: tuple[str, ...] = ()  # kinds of draft heads that vLLM's or SGLang's name of the method also means


NO_EXTRAS = Extras()


def select(
    methods: Sequence[str], models: ModelOptions, flags: DraftOptions, sampling: SamplingOptions,
    *, batch_size: int = 1, extras: Extras = NO_EXTRAS, kinds: Sequence[Kind] = ("drafter",),
) -> Selection:  # fmt: skip
    """Choose the methods of a run, their options and the settings.

    methods: the values of --method; the default replaces an empty list. kinds: the kinds of methods that the run has.

    Raises: UsageError for flags that are wrong or do not fit each other.
    """
    checked = build_decoding(sampling, flags, flags.controller)  # its errors come before those of files
    if models.draft is None and NATIVE_METHOD in methods:
        models = dataclasses.replace(models, draft=NATIVE)
    head = find_head_kind(models.draft)
    require(
        head is not None or extras.token_map is None,
        "--speculative-token-map needs a draft head, and --draft is not one; remove it",
    )
    models.check_head(head is not None)
    is_default = not methods and models.draft is None and flags.is_default and extras == NO_EXTRAS
    names = list(dict.fromkeys(methods))
    if not names and extras.adapt is not None and models.draft is None:
        names = ["autoregressive"]  # `auto` decides by the costs of passes over all layers
    if head in extras.heads:
        names = [head]
    files = DraftFiles(models.draft, head, flags.datastore)
    resolved = resolve_defaults(names[0] if names else None, files, flags)
    names = names or [resolved.method]
    options = read_method_options(names, files, flags, resolved.named, batch_size=batch_size, kinds=kinds)
    controller = resolved.controller
    options = with_distributions(options, names, controller)
    decoding = build_decoding(sampling, flags, controller) if controller != flags.controller else checked
    return Selection(
        names, models, files, options, decoding, read_costs(flags.costs, names, controller),
        read_depth(extras.adapt, sampling.max_new_tokens, head), extras.token_map, is_default,
        default_controller=controller != flags.controller,
    )  # fmt: skip
