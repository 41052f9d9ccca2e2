"""Acceptance rules: the parameters that a text can set, and one line about each rule; and the two ways to sample."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from specjax.catalog.collection import find_package
from specjax.catalog.options import REQUIRED, Option

_SAMPLE = "sample the target's own tokens instead of taking the most likely ones"

PARAMETERS: dict[str, tuple[Option, ...]] = {
    "multipath_block": (Option("paths", "int", None, "number of independent chains to use; default: all"),),
    "typical": (
        Option("epsilon", "float", 0.09, "maximum threshold of a token's probability"),
        Option("delta", "float", 0.3, "factor of the entropy-dependent threshold delta exp(-entropy)"),
    ),
    "rollback": (
        Option("alpha", "float", 5.0, "maximum surprisal of an accepted token, in nats"),
        Option("sample", "yes_or_no", False, _SAMPLE),
        Option("keep_argmax", "yes_or_no", False, "always accept the target's most likely token"),
    ),
    "top_beta": (
        Option("beta", "int", 5, "number of most likely tokens that can be accepted"),
        Option("tau", "float", 3.0, "maximum log-probability distance from the most likely token, in nats"),
    ),
    "rapid": (
        Option("eta", "float", 10.0, "strength of the shift of the target's distribution towards the draft's"),
        Option("alpha", "float", 0.1, "minimum probability of a shifted token relative to the most likely one"),
        Option("residual", ("phat", "paper"), "phat", "distribution of the token after a rejection"),
        Option("sample", "yes_or_no", True, _SAMPLE),
    ),
}
"""Parameters of the rules whose factory in `specjax.verifiers` takes numbers and words only."""

OF_FILES: dict[str, tuple[Option, ...]] = {
    "judge": (
        Option("file", "judge_head", REQUIRED, "file of the judge head's weight and bias: .safetensors, .pt or .bin"),
        Option(
            "threshold", "float", None, "minimum probability that a token is correct; default: the file's value, or 0.5"
        ),
    ),
}
"""Parameters of the rules whose arrays are read from a file."""

PRESETS: dict[str, tuple[str, ...]] = {
    "rollback": (
        "BiLD as published: --tree bild:10 --verifier rollback --temperature 1",
        "BiLD with the target's own samples: --tree bild:10 --verifier rollback:sample=yes --temperature 1",
    ),
    "lantern": (
        "LANTERN as published, with nearest = verifiers.nearest_codes(codebook, 1000): "
        "verifiers.lantern(nearest, 0.1), with temperature=1.0",
        "LANTERN's greedy mode: verifiers.lantern(nearest, 0.1, sample=False), with temperature=1.0",
    ),
    "lantern++": ("LANTERN++: verifiers.lantern(nearest, 2.0, relative=True), with temperature=1.0",),
    "grouped": ("GSD with up to 25 tokens in a cluster: verifiers.grouped(25, max_gap=0.15), with temperature=1.0",),
}
"""Settings of lossy rules in papers and their code, and variants of them, as flags or as a call in Python."""

SAMPLING = {
    "speculative": "an acceptance rule verifies drafted tokens: --verifier, or the exact rule for the drafter",
    "coupled": "target and drafter sample with the same noise; a seed's text equals plain sampling with any drafter",
}
"""The ways to sample, with one line about each."""


def rule_summaries() -> dict[str, str]:
    """Return a summary of each rule that has a name of its own, in the order of their files.

    The summaries are read from the calls of `Verifier` in the files of the rules, which are not imported.
    """
    summaries: dict[str, str] = {}
    for folder in ("exact", "lossy"):
        for file in sorted((find_package("verifiers") / folder).glob("*.py")):
            for call in _verifier_calls(file.read_text(encoding="utf-8")):
                words = {keyword.arg: keyword.value for keyword in call.keywords}
                summary = words.get("summary")
                if isinstance(summary, ast.Constant):
                    summaries[_first_string(call.args[0])] = str(summary.value)
    return summaries


def _verifier_calls(source: str) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Verifier" and node.args:
            yield node


def _first_string(node: ast.expr) -> str:
    """Return the first literal of an expression such as `"name" if paths is None else f"name({paths})"`."""
    strings = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str))
    return next(strings, "")
