"""`specjax generate`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specjax.cli.options import common as o
from specjax.cli.options import completion, diffusion, hosts
from specjax.cli.options import processing as c
from specjax.cli.options import vllm_sglang_flags as s
from specjax.cli.options.drafter_flags import (
    read_costs,
    read_depth,
    read_drafting,
    recognised,
    resolve_defaults,
)
from specjax.cli.runs import collaboration

if TYPE_CHECKING:
    from specjax.cli.options.prompts import Asked, BadLine
    from specjax.cli.runs.denoising import Denoisings
    from specjax.cli.runs.generation import Generation

HELP = """Continue a prompt, or many, and say how fast.

On a colour terminal, text that was drafted and accepted is green; the
target's own tokens are plain.

Programs are compiled first, by a call of the same shapes (compile_seconds).
The clock of tokens/s covers reading the prompt and all steps, and compiles
nothing; tokens per target pass include the bonus token. Only a first run in
float32 begins without drafts, while wider passes are compiled: its speed is not
that of the next (with --compare all is compiled before).

What a prompt says is text: control tokens such as <|im_end|> that are
written out in it count as such with --raw only. Control characters of
texts are shown escaped (\\x1b), also where the output is no terminal; --json
has them as JSON does. An interrupted run prints what was done ("left":
prompts it did not reach).

With --compare, plain decoding (method autoregressive) runs the same way with
the same random keys. At temperature 0, and at any temperature for drafts made
without randomness, its text must be equal; where it is not, the position and
the gap of the two largest logits there are stated. Drafts that were sampled
keep the target's distribution, not its text for a given seed.

A method of kind collaboration (`specjax methods`) lets several models or
samples write one text: the target, and the model of --draft. Who wrote what
is shown in colours; --compare runs the target alone beside it.

A diffusion model is known by its checkpoint. --method is then one of the
diffusion methods of `specjax methods` (default: llada, one column a pass),
text is shown as it becomes final, and --show order draws the canvas filling
up, on a terminal. --compare runs one column a pass beside it.

