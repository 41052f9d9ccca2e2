"""Decoders: methods with a loop of their own, called in Python. A table written by hand; `make` is the loop."""

from __future__ import annotations

from specjax import decoders
from specjax.catalog.method import Method
from specjax.catalog.options import REQUIRED, Option, yes_or_no

PEARL = "Liu et al. 2024, arXiv 2408.11850"

DECODERS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            "pearl",
            "decoder",
            decoders.pearl,
            "distribution",
            "a smaller model drafts while the target verifies, each on devices of its own",
            PEARL,
            needs=frozenset({"draft", "devices"}),
            options=(Option("num_tokens", int, None, "drafted tokens per step; default: by the clocks of both"),),
        ),
        Method(
            "pearl_in_one_program",
            "decoder",
            decoders.pearl_in_one_program,
            "distribution",
            "the same as one compiled program on two devices, which may be part of another",
            PEARL,
            needs=frozenset({"draft", "devices"}),
            options=(Option("num_tokens", int, REQUIRED, "drafted tokens per step"),),
        ),
        Method(
            "any_subset",
            "decoder",
            decoders.any_subset,
            "distribution",
            "an any-order model fills in missing tokens and drafts for itself",
            "Guo, Ermon 2025, arXiv 2504.20456",
            needs=frozenset({"any_order"}),
            options=(Option("window", int, 5, "tokens drafted at once"),),
        ),
        Method(
            "continuous",
            "decoder",
            decoders.continuous,
            "distribution",
            'draft and verify for tokens that are vectors drawn by a diffusion head; lossy with ratio="aligned"',
            "Wang et al. 2024, arXiv 2411.11925",
            needs=frozenset({"draft", "continuous"}),
            options=(
                Option("window", int, 8, "tokens drafted per round"),
                Option("ratio", ("path", "coupled", "aligned"), "path", "by which a draft is accepted"),
                Option("prefill_ratio", float, 0.15, "part of the new tokens that the target writes alone"),
                Option("max_tries", int, 1000, "candidates for a rejected token"),
            ),
        ),
        Method(
            "ceed_vla",
            "decoder",
            decoders.ceed_vla,
            "lossy",
            "a block at once by Jacobi iterations, left before they converge; greedy where they may converge",
            "Song et al. 2025, arXiv 2506.13725; Santilli et al. 2023, arXiv 2305.10427",
            options=(
                Option("block", int, 16, "tokens of a block"),
                Option("iterations", int, 8, "passes of a block at most"),
                Option("stale_keys", yes_or_no, False, "keep the keys of a guess that did not converge"),
            ),
        ),
        Method(
            "hamburger_decoding",
            "decoder",
            decoders.hamburger,
            "lossy",
            "the base reads several tokens as one, and a small decoder writes the next few from what it says of them",
            "Liu, Zhang 2025, arXiv 2505.20438",
            needs=frozenset({"head"}),
            options=(
                Option("confidence", float, 0.9, "a segment goes on where it is as likely to, above 1 none does"),
                Option("temperature", float, 0.0, "of the tokens that are drawn"),
            ),
        ),
        Method(
            "lud",
            "decoder",
            decoders.lud,
            "lossy",
            "a model that was tuned for it fills several empty places at once, as far as it is sure",
            "Sun et al. 2024, arXiv 2405.15208",
            options=(
                Option("pad_token", int, REQUIRED, "the token that it was tuned with"),
                Option("slots", int, 3, "empty places of a pass"),
                Option("threshold", float, 0.9, "probability of the likeliest token that is enough, above 1 none"),
                Option("repeats", int, 2, "of a token in a row at most"),
                Option("temperature", float, 0.0, "of the tokens that are drawn"),
            ),
        ),
        Method(
            "superposed_decoding",
            "decoder",
            decoders.superposed,
            "lossy",
            "several completions of a prompt for one pass of the target per token",
            "Shen et al. 2024, arXiv 2405.18400",
            takes=frozenset({"datastore"}),
            options=(
                Option("drafts", int, 3, "completions"),
                Option("candidates", int, 9, "likeliest tokens to choose from"),
                Option("temperature", float, 0.06, "of the mixture's distribution"),
                Option("alpha", float, 0.54, "weight of the corpus"),
            ),
        ),
    )
}
