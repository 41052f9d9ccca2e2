"""The settings of a run, built once from the flags."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, cast

from specjax import controllers
from specjax.bench.records import is_comparable
from specjax.catalog import METHODS
from specjax.catalog.method import Guarantee
from specjax.cli.options.common import parse_flag
from specjax.cli.options.groups import DraftOptions, WarpOptions
from specjax.engine.prepare import Settings
from specjax.errors import UsageError
from specjax.types import Draws
from specjax.verifiers import Verifier
from specjax.verifiers.parsing import parse_rule

FIELDS = re.compile(r"\b(temperature|top_k|top_p|min_p|sampling|verifier)\b")
"""The settings that have a flag, in the messages of their checks."""


@dataclass(frozen=True)
class Decoding:
    """The engine's settings, the length and the seed of a run."""

    settings: Settings  # without eos, processors and controller, which need the models
    max_new_tokens: int
    seed: int
    controller: str | None = None  # a form of `specjax.controllers`

    @property
    def rule(self) -> Verifier | None:
        """Return the acceptance rule of --verifier."""
        rule = self.settings.verifier
        assert rule is None or isinstance(rule, Verifier)
        return rule

    def guarantee(self, method: str) -> Guarantee:
        """Return the guarantee of a method; a lossy rule makes any method lossy."""
        rule = self.rule
        is_lossy = rule is not None and rule.guarantee == "lossy" and self.remark is None
        return "lossy" if is_lossy else METHODS[method].guarantee

    @property
    def remark(self) -> str | None:
        """Return a note for a lossy rule that is exact at temperature 0, or None."""
        rule = self.rule
        if rule is None or not (self.settings.is_greedy and rule.greedy_at_zero):
            return None
        return (
            f"--verifier {rule.name}: at temperature 0 one token has all of the target's probability, so the text is "
            "the greedy one; add --temperature 1 for the relaxed rule"
        )

    def is_comparable(self, method: str, draws: Draws) -> bool:
        """Return True if the text must equal that of plain decoding."""
        settings = self.settings
        return is_comparable(self.guarantee(method), draws, settings.is_greedy, settings.sampling == "coupled")

    def record(self) -> dict:
        """Return the settings as JSON."""
        names = "temperature", "top_k", "top_p", "min_p"
        values = {name: getattr(self.settings, name) for name in names}
        return {"max_new_tokens": self.max_new_tokens, **values, "seed": self.seed}


def describe_uncompared(guarantee: Guarantee) -> str:
    """Return why the texts of a method were not compared with those of plain decoding."""
    reasons = {
        "distribution": "sampled drafts keep the target's distribution, not its text for a given seed",
        "lossy": "this method is lossy, so its text can differ",
    }
    return f"outputs: not compared; {reasons.get(guarantee, 'this method promises equal text at temperature 0 only')}"


def build_decoding(sampling: WarpOptions, draft: DraftOptions | None = None, controller: str | None = None) -> Decoding:
    """Build the settings of a run from its flags.

    controller: the controller of the run, from --controller or a default.

    A temperature of None is 0.

    Raises: UsageError that names the flag of a value outside its range.
    """
    flags = draft or DraftOptions()
    verifier = None if flags.verifier is None else parse_flag("--verifier", parse_rule, flags.verifier)
    if controller is not None:
        parse_flag("--controller", controllers.parse, controller)
    try:
        settings = Settings(
            temperature=sampling.temperature or 0.0, top_k=sampling.top_k, top_p=sampling.top_p,
            min_p=getattr(sampling, "min_p", None), sampling=cast(Any, flags.sampling),
            verifier=verifier,
        )  # fmt: skip
    except UsageError as error:
        raise UsageError(name_flags(str(error))) from None
    return Decoding(settings, sampling.max_new_tokens, sampling.seed, controller)


def name_flags(message: str) -> str:
    """Return the message of a check of settings with flags in place of the names of settings."""
    return FIELDS.sub(lambda match: "--" + match[0].replace("_", "-"), message)


def without_draft(settings: Settings) -> Settings:
    """Return the settings of plain decoding, which drafts and verifies no tokens."""
    return dataclasses.replace(settings, verifier=None, controller=None)
