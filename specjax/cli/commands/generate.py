"""`specjax generate`."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from specjax.cli.options import common as o
from specjax.cli.options import completion, diffusion, hosts
from specjax.cli.options.groups import (
    DraftOptions,
    GenerateSampling,
    ModelOptions,
    PromptOptions,
    flag_values,
    refuse_flags,
    with_groups,
)
from specjax.cli.options.processing import ProcessingOptions
from specjax.cli.options.vllm_sglang_flags import SpeculativeOptions
from specjax.errors import require

HELP = """Generate text from one prompt or many, and report the speed.

On a colour terminal, drafted and accepted text is green. Tokens that the
target wrote are plain.

Programs are compiled first, by a call of the same shapes (compile_seconds).
The time for tokens/s includes prefill and all steps, and no compilation.
Tokens per target pass include the bonus token. The first run in float32
starts without drafts while wider passes compile, so it is slower than later
runs; --compare compiles everything first.

A control token such as <|im_end|> in a prompt is read as plain text; with
--raw it is read as the token. Control characters of texts are shown escaped
(\\x1b), also in pipes; --json escapes them as JSON does. An interrupted run
prints the finished prompts ("left" counts the others).

--compare also runs plain decoding (method autoregressive) with the same
random keys. At temperature 0, and at any temperature for drafts without
randomness, the texts must be equal. If they differ, the report has the
position and the gap of the two best tokens there. Sampled drafts keep the
target's distribution, not its text for a given seed.

With a method of kind collaboration (`specjax methods`), several models or
samples write one text: the target, and the model of --draft. Colours show the
author; --compare also runs the target alone. Without --temperature and --top-p
such a method uses its own; "settings" of --json has the values that were used.
A prompt that fails is listed in "errors", and the others keep their texts.

A method with its own decoding loop prints texts when they end. It takes no
checkpoints, processors, rules or meshes. PEARL needs two devices.

The checkpoint of a diffusion model is recognised. --method is then one of the
diffusion methods of `specjax methods` (default: llada, one column per pass).
Text is printed when it is final. --show order draws the canvas while it
fills, on a terminal. --compare also runs the procedure that the method speeds
up: one column per pass, unless the method guarantees the text of another one.

With --compress the target reads a part of each prompt (specpc), or keeps a
part of its keys and values (speckv), which is lossy. Times include it.
--compare then runs plain decoding on the same compressed prompts or caches.

