"""Models that do less. A table written by hand; `make` gives a `specjax.adaptive.Depth`.

A test checks that every method of `specjax.adaptive` is in it, and that options and defaults are those of its function.
"""

from __future__ import annotations

from typing import Any

from specjax import adaptive
from specjax.adaptive import Depth
from specjax.catalog.method import Method
from specjax.catalog.options import Option, read_call
from specjax.errors import UsageError


def _row(make: Any, summary: str, paper: str, *options: Option, **more: Any) -> Method:
    return Method(make.__name__, "adaptive", make, "lossy", summary, paper, options=options, **more)


EVERY = Option("every", int, 4, "layers between two tests")
HORIZON = Option("horizon", int, 128, "tokens that are generated at most; default: --max-new-tokens")

ADAPTIVE: dict[str, Method] = {
    method.name: method
    for method in (
        _row(
            adaptive.calm,
            "a token leaves the model at the layer at which its prediction is confident",
            "Schuster et al. 2022, arXiv 2207.07061",
            Option("threshold", float, 0.9, "confidence that is enough, above 1 none"),
            Option("confidence", ("softmax", "saturation"), "softmax", "of the head, or of how little a layer changes"),
            EVERY,
            Option("decay", float, 4.0, "how fast the threshold falls along the text"),
            Option("form", ("paper", "follow_up"), "paper", "of its fall"),
            HORIZON,
        ),
        _row(
            adaptive.skip_decode,
            "the later a token, the fewer layers it runs, the first and the last ones",
            "Del Corro et al. 2023, arXiv 2307.02628",
            Option("speedup", float, 1.5, "layers of the model in the mean of the budgets"),
            Option("most", int, None, "layers of the first token; default: 1.5 times the mean"),
            Option("least", int, None, "layers of the last token; default: so that the mean is right"),
            Option("warm_up", int, 1, "layers at the bottom that every token runs"),
            HORIZON,
        ),
        _row(
            adaptive.ffn_skip,
            "no MLPs in the middle of the model once one of them changes little",
            "Jaiswal et al. 2024, arXiv 2404.03865",
            Option("threshold", float, 0.95, "cosine of the stream before and behind an MLP, above 1 none"),
            Option("first", int, None, "layers at the bottom that run whole; default: an eighth, at least 2"),
            Option("last", int, 2, "layers at the top that run whole"),
            Option("warm_up", int, 8, "generated tokens that run everything"),
        ),
        _row(
            adaptive.unified,
            "every token runs the same few layers, evenly spread",
            "Liu et al. 2024, arXiv 2404.06954",
            Option("speedup", float, 1.5, "layers of the model in those that run"),
        ),
        _row(
            adaptive.matformer,
            "the first hidden units of every MLP are a smaller model",
            "Devvrit et al. 2023, arXiv 2310.07707",
            Option("share", float, 0.25, "of the hidden units"),
        ),
        _row(
            adaptive.s2d,
            "a draft model of which a token leaves at the first of a few exits that is sure",
            "Kavehzadeh et al. 2024, arXiv 2407.01955",
            Option("threshold", float, 0.7, "probability of the likeliest token that is enough, above 1 none"),
            Option("exits", int, 3, "of the draft model, at equal parts of its depth"),
        ),
        _row(
            adaptive.dynamax,
            "a token leaves the model where a trained probe says that its prediction will stay",
            "Nogales et al. 2025, arXiv 2504.20922",
            Option("threshold", float, 0.9, "probability that is enough, above 1 none"),
            EVERY,
            needs=frozenset({"probes"}),
        ),
        _row(
            adaptive.first,
            "routers choose by the prompt the layers that the answer runs",
            "Jain et al. 2024, arXiv 2410.12513",
            needs=frozenset({"routers"}),
        ),
        _row(
            adaptive.lora_drop,
            "most layers run at every k-th token only, in between a low-rank correction stands for them",
            "2026, arXiv 2601.02569",
            EVERY._replace(help="tokens between two that run everything"),
            Option("alpha", float, 16.0, "of the corrections, divided by their rank"),
            needs=frozenset({"corrections"}),
        ),
    )
}

LOADABLE = [name for name, row in ADAPTIVE.items() if not row.needs]
"""What needs no arrays that only Python can give."""


def parse_depth(spec: str, horizon: int | None = None) -> Depth:
    """The depth of a text such as `calm` or `calm:0.8,every=5`.

    horizon: of methods that have one, where the text does not say it. Raises: UsageError.
    """
    name = spec.partition(":")[0]
    if name not in LOADABLE:
        what = "needs arrays that only Python can give" if name in ADAPTIVE else "chooses no layers"
        raise UsageError(f'"{name}" {what}; choose one of {", ".join(LOADABLE)}')
    row = ADAPTIVE[name]
    values = read_call(spec, row.options)
    if horizon is not None and row.option("horizon"):
        values = {"horizon": horizon} | values
    return row.make(**values)


def depth_spec(spec: str) -> str:
    """The text itself. Raises: UsageError unless it names a method and its options."""
    parse_depth(spec)
    return spec
