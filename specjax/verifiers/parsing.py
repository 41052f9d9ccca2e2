"""Parsing of acceptance rules from short texts, for command lines and configs."""

from __future__ import annotations

import jax.numpy as jnp

from specjax import verifiers
from specjax.catalog.options import read_call
from specjax.catalog.rules import OF_FILES, PARAMETERS
from specjax.errors import UsageError
from specjax.models.loading.decision_heads import JudgeHead
from specjax.verifiers.verifier import Verifier


def parse_rule(spec: str) -> Verifier:
    """Return a rule of `VERIFIERS` by name, or one with parameters, such as `typical:0.2,0.4` or `typical:delta=0.4`.

    Raises: UsageError for an unknown rule or parameters that it does not have.
    """
    if spec in verifiers.VERIFIERS:
        return verifiers.VERIFIERS[spec]
    name, colon, _ = spec.partition(":")
    if name in PARAMETERS:
        return getattr(verifiers, name)(**read_call(spec, PARAMETERS[name]))
    if name in OF_FILES:
        values = {option.name: option.default for option in OF_FILES[name]} | read_call(spec, OF_FILES[name])
        return _judge(**values)
    if colon and name in verifiers.VERIFIERS:
        raise UsageError(f'rule "{name}" takes no parameters, only {", ".join(PARAMETERS)} do; write {name}')
    if name in verifiers.rules_with_arrays():
        raise UsageError(f'rule "{name}" takes arrays; create it with specjax.verifiers.{name.strip("+")} in Python')
    forms = [*verifiers.VERIFIERS, *(f"{name}:{options[0].form}" for name, options in (PARAMETERS | OF_FILES).items())]
    raise UsageError(f'unknown rule "{spec}"; choose one of {", ".join(forms)}')


def _judge(file: JudgeHead, threshold: float | None) -> Verifier:
    """Return the rule `judge` with the arrays of a file. The threshold is the argument, the file's, or 0.5."""
    default = 0.5 if file.threshold is None else file.threshold
    return verifiers.judge(jnp.asarray(file.weight), file.bias, default if threshold is None else threshold)