With --distributed the same command runs on every host: --data devices share
the batch, --model devices share the weights, --expert devices the experts of
a mixture, --sequence devices the slots of the cache. The texts equal those of one host. With --checkpoint the same
command continues an interrupted run and prints its whole text. Collaborations
store finished batches.
"""


@dataclass(frozen=True)
class RunOptions:
    """Prompts of a file, batches and comparison."""

    batch_file: Annotated[
        Path | None,
        typer.Option(
            "--batch-file",
            help=(
                'File of prompts: one per line, or JSONL with "turns" (the first one is used) or "prompt". '
                'Lines of JSONL may have "images", a list of files.'
            ),
            show_default=False,
        ),
    ] = None
    batch_size: o.BatchOption = 1
    stop_string: o.StopStringOption = None
    adapt: o.AdaptOption = None
    compress: o.CompressOption = None
    image: Annotated[
        list[Path] | None,
        typer.Option(
            "--image",
            help="Image before each prompt, for a model that reads images. Repeat the flag for several images.",
            show_default=False,
        ),
    ] = None
    compare: Annotated[
        bool, typer.Option("--compare", help="Also run plain decoding, and compare texts and speed.")
    ] = False
    show: Annotated[
        str,
        typer.Option(
            "--show",
            help="For a diffusion model: text, or order to draw the canvas while it fills.",
            autocompletion=completion.one_of("text", "order"),
        ),
    ] = "text"
    as_json: o.JsonOption = False

    def __post_init__(self):
        require(all(self.stop_string or ()), "--stop-string is empty; give a text")
        o.check_minimum("--batch-size", self.batch_size, 1)
        require(self.show in ("text", "order"), f'--show must be text or order, not "{self.show}"')
        for file in self.image or ():
            require(os.path.exists(file), f"--image: there is no file {file}; check the path")


class GenerateFlags(NamedTuple):
    """The flags of `generate`."""

    prompt: str | None
    method: str | None
    models: ModelOptions
    draft: DraftOptions
    sampling: GenerateSampling
    processing: ProcessingOptions
    prompts: PromptOptions
    run: RunOptions
    hosts: hosts.HostOptions
    checkpoint: hosts.CheckpointOptions
    speculative: SpeculativeOptions

    def values(self) -> dict[str, Any]:
        """Return the value of every flag by name."""
        return {"prompt": self.prompt, "method": self.method, **flag_values(*self[2:])}


@with_groups
def generate(
    models: ModelOptions,
    draft: DraftOptions,
    sampling: GenerateSampling,
    processing: ProcessingOptions,
    prompts: PromptOptions,
    run: RunOptions,
    devices: hosts.HostOptions,
    checkpoints: hosts.CheckpointOptions,
    speculative: SpeculativeOptions,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - reads it from stdin.", show_default=False)] = None,
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            help="A method of `specjax methods`. Default: auto, also with a draft head (one comes with specjax for the "
            "default target); two_model with --controller goodput for a draft model.",
            show_default=False,
            autocompletion=completion.words("drafters", "decoders", "diffusion", "collaboration"),
        ),
    ] = None,
) -> None:
    from specjax.catalog import METHODS
    from specjax.cli.runs.decoding import build_decoding

    flags = GenerateFlags(
        prompt, method, models, draft, sampling, processing, prompts, run, devices, checkpoints, speculative
    )
    models.check_raw(prompts.raw)
    if method is not None and method in METHODS and METHODS[method].kind == "collaboration":
        _collaborate(flags, method)
        return
    if diffusion.is_diffusion([method] if method else [], models.target):
        _denoise(flags)
        return
    require(
        run.show == "text", "--show order draws the canvas of a diffusion model, and this target is not one; remove it"
    )
    if method is not None and method in METHODS and METHODS[method].kind == "decoder":
        _loop(flags, method)
        return
    build_decoding(sampling, draft, draft.controller)  # its errors come before those of files
    _draft(flags)


generate.__doc__ = HELP


def _draft(flags: GenerateFlags) -> None:
    """Generate with drafts, over all hosts and devices."""
    from specjax.cli.options.prompts import PromptSource, as_sources
    from specjax.cli.output.console import Console
    from specjax.cli.runs.compression.prompts import check_one_loss, compress_prompts, read_compression
    from specjax.cli.runs.environment import open_program_cache, stage
    from specjax.cli.runs.generation import Generation, GenerationOptions
    from specjax.cli.runs.run import Report, execute
    from specjax.cli.runs.session import note_training, with_costs
    from specjax.parallel import check_same
    from specjax.speech import is_speech_model

    flags, selection = _select(flags)
    run, values = flags.run, _shared_values(flags, selection.options.source)
    compression = read_compression(run.compress, run.adapt, flags.models.same_bits)
    check_one_loss(flags.models.cache_dtype, run.compress, run.adapt)
    require(not run.image or run.compress is None, "--compress would drop parts of images; remove it, or --image")
    require(
        not flags.hosts.distributed or flags.draft.costs != "measured",
        "--costs measured differs between hosts, and all must run one program; give a file of `specjax plan`",
    )
    hosts.join(values)
    source = PromptSource(flags.prompt, run.batch_file, flags.prompts.raw, flags.prompts.system, reads_images=True)
    lines = source.read()
    has_images = any(prompt.images for prompt in lines[0])
    require(not has_images or run.compress is None, '--compress would drop parts of images; remove it, or "images"')
    is_first = hosts.is_first()
    log = Console(stderr=True, quiet=not is_first)
    mesh = hosts.make_mesh(flags.hosts)
    programs = open_program_cache(flags.values())
    session, method = selection.open(log, mesh, reads_sources=True)
    note_training(flags.models.draft, "system", flags.prompts.system, log)
    hosts.check_models(session.target, session.draft, session.head and session.head.head)
    has_encoder = session.target.model.capabilities.requires_inputs
    if has_encoder:
        require(
            not is_speech_model(session.target),
            f"--target: the speech model {session.target.model.name} reads audio; use specjax transcribe FILE.wav",
        )
        for flag, value in (("--compress", run.compress), ("--system", flags.prompts.system)):
            require(value is None, f"{flag} does not apply to the source of an encoder-decoder; leave it out")
        source = source._replace(raw=True)  # such models have no chats
    pictures = _open_pictures(run.image, has_images, flags.models.target, session)
    rows, bad = source.encode(lines, session, flags.sampling.max_new_tokens, pictures)
    placeholder = session.target.model.capabilities.placeholder
    require(
        not any(placeholder in row.ids for row in rows if row.tiles is None),
        f"a prompt has the placeholder {placeholder} of an image; add --image FILE, or remove the placeholder",
    )
    if has_encoder:
        rows = as_sources(rows, session.target.model.config.text_start)
    compressed = None
    if compression is not None:
        rows, session, compressed = compress_prompts(rows, compression, session, flags.sampling.max_new_tokens, log)
    session = with_costs(session, selection.costs, min(run.batch_size, len(rows)), log, selection.decoding.settings)
    check_same([(row.ids, row.ordinal) for row in rows], "prompts")
    processors = session.processors(flags.processing)
    processors += session.ending(flags.sampling.max_new_tokens) if has_encoder else ()
    options = GenerationOptions(
        run.compare, flags.checkpoint.checkpoint, flags.checkpoint.checkpoint_every, tuple(run.stop_string or ()),
        run.adapt, processors, programs, compressed, session.lossy_cache,
    )  # fmt: skip
    generation = Generation(session, selection.decoding, method, selection.options, rows, run.batch_size, options)
    out = Console(quiet=run.as_json or not is_first)
    execute(generation, Report(log, out, run.as_json, is_first, bad, run.batch_file))
    if programs is not None and programs.compiling is not None:
        with stage(log, "compiling wider passes for the next run", "compiled wider passes for the next run"):
            programs.finish()


def _open_pictures(files: list[Path] | None, has_images: bool, source: str | None, session: Any) -> Any:
    """Return the pictures of --image with the image processor of the target; None if no prompt has images."""
    from specjax.cli.options.prompts import Pictures
    from specjax.errors import UsageError
    from specjax.models import load_image_processor
    from specjax.models.loading import resolve

    if not files and not has_images:
        return None
    try:
        return Pictures(files or (), load_image_processor(resolve(source), session.target, session.tokenizer))
    except UsageError as error:
        raise UsageError(f"{'--image' if files else '--batch-file'}: {error}") from None


def _loop(flags: GenerateFlags, method: str) -> None:
    """Generate with a method that has a loop of its own."""
    from specjax.catalog import METHODS
    from specjax.cli.options.prompts import PromptSource
    from specjax.cli.output.console import Console
    from specjax.cli.runs.generation import GenerationOptions
    from specjax.cli.runs.loops import checks, infilling
    from specjax.cli.runs.loops.run import LoopGeneration
    from specjax.cli.runs.run import Report, execute
    from specjax.cli.runs.selection import select
    from specjax.cli.runs.session import note_training

    run, sampling = flags.run, flags.sampling
    checks.refuse_other_flags(flags.draft, flags.processing, run, flags.hosts, flags.checkpoint, flags.speculative)
    selection = select(
        [method], flags.models, flags.draft, sampling, batch_size=run.batch_size, kinds=("drafter", "decoder")
    )
    settings = checks.check_loop(method, selection.options, sampling.explicit)
    decoding = dataclasses.replace(selection.decoding, settings=settings)
    is_filling = "any_order" in METHODS[method].needs
    if is_filling:
        infilling.check_flags(flags.models, flags.prompts.system, run.stop_string)
    source = PromptSource(flags.prompt, run.batch_file, flags.prompts.raw, flags.prompts.system)
    lines = source.read()
    log, out = Console(stderr=True), Console(quiet=run.as_json)
    report = Report(log, out, run.as_json, path=run.batch_file)
    if is_filling:
        session = infilling.open_any_order(log, flags.models)
        rows, bad = source._replace(raw=True).encode(lines, session, sampling.max_new_tokens)
        window = selection.options.values(method).get("window")
        filling = infilling.Infilling(session, decoding, window, rows, run.batch_size, run.compare)
        execute(filling, report._replace(bad=bad))
        return
    session, _ = selection.open(log)
    note_training(flags.models.draft, "system", flags.prompts.system, log)
    rows, bad = source.encode(lines, session, sampling.max_new_tokens)
    more = GenerationOptions(run.compare, stop=tuple(run.stop_string or ()))
    generation = LoopGeneration(
        session, decoding, method, selection.options, rows, run.batch_size, more, sampling.explicit
    )
    execute(generation, report._replace(bad=bad))


def _select(flags: GenerateFlags):
    """Return the flags after vLLM's and SGLang's are translated, and the methods that they select."""
    from specjax.cli.options.vllm_sglang_flags import DraftFlags, translate
    from specjax.cli.runs.selection import Extras, select

    draft = flags.draft
    plain = DraftFlags(flags.method, flags.models.draft, draft.num_draft_tokens, draft.tree, draft.settings)
    result = translate(plain, flags.speculative)
    models = dataclasses.replace(flags.models, draft=result.draft)
    draft = dataclasses.replace(
        draft, num_draft_tokens=result.num_draft_tokens, tree=result.tree, settings=result.settings
    )
    extras = Extras(flags.run.adapt, flags.speculative.speculative_token_map, result.kinds)
    methods = [] if result.method is None else [result.method]
    batch_size = flags.run.batch_size
    selection = select(methods, models, draft, flags.sampling, batch_size=batch_size, extras=extras)
    return flags._replace(method=result.method, models=models, draft=draft), selection


def _shared_values(flags: GenerateFlags, source: str | None) -> dict[str, Any]:
    """Return the flags that all hosts must share, with the contents of files, which may differ between hosts."""
    from specjax.trees import inline

    tree = flags.draft.tree
    contents = {"tree": tree and inline(tree), "source": source, "json_schema": flags.processing.schema}
    return flags.values() | contents


def _denoise(flags: GenerateFlags) -> None:
    """Generate with a diffusion model."""
    from specjax.catalog import METHODS
    from specjax.cli.options.drafter_flags import read_options
    from specjax.cli.options.prompts import PromptSource
    from specjax.cli.output.console import Console
    from specjax.cli.runs.decoding import build_decoding
    from specjax.cli.runs.denoising import Denoising
    from specjax.cli.runs.run import Report, execute
    from specjax.cli.runs.session import open_denoiser

    run, models = flags.run, flags.models
    allowed = frozenset(
        vars(models).keys() - {"draft", "same_bits", "head_set"}
        | vars(run).keys() - {"adapt", "compress", "stop_string", "image"}
        | {"settings", "connect_timeout", "heartbeat", "checkpoint_every"}
    )
    groups = (models, flags.draft, flags.processing, run, flags.hosts, flags.checkpoint, flags.speculative)
    refuse_flags(groups, allowed, diffusion.REASON)
    decoding = build_decoding(flags.sampling)
    name = diffusion.check_method(flags.method or "llada", models.target)
    options = read_options(flags.draft.settings, {name: METHODS[name]})[name]
    source = PromptSource(flags.prompt, run.batch_file, flags.prompts.raw, flags.prompts.system)
    lines = source.read()
    log, out = Console(stderr=True), Console(quiet=run.as_json)
    session, denoiser = open_denoiser(log, models)
    rows, bad = source.encode(lines, session, decoding.max_new_tokens)
    denoising = Denoising(
        session, denoiser, decoding, (name, options), rows, run.batch_size, compare=run.compare, show=run.show
    )
    execute(denoising, Report(log, out, run.as_json, bad=bad, path=run.batch_file))


def _collaborate(flags: GenerateFlags, method: str) -> None:
    """Generate texts that several models or samples write."""
    from specjax.catalog import METHODS
    from specjax.cli.options.drafter_flags import read_options
    from specjax.cli.options.prompts import PromptSource
    from specjax.cli.output.console import Console
    from specjax.cli.runs.batch_checkpoint import make_folder
    from specjax.cli.runs.collaboration import checks
    from specjax.cli.runs.collaboration.run import Collaboration
    from specjax.cli.runs.decoding import build_decoding
    from specjax.cli.runs.run import Report, execute
    from specjax.cli.runs.session import open_session

    run, models = flags.run, flags.models
    allowed = frozenset(
        vars(run).keys() - {"adapt", "compress", "stop_string", "show", "image"}
        | {"settings", "connect_timeout", "heartbeat", "checkpoint_every", "checkpoint"}
    )
    groups = (flags.draft, run, flags.hosts, flags.checkpoint, flags.speculative)
    refuse_flags(groups, allowed, checks.REASON)
    decoding = build_decoding(flags.sampling)
    options = read_options(flags.draft.settings, {method: METHODS[method]})[method]
    checks.check_inputs(method, models, options.get("drafter"))
    used = checks.check_options(method, options, flags.sampling, flags.processing)
    decoding = dataclasses.replace(decoding, settings=used)
    source = PromptSource(flags.prompt, run.batch_file, flags.prompts.raw, flags.prompts.system)
    lines = source.read()
    if flags.checkpoint.checkpoint is not None:
        make_folder(flags.checkpoint.checkpoint)
    log, out = Console(stderr=True), Console(quiet=run.as_json)
    session = open_session(log, models)
    rows, bad = source.encode(lines, session, decoding.max_new_tokens)
    writing = Collaboration(
        session, decoding, checks.CheckedMethod(method, options, flags.sampling.explicit), rows, run.batch_size,
        compare=run.compare, processors=session.processors(flags.processing), checkpoint=flags.checkpoint.checkpoint,
        raw=flags.prompts.raw,
    )  # fmt: skip
    execute(writing, Report(log, out, run.as_json, bad=bad, path=run.batch_file))
