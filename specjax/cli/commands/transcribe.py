"""`specjax transcribe`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from specjax.cli.options import common as o
from specjax.cli.options import completion
from specjax.cli.options.groups import DraftOptions, ModelOptions, SamplingOptions, with_groups
from specjax.errors import require

HELP = """Write the text of a WAV file with a Whisper model, and report the speed.

The audio is converted to one channel at 16 kHz. Audio of more than 30 seconds
is read by windows. Each window starts where the last finished segment ended,
so its segments have times. --timestamps prints them for short audio, too.

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
    compare: Annotated[
        bool, typer.Option("--compare", help="Also run plain decoding, and compare texts and speed.")
    ] = False
    as_json: o.JsonOption = False

    def __post_init__(self):
        require(
            self.task in (None, "transcribe", "translate"),
            f'--task must be transcribe or translate, not "{self.task}"',
        )


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
    session = with_costs(session, selection.costs, 1, log, selection.decoding.settings)
    recording = Recording(file, samples, options.language, options.task, options.timestamps)
    run = Transcription(session, settings, selection.decoding, method, selection.options, recording)
    run.execute(log, compare=options.compare, as_json=options.as_json)


transcribe.__doc__ = HELP
