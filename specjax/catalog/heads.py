"""Heads: drafters that were trained on the target's own states, one row a kind of checkpoint."""

from __future__ import annotations

from collections.abc import Callable

from specjax import drafters
from specjax.catalog.drafters import KEEP_LOGITS, STOP, TREE, num_tokens
from specjax.catalog.method import Method
from specjax.catalog.options import Option, chances
from specjax.models.heads.contract import DraftHead
from specjax.types import Drafter, Target


def _of_head(factory: Callable[..., Drafter]) -> Callable[..., Drafter]:
    def make(target: Target, draft: DraftHead, **options) -> Drafter:
        return factory(draft, **options)

    return make


EACH = TREE, STOP, KEEP_LOGITS
"""Options of all of them."""


def _row(
    name: str,
    factory: Callable[..., Drafter],
    summary: str,
    paper: str,
    *options: Option,
    on_cpu: int = 7,
    wide_tree: str | None = None,
) -> Method:
    return Method(
        name, "drafter", _of_head(factory), "distribution", summary, paper, frozenset({"head"}), options=options,
        cpu_options={"num_tokens": on_cpu}, wide_tree=wide_tree,
    )  # fmt: skip


AS_MANY = Option("num_tokens", int, None, "drafted tokens per round; default: as many as the head drafts")


HEADS: dict[str, Method] = {
    method.name: method
    for method in (
        _row(
            "chimera",
            drafters.chimera,
            "a layer over the target's features, trigrams in place of those not there yet",
            "Zeng et al. 2024, arXiv 2402.15758",
            AS_MANY,
            *EACH,
        ),
        _row(
            "dflash",
            drafters.dflash,
            "one pass over a block of masks that sees the target's streams says all drafted tokens",
            "arXiv 2602.06036 (2026)",
            AS_MANY,
            *EACH,
        ),
        _row(
            "dflash2",
            drafters.dflash2,
            "dflash with convolutions, and a selector of a path through the candidates",
            "z-lab 2026, github.com/z-lab/dflash",
            AS_MANY,
            *EACH,
        ),
        _row(
            "domino",
            drafters.domino,
            "dflash corrected by a recurrence over the tokens drafted so far",
            "arXiv 2605.29707 (2026)",
            AS_MANY,
            *EACH,
        ),
        _row(
            "dspark",
            drafters.dspark,
            "dflash corrected by the token before, with a confidence of its own",
            "DeepSeek 2026, github.com/deepseek-ai/DeepSpec",
            AS_MANY,
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
            on_cpu=3,
            wide_tree="eagle2:8x6x60",
        ),
        _row(
            "eagle3",
            drafters.eagle3,
            "a decoder layer with a head of its own continues three of the target's streams",
            "Li et al. 2025, arXiv 2503.01840",
            num_tokens(5),
            *EACH,
            on_cpu=3,
            wide_tree="eagle2:8x6x60",
        ),
        _row(
            "falcon",
            drafters.falcon,
            "a decoder layer over blocks of k tokens continues the target's last features",
            "Gao et al. 2024, arXiv 2412.12639",
            num_tokens(4),
            *EACH,
            on_cpu=4,
            wide_tree="eagle2:8x6x60",
        ),
        _row(
            "hamburger",
            drafters.hamburger,
            "a small decoder continues four of the target's streams until it says that a segment ends",
            "Liu, Zhang 2025, arXiv 2505.20438",
            AS_MANY,
            *EACH,
        ),
        _row(
            "hidden_transfer",
            drafters.hidden_transfer,
            "the target's upper layers finish states transferred from its last token",
            "Wu et al. 2024, arXiv 2404.12022",
            AS_MANY,
            *EACH,
            on_cpu=3,
        ),
        _row(
            "hydra",
            drafters.hydra,
            "Medusa's heads that also read the tokens drafted so far",
            "Ankner et al. 2024, arXiv 2402.05109",
            AS_MANY,
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
            "m2r2",
            drafters.m2r2,
            "a second, faster stream through the target's first layers, until its router is not sure",
            "Bhendawade et al. 2025, arXiv 2502.02040",
            num_tokens(6),
            *EACH,
        ),
        _row(
            "medusa",
            drafters.medusa,
            "heads on the target's last feature say several tokens ahead at once",
            "Cai et al. 2024, arXiv 2401.10774",
            AS_MANY,
            *EACH,
            on_cpu=3,
            wide_tree="top:8x2x1",
        ),
        _row(
            "p_eagle",
            drafters.p_eagle,
            "an EAGLE-3 head says all drafted tokens in one pass",
            "arXiv 2602.01469 (2026)",
            AS_MANY,
            *EACH,
        ),
        Method(
            "ppd",
            "drafter",
            _of_head(drafters.ppd),
            "distribution",
            "the verify pass reads trained prompts below its nodes, and what it says of them is the next draft",
            "Chen et al. 2024, arXiv 2405.18628",
            frozenset({"head"}),
            frozenset({"costs"}),
            options=(
                Option("num_nodes", int, None, "tokens of a pass, prompts included; default: 16 on CPU, else 64"),
                Option("accuracy", chances, None, "by distance and rank, how often a guess is right; default: assumed"),
            ),
            alone=True,
        ),
        _row(
            "mlp_speculator",
            drafters.mlp_speculator,
            "an MLP per depth takes the sampled tokens into the target's last feature",
            "Wertheimer et al. 2024, arXiv 2404.19124",
            AS_MANY,
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
