"""Rows of the catalogue: the static facts about one method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from specjax.catalog.lazy import import_name
from specjax.catalog.options import Option

Guarantee = Literal["distribution", "greedy", "lossy", "definition", "identical", "valid"]
"""The relation of a method's text to the text of plain decoding.

`distribution`: the text has the exact distribution of the target at any temperature, so greedy text is equal too.
`greedy`: the text is equal at temperature 0 only. `lossy`: neither holds.

Three more are for diffusion models, whose text depends on the order in which tokens are decided.
`definition`: the published procedure of a model, which other methods approximate. `identical`: the text equals that of
the procedure which the method accelerates. `valid`: every text belongs to a given language.
"""

Kind = Literal["drafter", "decoder", "diffusion", "collaboration", "adaptive", "compression", "cache"]
"""The loop that runs a method.

`drafter`: drafts for `specjax.decode`. `decoder`: has a loop of its own. `diffusion`: decides the columns of a canvas,
for `specjax.denoise`. `collaboration`: several models or samples write one text. `adaptive`: selects the layers of the
target that each token runs, for `specjax.adaptive.skip_layers`. `compression`: selects the tokens of a prompt that the
target reads, or that its cache keeps. `cache`: stores the target's keys and values in another form.
"""

Need = Literal["draft", "head", "datastore", "costs", "source", "devices", "fill", "any_order", "continuous",
    "automaton", "denoiser", "segmenter", "judging", "cues", "tuned", "reward", "safe", "router", "answers",
]  # fmt: skip
"""An input of a method besides the target.

Models: `draft`: a second, smaller model. `head`: a draft head of the target. `denoiser`: a diffusion model that drafts.
`fill`: a model of masked blocks, see `drafters.nar_block`. `any_order`, `continuous`: a target of class
`decoders.AnySubsetModel` or `ContinuousModel`. `tuned`, `safe`: another model of a collaboration.
Data: `datastore`: a corpus. `costs`: the costs of wide target passes, see `specjax.costs`. `source`: a text to edit.
`devices`: separate devices for each model.
Python objects of collaborations: `segmenter`: finds the ends of steps. `judging`: the prompt of a judge and its digits.
`cues`: words as tokens. `reward`, `router`: functions of texts or models with a scalar head. `answers`: a function.
Arrays: `automaton`: an argument of a diffusion method.
"""

Argument = Literal["target", "draft", "vocab_size"]
"""A positional argument of a factory or of a decoder; `vocab_size` is that of the target."""

Setting = Literal["key", "temperature", "top_k", "top_p"]
"""An argument of `decode` that a decoder takes too."""


class TypicalAcceptance(NamedTuple):
    """Acceptance of a method's drafts, from one measurement. Other models and texts have others."""

    by_rank: tuple[float, ...]  # the probability that exactly the r-th child of an accepted node is accepted
    source: str  # the measurement


class Method(NamedTuple):
    """A row of the catalogue."""

    name: str
    kind: Kind
    guarantee: Guarantee
    summary: str
    paper: str = ""
    needs: frozenset[Need] = frozenset()  # required inputs, besides the target
    takes: frozenset[Need] = frozenset()  # optional inputs
    options: tuple[Option, ...] = ()
    words: tuple[Option, ...] = ()  # texts of --set that become arguments once the tokenizer is loaded
    cpu_options: Mapping[str, int] = MappingProxyType({})  # budgets for machines on which wide passes are slow
    wide_tree: str | None = None  # the command line's tree where passes over dozens of tokens are cheap
    serving_stop: str | None = None  # the server's stop condition for a head with a confidence, in chains
    alone: bool = False  # True: a head that drafts by itself by default; other heads join `auto`
    draft_cost: float = 0.0  # cost of one drafting pass of the target itself, as a fraction of a whole pass
    acceptance: TypicalAcceptance | None = None  # None: not measured, so a plan needs the user's
    factory: str = ""  # the function of `module` that builds the method; default: `name`
    arguments: tuple[Argument, ...] = ()  # models among the positional arguments of a factory or a loop
    settings: tuple[Setting, ...] = ()  # settings of a decoder; one without a temperature is greedy
    module: str = ""  # module of the factory; the catalogue fills it in

    def load(self) -> Callable[..., Any]:
        """Import the module of this method and return its factory."""
        return import_name(f"{self.module}:{self.factory or self.name}")

    @property
    def make(self) -> Callable[..., Any]:
        """Return the function that builds the method. Reading this property imports the module of the method.

        For drafters it is `(target, draft, **options) -> Drafter`, for diffusion `(denoiser, **options) -> Procedure`,
        for adaptive methods `(**options) -> DepthPolicy`, for compression `(draft, prompts, **options) -> prompts`, or
        `(target, draft, max_new_tokens, **options) -> Target`, for caches `(target, **options) -> target`. For decoders
        and collaborations it is the loop itself.
        """
        factory = self.load()
        if self.kind != "drafter":
            return factory

        def make(target: Any, draft: Any, **options: Any) -> Any:
            values = {"target": lambda: target, "draft": lambda: draft, "vocab_size": lambda: target.model.vocab_size}
            return factory(*(values[argument]() for argument in self.arguments), **options)

        return make

    def load_check(self) -> Callable[..., Any]:
        """Import a method's module, and return the check of its options before models load. Drafters have none.

        It takes settings of `decode` and the options of the row by name, without switches and drafters, which are
        never wrong. It returns the settings that the method uses.
        """
        return import_name(f"{self.module}:check_options")

    def option(self, name: str) -> Option | None:
        """Return the option with this name, or None."""
        return next((option for option in self.settable if option.name == name), None)

    @property
    def head_kind(self) -> str:
        """Return the kind of the draft head that a method with the need `head` uses."""
        return self.factory if self.kind == "decoder" else self.name

    @property
    def path(self) -> str:
        """Return the public path of the function in Python, such as `specjax.decoders.pearl`."""
        home = {
            "drafter": "drafters", "decoder": "decoders", "diffusion": "diffusion.methods",
            "collaboration": "collaborate.methods", "adaptive": "adaptive", "compression": "compression",
            "cache": "compression",
        }  # fmt: skip
        own_factory = self.kind in ("decoder", "collaboration") and self.factory
        return f"specjax.{home[self.kind]}.{own_factory or self.name}"

    @property
    def settable(self) -> tuple[Option, ...]:
        """Return all options of --set."""
        return self.options + self.words

    @property
    def size(self) -> str | None:
        """Return the name of the option that sets the number of drafted tokens per step, or None."""
        return next((option.name for option in self.options if option.name in ("num_tokens", "num_nodes")), None)

    def uses(self, need: Need) -> bool:
        """Return True if this input is required or optional."""
        return need in self.needs | self.takes
