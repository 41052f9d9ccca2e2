"""Acceptance rules from a short text, with their parameters; and the two ways to draw."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp

from specjax.catalog.options import REQUIRED, Option, read_call, yes_or_no
from specjax.errors import UsageError
from specjax.models.loading.decision_heads import JudgeHead, read_judge
from specjax.verifiers import (
    VERIFIERS,
    Verifier,
    judge,
    multipath_block,
    rapid,
    rollback,
    rules_with_arrays,
    top_beta,
    typical,
)

_SAMPLE = "draw the target's own tokens instead of taking the likeliest"

PARAMETERS: dict[str, tuple[Callable[..., Verifier], tuple[Option, ...]]] = {
    "multipath_block": (
        multipath_block,
        (Option("paths", int, None, "of the independent chains the first so many are read; default: all"),),
    ),
    "typical": (
        typical,
        (
            Option("epsilon", float, 0.09, "largest threshold of a token's probability"),
            Option("delta", float, 0.3, "of the threshold delta exp(-entropy)"),
        ),
    ),
    "rollback": (
        rollback,
        (
            Option("alpha", float, 5.0, "largest surprise of a token that is kept, in nats"),
            Option("sample", yes_or_no, False, _SAMPLE),
            Option("keep_argmax", yes_or_no, False, "keep the likeliest token too, whatever its surprise"),
        ),
    ),
    "top_beta": (
        top_beta,
        (
            Option("beta", int, 5, "likeliest tokens that may pass"),
            Option("tau", float, 3.0, "how far behind the likeliest, in nats"),
        ),
    ),
    "rapid": (
        rapid,
        (
            Option("eta", float, 10.0, "how far the target is pulled towards the draft"),
            Option("alpha", float, 0.1, "share of the largest probability that a pulled token needs"),
            Option("residual", ("phat", "paper"), "phat", "what the next token is drawn from"),
            Option("sample", yes_or_no, True, _SAMPLE),
        ),
    ),
}
"""The rules that can be told something in words, with the factory of each."""


def _judge(file: JudgeHead, threshold: float | None) -> Verifier:
    chosen = file.threshold if threshold is None else threshold
    return judge(jnp.asarray(file.weight), file.bias, 0.5 if chosen is None else chosen)


OF_FILES: dict[str, tuple[Callable[..., Verifier], tuple[Option, ...]]] = {
    "judge": (
        _judge,
        (
            Option("file", read_judge, REQUIRED, "the head's weight and bias, a .safetensors, .pt or .bin file"),
            Option("threshold", float, None, "least chance of being right; default: the file's, or 0.5"),
        ),
    ),
}
"""The rules whose arrays are read from a file, likewise."""

SAMPLING = {
    "speculative": "a drafted token is accepted by a rule: --verifier, or the exact one for how it was drawn",
    "coupled": "target and draft draw with the same noise: the text for a seed is plain sampling's, whatever drafts",
}


def parse_rule(spec: str) -> Verifier:
    """A rule of `VERIFIERS` by name, or one with parameters: `typical:0.2,0.4`, `typical:delta=0.4`.

    Raises: UsageError for an unknown rule or parameters that it does not have.
    """
    if spec in VERIFIERS:
        return VERIFIERS[spec]
    name, colon, _ = spec.partition(":")
    if name in PARAMETERS:
        make, options = PARAMETERS[name]
        return make(**read_call(spec, options))
    if name in OF_FILES:
        make, options = OF_FILES[name]
        return make(**{option.name: option.default for option in options} | read_call(spec, options))
    if colon and name in VERIFIERS:
        raise UsageError(f'rule "{name}" takes no parameters, only {", ".join(PARAMETERS)} do; write {name}')
    if name in rules_with_arrays():
        raise UsageError(f'rule "{name}" takes arrays; make it with specjax.verifiers.{name.strip("+")} in Python')
    known = [*VERIFIERS, *(f"{name}:{options[0].form}" for name, (_, options) in (PARAMETERS | OF_FILES).items())]
    raise UsageError(f'unknown rule "{spec}"; choose one of {", ".join(known)}')
