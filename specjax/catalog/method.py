"""What a row of the catalogue says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from specjax.catalog.options import Option
from specjax.types import Guarantee

Kind = Literal["drafter", "decoder", "diffusion", "collaboration", "adaptive"]
"""`drafter`: drafts for the loop of `specjax.decode`. `decoder`: a loop of its own. `diffusion`: decides the columns of
a canvas, for `specjax.denoise`. `collaboration`: several models or samples write a text.
`adaptive`: chooses the layers of the target that a token runs, for `specjax.adaptive.thinned`."""

Need = Literal["draft", "head", "datastore", "costs", "source", "devices", "fill", "any_order", "continuous",
    "filter", "automaton", "denoiser", "segmenter", "judging", "cues", "tuned", "reward", "safe", "router", "answers",
    "probes", "routers", "corrections",
]  # fmt: skip
"""`draft`: a second, smaller model. `head`: a learned one of the target. `datastore`: a corpus. `costs`: what wide
passes cost, of `specjax.costs`. `source`: a text to be edited. `devices`: some of its own for each model. `fill`: a
model of masked blocks, as `drafters.nar_block` takes it. `any_order`, `continuous`: a target of
`decoders.AnySubsetModel`, `ContinuousModel`. `filter`, `automaton`: arrays that only Python can give, by that name.
`denoiser`: a diffusion model that drafts.
Of collaborations, in Python too: `segmenter`: where steps end. `judging`: the prompt of a judge, and its digits.
`cues`: words as tokens. `tuned`, `safe`, `router`: another model. `reward`, `answers`: a function.
`probes`, `routers`, `corrections`: what `specjax.adaptive` trains.
"""


class Method(NamedTuple):
    """One row of the table."""

    name: str
    kind: Kind
    # Of a drafter (target, draft, **options) -> Drafter, of diffusion (denoiser, **options) -> Procedure; of a decoder
    # or a collaboration the loop itself.
    make: Callable[..., Any]
    guarantee: Guarantee
    summary: str
    paper: str = ""
    needs: frozenset[Need] = frozenset()  # what it cannot do without, besides the target
    takes: frozenset[Need] = frozenset()  # and what else it can use
    options: tuple[Option, ...] = ()
    cpu_options: Mapping[str, int] = MappingProxyType({})  # budgets for machines where wide passes are dear
    wide_tree: str | None = None  # what the command line drafts where passes over dozens of tokens are cheap
    alone: bool = False  # of a head: it drafts by itself, where others join `auto` if nothing else is said
    draft_cost: float = 0.0  # of one drafting pass of the target itself, in its whole passes

    def option(self, name: str) -> Option | None:
        """The option of that name, if there is one."""
        return next((option for option in self.options if option.name == name), None)

    @property
    def size(self) -> str | None:
        """The option that says how many tokens are drafted per round, if one does."""
        return next((option.name for option in self.options if option.name in ("num_tokens", "num_nodes")), None)

    def uses(self, what: Need) -> bool:
        """Whether it needs or takes it."""
        return what in self.needs | self.takes
