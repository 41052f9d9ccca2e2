"""Heads: drafters that were trained on the target's own states, one row a kind of checkpoint."""

from __future__ import annotations

from collections.abc import Callable

from specjax import drafters
from specjax.catalog.drafters import KEEP_LOGITS, STOP, TREE, num_tokens
from specjax.catalog.method import Method
from specjax.catalog.options import Option
from specjax.models.heads.contract import DraftHead
from specjax.types import Drafter, Target


def _of_head(factory: Callable[..., Drafter]) -> Callable[..., Drafter]:
    def make(target: Target, draft: DraftHead, **options) -> Drafter:
        return factory(draft, **options)

    return make


EACH = TREE, STOP, KEEP_LOGITS
"""Options of all of them."""


def _row(name: str, factory: Callable[..., Drafter], summary: str, paper: str, *options: Option) -> Method:
    return Method(
        name, "drafter", _of_head(factory), "distribution", summary, paper, frozenset({"head"}), options=options
    )


HEADS: dict[str, Method] = {
    method.name: method
    for method in (
        _row(
            "chimera",
            drafters.chimera,
            "a layer over the target's features, trigrams in place of those not there yet",
            "Zeng et al. 2024, arXiv 2402.15758",
            Option("num_tokens", int, None, "drafted tokens per round; default: as many as there are heads"),
            *EACH,
        ),
        _row(
            "clover",
            drafters.clover,
            "layers that have read the root, and a gated recurrence over the drafted tokens",
            "Xiao et al. 2024, arXiv 2405.00263 and 2408.00264",
            num_tokens(5),
            *EACH,
        ),
        _row(
            "eagle",
            drafters.eagle,
            "one decoder layer continues the target's last feature",
            "Li et al. 2024, arXiv 2401.15077 and 2406.16858; FSPAD: Gui et al. 2024, arXiv 2408.15562",
            num_tokens(5),
            *EACH,
        ),
        _row(
            "eagle3",
            drafters.eagle3,
            "a decoder layer with a head of its own continues three of the target's streams",
            "Li et al. 2025, arXiv 2503.01840",
            num_tokens(5),
            *EACH,
        ),
        _row(
            "hydra",
            drafters.hydra,
            "Medusa's heads that also read the tokens drafted so far",
            "Ankner et al. 2024, arXiv 2402.05109",
            Option("num_tokens", int, None, "drafted tokens per round; default: as many as there are heads"),
            *EACH,
        ),
        _row(
            "kangaroo",
            drafters.kangaroo,
            "the target's first layers and an adapter draft until a token is not sure",
            "Liu et al. 2024, arXiv 2404.18911",
            num_tokens(6),
            *EACH,
        ),
        _row(
            "medusa",
            drafters.medusa,
            "heads on the target's last feature say several tokens ahead at once",
            "Cai et al. 2024, arXiv 2401.10774",
            Option("num_tokens", int, None, "drafted tokens per round; default: as many as there are heads"),
            *EACH,
        ),
        _row(
            "mlp_speculator",
            drafters.mlp_speculator,
            "an MLP per depth takes the sampled tokens into the target's last feature",
            "Wertheimer et al. 2024, arXiv 2404.19124",
            Option("num_tokens", int, None, "drafted tokens per round; default: as many as there are heads"),
            *EACH,
        ),
        _row(
            "redrafter",
            drafters.redrafter,
            "a recurrent network over the drafted tokens beside the target's last feature",
            "Cheng et al. 2024, arXiv 2403.09919",
            num_tokens(5),
            *EACH,
        ),
    )
}
