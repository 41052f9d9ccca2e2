"""Writes words.json, what `specjax.cli.options.completion` knows of the catalogue: `python -m specjax.cli.words`."""

from __future__ import annotations

import json
from typing import Any

from specjax import controllers, trees
from specjax.catalog import SAMPLING, Method, Option, of_kind
from specjax.cli.options.completion import FILE
from specjax.cli.options.drafter_flags import LOADABLE
from specjax.training.objectives.recipes import RECIPES
from specjax.verifiers import VERIFIERS, rules_with_arrays


def words() -> dict[str, dict[str, Any]]:
    """Of each section the words, and what each means."""
    drafters = of_kind("drafter")
    forms = {"trees": trees.FORMS, "stops": trees.stops.FORMS, "controllers": controllers.FORMS}
    return {
        "drafters": {name: _row(row) for name, row in drafters.items() if row.needs <= LOADABLE},
        "diffusion": {name: _row(row) for name, row in of_kind("diffusion").items()},
        "collaborations": {name: _row(row) for name, row in of_kind("collaboration").items()},
        "adaptive": {name: _row(row) for name, row in of_kind("adaptive").items()},
        "recipes": {name: _row(row) for name, row in drafters.items() if name in RECIPES},
        "rules": {name: {"help": rule.summary} for name, rule in {**VERIFIERS, **rules_with_arrays()}.items()},
        "sampling": {name: {"help": summary} for name, summary in SAMPLING.items()},
        **{section: _begun(of_section) for section, of_section in forms.items()},
    }


def _row(method: Method) -> dict[str, Any]:
    options = {option.name: {"help": option.help, "values": _values(option)} for option in method.options}
    return {"help": method.summary, "options": options}


def _values(option: Option) -> list[str]:
    return option.form.split("|") if "|" in option.form else []


def _begun(forms: dict[str, str]) -> dict[str, Any]:
    """What each form begins with: of `beam:WxD` beam:, of `bass` itself; of one that begins with a number nothing."""
    found: dict[str, Any] = {}
    for form, summary in forms.items():
        for one in form.split(", "):
            name, colon, _ = one.partition(":")
            if name[:1].islower():
                found.setdefault(name + colon, {"help": summary})
    return found


def text() -> str:
    return json.dumps(words(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
