"""Acceptance rules: the parameters that a text can set, and one line about each rule; and the two ways to sample."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from specjax.catalog.collection import find_package
from specjax.catalog.options import REQUIRED, Option

_SAMPLE = "draw the target's own tokens instead of taking the likeliest"

PARAMETERS: dict[str, tuple[Option, ...]] = {
    "multipath_block": (
        Option("paths", "int", None, "of the independent chains the first so many are read; default: all"),
    ),
    "typical": (
        Option("epsilon", "float", 0.09, "largest threshold of a token's probability"),
        Option("delta", "float", 0.3, "of the threshold delta exp(-entropy)"),
    ),
    "rollback": (
        Option("alpha", "float", 5.0, "largest surprise of a token that is kept, in nats"),
        Option("sample", "yes_or_no", False, _SAMPLE),
        Option("keep_argmax", "yes_or_no", False, "keep the likeliest token too, whatever its surprise"),
    ),
    "top_beta": (
        Option("beta", "int", 5, "likeliest tokens that may pass"),
        Option("tau", "float", 3.0, "how far behind the likeliest, in nats"),
    ),
    "rapid": (
        Option("eta", "float", 10.0, "how far the target is pulled towards the draft"),
        Option("alpha", "float", 0.1, "share of the largest probability that a pulled token needs"),
        Option("residual", ("phat", "paper"), "phat", "what the next token is drawn from"),
        Option("sample", "yes_or_no", True, _SAMPLE),
    ),
}
"""Parameters of the rules whose factory in `specjax.verifiers` takes numbers and words only."""

OF_FILES: dict[str, tuple[Option, ...]] = {
    "judge": (
        Option("file", "judge_head", REQUIRED, "the head's weight and bias, a .safetensors, .pt or .bin file"),
        Option("threshold", "float", None, "least chance of being right; default: the file's, or 0.5"),
    ),
}
"""Parameters of the rules whose arrays are read from a file."""

SAMPLING = {
    "speculative": "a drafted token is accepted by a rule: --verifier, or the exact one for how it was drawn",
    "coupled": "target and draft draw with the same noise: the text for a seed is plain sampling's, whatever drafts",
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
