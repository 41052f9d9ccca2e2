"""`specjax transcribe`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specjax.cli.options import common as o
from specjax.cli.options import completion
from specjax.cli.options.groups import DraftOptions, ModelOptions, SamplingOptions, with_groups
from specjax.errors import UsageError, require

if TYPE_CHECKING:
    from specjax.speech.fallback import WindowRules

HELP = """Write the text of a WAV file with a Whisper model, and report the speed.

The audio is converted to one channel at 16 kHz. Audio of more than 30 seconds
is read by windows. Each window starts where the last finished segment ended,
so its segments have times. --timestamps prints them for short audio, too.

With --fallback-temperatures, a window whose text fails a test is decoded again.
With --condition-on-prev-tokens, its prompt contains the end of the text so far.

A draft model, such as distil-whisper, reads the same audio. --compare also
runs plain decoding, as in `specjax generate`, and the texts must be equal.
"""


@dataclass(frozen=True)
class TranscriptSampling(SamplingOptions):
    """Length, distribution and seed of the text."""

    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", help="Maximum number of new tokens per window of 30 seconds.")
    ] = 448


@dataclass(frozen=True)
class SpeechOptions:
    """The language, the task and the output."""

    language: Annotated[
        str | None,
        typer.Option(
            "--language",
            help="Language of the speech, such as de or german. Default: that of the model's files, or detected.",
            show_default=False,
        ),
    ] = None
    task: Annotated[
        str | None,
        typer.Option(
            "--task",
            help="transcribe, or translate to English. Default: that of the model's files.",
            show_default=False,
            autocompletion=completion.one_of("transcribe", "translate"),
        ),
    ] = None
    timestamps: Annotated[bool, typer.Option("--timestamps", help="Print segments with their times.")] = False
    fallback_temperatures: Annotated[
        str,
        typer.Option(
            "--fallback-temperatures",
            help="Temperatures that follow --temperature while a text fails a test, such as 0.2,0.4,0.6,0.8,1.",
        ),
    ] = ""
    compression_ratio_threshold: Annotated[
        float | None,
        typer.Option(
            "--compression-ratio-threshold",
            help="A text that zlib shortens by more than this factor fails, such as 1.35. Default: that of the files.",
            show_default=False,
        ),
    ] = None
    logprob_threshold: Annotated[
        float | None,
        typer.Option(
            "--logprob-threshold",
            help="A text with a lower mean log-probability fails, such as -1. Default: that of the files.",
            show_default=False,
        ),
    ] = None
    no_speech_threshold: Annotated[
        float | None,
        typer.Option(
            "--no-speech-threshold",
            help="A window that fails --logprob-threshold is left out if silence is likelier than this, such as 0.6. "
            "Default: that of the files.",
            show_default=False,
        ),
    ] = None
    condition_on_prev_tokens: Annotated[
        bool | None,
        typer.Option(
            "--condition-on-prev-tokens/--no-condition-on-prev-tokens",
            help="Put the end of earlier text into the prompt of a window. Default: that of the files, or off.",
            show_default=False,
        ),
    ] = None
    compare: Annotated[
        bool, typer.Option("--compare", help="Also run plain decoding, and compare texts and speed.")
    ] = False
    as_json: o.JsonOption = False

    def __post_init__(self):
        require(
            self.task in (None, "transcribe", "translate"),
            f'--task must be transcribe or translate, not "{self.task}"',
        )

    def rules(self, stated: WindowRules, temperature: float) -> WindowRules:
        """Return the rules of windows. Raises: UsageError that names the flags of values that do not fit."""
        names = "compression_ratio_threshold", "logprob_threshold", "no_speech_threshold", "condition_on_prev_tokens"
        flag = "--fallback-temperatures"
        try:
            later = [float(part) for part in self.fallback_temperatures.split(",") if self.fallback_temperatures]
        except ValueError:
            raise UsageError(
                f'{flag} must be numbers such as 0.2,0.4,0.6, not "{self.fallback_temperatures}"'
            ) from None
        try:
            return stated.updated([temperature, *later], **{name: getattr(self, name) for name in names})
        except UsageError as error:
            text = str(error).replace("several temperatures need", f"{flag} needs")
            text = text.replace("temperature must be", f"--temperature and {flag} must be")
            for name in names:
                text = text.replace(name, "--" + name.replace("_", "-"))
            raise UsageError(text) from None


@with_groups
def transcribe(
    models: ModelOptions,
    draft: DraftOptions,
    sampling: TranscriptSampling,
    options: SpeechOptions,
    file: Annotated[Path, typer.Argument(help="The WAV file.", show_default=False)],
    method: o.MethodOption = None,
) -> None:
    require(models.target is not None, "--target is missing; give a hub id or folder of a Whisper model")
    from specjax import speech
    from specjax.cli.output.console import Console
    from specjax.cli.runs.selection import select
    from specjax.cli.runs.session import with_costs
    from specjax.cli.runs.speech.transcription import Recording, Transcription, check_draft

    assert models.target is not None
    require(models.template_args is None, "--template-args is for chats, and speech has none; remove it")
    selection = select([method] if method else [], models, draft, sampling)
    samples = speech.read_wav(file)
    log = Console(stderr=True)
    session, method = selection.open(log, reads_sources=True)
    require(
        speech.is_speech_model(session.target),
        f"--target: {session.target.model.name} does not read speech; give a Whisper model",
    )
    if session.draft is not None:
        check_draft(session.target, session.draft)
    settings = speech.read_settings(models.target, session.target, session.tokenizer)
    rules = options.rules(settings.rules, sampling.temperature or 0.0)
    session = with_costs(session, selection.costs, 1, log, selection.decoding.settings)
    recording = Recording(file, samples, options.language, options.task, options.timestamps, rules)
    run = Transcription(session, settings, selection.decoding, method, selection.options, recording)
    run.execute(log, compare=options.compare, as_json=options.as_json)


transcribe.__doc__ = HELP