With --distributed the same command runs on every host: the batch is split
over --data devices, the weights over --model. The texts are those of one
host. With --checkpoint a run that was ended continues, and prints its whole
text; of texts that several models or samples write, batches that are done
are kept.
"""


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - reads it from stdin.", show_default=False)] = None,
    target: o.TargetOption = None,
    draft: o.DraftOption = None,
    datastore: o.DatastoreOption = None,
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            help="See `specjax methods`; default: auto, with a head too (the demo model's comes with specjax); with a "
            "draft model two_model, as deep as pays (--controller goodput).",
            show_default=False,
            autocompletion=completion.words("drafters", "diffusion", "collaboration"),
        ),
    ] = None,
    num_draft_tokens: o.BudgetOption = None,
    tree: o.TreeOption = None,
    draft_stop: o.StopOption = None,
    stop: o.OldStopOption = None,
    exit_layer: o.ExitOption = None,
    settings: o.SetOption = None,
    source: o.SourceOption = None,
    controller: o.ControllerOption = None,
    costs: o.CostsOption = None,
    verifier: o.VerifierOption = None,
    sampling: o.SamplingOption = "speculative",
    max_new_tokens: o.LengthOption = 128,
    temperature: o.TemperatureOption = 0.0,
    top_k: o.TopKOption = None,
    top_p: o.TopPOption = None,
    min_p: c.MinPOption = None,
    repetition_penalty: c.RepetitionOption = None,
    presence_penalty: c.PresenceOption = None,
    frequency_penalty: c.FrequencyOption = None,
    logit_bias: c.BiasOption = None,
    ban: c.BanOption = None,
    regex: c.RegexOption = None,
    json_schema: c.SchemaOption = None,
    stop_string: o.StringOption = None,
    seed: o.SeedOption = 0,
    raw: o.RawOption = False,
    system: o.SystemOption = None,
    batch_file: Annotated[
        Path | None,
        typer.Option(
            "--batch-file",
            help='Prompts: one per line, or JSONL with "turns" (the first counts) or "prompt".',
            show_default=False,
        ),
    ] = None,
    batch_size: o.BatchOption = 1,
    dtype: o.DtypeOption = "auto",
    cache_dtype: o.CacheDtypeOption = None,
    max_positions: o.PositionsOption = None,
    same_bits: o.SameBitsOption = False,
    adapt: o.AdaptOption = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Run plain decoding too; compare texts and speed.")
    ] = False,
    show_what: Annotated[
        str,
        typer.Option(
            "--show",
            help="Of a diffusion model: text, or order, the canvas while it fills up.",
            autocompletion=completion.one_of("text", "order"),
        ),
    ] = "text",
    as_json: o.JsonOption = False,
    no_cache: o.NoCacheOption = False,
    distributed: hosts.DistributedOption = False,
    coordinator: hosts.CoordinatorOption = None,
    num_processes: hosts.NumProcessesOption = None,
    process_id: hosts.ProcessIdOption = None,
    connect_timeout: hosts.ConnectOption = 300,
    heartbeat: hosts.HeartbeatOption = 30,
    data: hosts.DataOption = None,
    model: hosts.ModelOption = None,
    checkpoint: hosts.CheckpointOption = None,
    checkpoint_every: hosts.EveryOption = 64,
    speculative_config: s.ConfigOption = None,
    speculative_algorithm: s.AlgorithmOption = None,
    speculative_draft_model_path: s.ModelOption = None,
    speculative_num_steps: s.StepsOption = None,
    speculative_eagle_topk: s.TopKOption = None,
    speculative_num_draft_tokens: s.TokensOption = None,
    speculative_token_map: s.MapOption = None,
) -> None:
    arguments = dict(locals())
    from specjax.cli.options import prompts as p
    from specjax.trees import inline

    decoding = o.Settings(max_new_tokens, temperature, top_k, top_p, seed, sampling, verifier, controller, min_p)
    schema = c.read_schema(json_schema)
    processing = c.Processing(
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        tuple(logit_bias or ()),
        tuple(ban or ()),
        regex,
        schema,
    )
    o.check_system(raw, system)
    o.require(all(stop_string or ()), "--stop-string is empty; give a text")
    o.require(batch_size >= 1, f"--batch-size must be at least 1, not {batch_size}")
    o.require(checkpoint_every >= 1, f"--checkpoint-every must be at least 1, not {checkpoint_every}")
    good = checkpoint is None or (bool(checkpoint.strip()) and p.is_whole(checkpoint))
    o.require(good, "--checkpoint is empty or no UTF-8 text; name a folder")
    o.require(show_what in ("text", "order"), f'--show must be text or order, not "{show_what}"')
    asked = p.Asked(prompt, batch_file, raw, system)
    models = o.Models(target, draft, dtype, no_cache, cache_dtype, max_positions, same_bits)
    if collaboration.is_collaboration(method):
        collaboration.check_flags(arguments)
        _collaborate(
            asked, models, str(method), settings, decoding, processing, batch_size, compare, as_json, checkpoint
        )
        return
    if diffusion.is_diffusion([method] if method else None, target):
        diffusion.check_flags(arguments)
        _denoise(asked, models, method, settings, decoding, batch_size, compare, show_what, as_json)
        return
    o.require(
        show_what == "text",
        "--show order draws the canvas of a diffusion model, and this target is autoregressive; leave it out",
    )
    method, draft, num_draft_tokens, tree, settings, also = s.read_speculative(
        method, draft, num_draft_tokens, tree, settings, config=speculative_config, algorithm=speculative_algorithm,
        model=speculative_draft_model_path, steps=speculative_num_steps, topk=speculative_eagle_topk,
        tokens=speculative_num_draft_tokens,
    )  # fmt: skip
    named = {
        "--num-draft-tokens": num_draft_tokens, "--tree": tree, "--draft-stop": draft_stop, "--exit-layer": exit_layer
    }  # fmt: skip
    flags = (
        method, draft, datastore, settings, source, controller, verifier, adapt, stop, speculative_token_map,
        *named.values(),
    )  # fmt: skip
    is_default = all(value is None or value == [] for value in flags)
    head = recognised(draft)
    o.require(
        head is not None or speculative_token_map is None,
        "--speculative-token-map is of a learned head, which --draft is not; leave it out",
    )
    if adapt is not None and draft is None:  # what a wide pass costs, by which `auto` goes, is known of whole models
        method = method or "autoregressive"
    method = head if head in also else method
    method, decoding, named = resolve_defaults(method, draft, head, decoding, named, settings)
    drafting = read_drafting(
        [method], draft, datastore, named=named, settings=settings, source=source, batch_size=batch_size, old_stop=stop,
        head=head,
    )  # fmt: skip
    weighed = read_costs(costs, [method], decoding.controller)
    o.require(
        not distributed or costs != "measured",
        "--costs measured differs from host to host, and all must run one program; with --distributed give a file",
    )
    depth = read_depth(adapt, max_new_tokens, head)
    # Of a file what it says counts, which may differ from host to host.
    hosts.join(arguments | {"tree": tree and inline(tree), "source": drafting.source, "json_schema": schema})

    from specjax.cli.output.console import Console
    from specjax.cli.runs.generation import Generation, show
    from specjax.cli.runs.session import adapted, kept_programs, open_session, stage, weigh, with_default_draft
    from specjax.parallel import check_same

    inputs, bad = asked.read()
    first = hosts.is_first()
    log = Console(stderr=True, quiet=not first)
    if decoding.remark:
        log.print(decoding.remark, markup=False, highlight=False, soft_wrap=True)
    if decoding.controller != controller:
        log.print("drafts as deep as pays; always N tokens: --num-draft-tokens N", style="dim")
    mesh = hosts.make_mesh(distributed, data, model)
    programs = kept_programs(arguments)
    models = dataclasses.replace(models, draft=draft)  # vLLM's and SGLang's flags may name it
    session = open_session(
        log, models, datastore, mesh=mesh, has_head=head is not None, token_map=speculative_token_map
    )  # fmt: skip
    session = adapted(session, depth, log)
    if is_default:
        session, method = with_default_draft(session, method, log)
    hosts.check_models(session.target, session.draft, session.head and session.head.head)
    rows, bad = asked.fitting(inputs, bad, session, max_new_tokens)
    session = weigh(session, weighed, min(batch_size, len(rows)), log)
    check_same([(row.ids, row.ordinal) for row in rows], "prompts")
    out = Console(quiet=as_json or not first)
    generation = Generation(
        session, decoding, method, drafting, rows, batch_size, compare, checkpoint, checkpoint_every,
        session.processors(processing), tuple(stop_string or ()), programs,
    )  # fmt: skip
    generation.compile(log)
    with _telling(generation, functools.partial(show, generation, out, adapt), bad, batch_file, as_json, first, adapt):
        generation.run(log, out)
    if programs is not None and programs.compiling is not None:
        with stage(log, "compiling wider passes for the next time", "compiled wider passes for the next time"):
            programs.finish()


generate.__doc__ = HELP


def _denoise(
    asked: Asked, models: o.Models, method: str | None, settings: list[str] | None, decoding: o.Settings,
    batch_size: int, compare: bool, show_what: str, as_json: bool,
) -> None:  # fmt: skip
    from specjax.catalog import METHODS
    from specjax.cli.options.drafter_flags import read_options
    from specjax.cli.output.console import Console
    from specjax.cli.runs.denoising import Denoisings, show
    from specjax.cli.runs.session import open_denoiser

    name = diffusion.check_method(method or "llada", models.target)
    options = read_options(settings, {name: METHODS[name]})[name]
    inputs, bad = asked.read()
    log, out = Console(stderr=True), Console(quiet=as_json)
    session, denoiser = open_denoiser(log, models)
    rows, bad = asked.fitting(inputs, bad, session, decoding.max_new_tokens)
    run = Denoisings(session, denoiser, decoding, name, options, rows, batch_size, compare, show_what)
    run.compile(log)
    with _telling(run, functools.partial(show, run, out), bad, asked.batch_file, as_json):
        run.run(log, out)


def _collaborate(
    asked: Asked, models: o.Models, method: str, settings: list[str] | None, decoding: o.Settings,
    processing: c.Processing, batch_size: int, compare: bool, as_json: bool, checkpoint: str | None,
) -> None:  # fmt: skip
    from specjax.catalog import METHODS
    from specjax.cli.options.drafter_flags import read_options
    from specjax.cli.output.console import Console
    from specjax.cli.runs.session import open_session

    options = read_options(settings, {method: METHODS[method]})[method]
    inputs, bad = asked.read()
    log, out = Console(stderr=True), Console(quiet=as_json)
    session = open_session(log, models)
    rows, bad = asked.fitting(inputs, bad, session, decoding.max_new_tokens)
    run = collaboration.Collaboration(
        session, decoding, method, options, rows, batch_size, compare, session.processors(processing), checkpoint
    )
    with _telling(run, functools.partial(collaboration.show, run, out), bad, asked.batch_file, as_json):
        run.run(log, out)


@contextlib.contextmanager
def _telling(
    run: Generation | Denoisings | collaboration.Collaboration, show: Callable[[], None], bad: list[BadLine],
    batch_file: Path | None, as_json: bool, first: bool = True, adapt: str | None = None,
) -> Iterator[None]:  # fmt: skip
    """Around a run: what was done is told, also of one that ends before its time. first: of several hosts.

    Raises: UsageError about the prompts that were bad.
    """
    from specjax.cli.options.prompts import describe
    from specjax.cli.output.console import print_json
    from specjax.errors import UsageError

    try:
        yield
    except BaseException as error:
        done = len(run.rows) - run.left
        if as_json and first and done:
            print_json(_document(run, bad, adapt))
            if isinstance(error, KeyboardInterrupt):
                said = f"stdout has the {done} of {len(run.rows)} prompts that were done"
                raise KeyboardInterrupt(said) from None
        raise
    if as_json and first:
        print_json(_document(run, bad, adapt))
    elif first:
        show()
    if bad:
        raise UsageError(describe(bad, batch_file))


def _document(
    generation: Generation | Denoisings | collaboration.Collaboration, bad: list, adapt: str | None = None
) -> dict[str, Any]:
    from specjax.cli.runs.session import provenance

    names = "max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed"
    settings = {name: getattr(generation.settings, name) for name in names}
    return {
        **generation.record(),
        **provenance(generation.session),
        "adapt": adapt,  # the guarantee is of the target as it is adapted: lossy beside the whole model
        "settings": settings | {"batch_size": generation.batch_size},
        "results": generation.results(),
        "differences": getattr(generation, "differences", []),
        "left": generation.left,
        "errors": [entry._asdict() for entry in bad],
    }
