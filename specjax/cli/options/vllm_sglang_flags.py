"""vLLM's and SGLang's flags for drafting, translated to the flags of this command line.

The two count differently. vLLM's num_speculative_tokens are drafted tokens, like --num-draft-tokens. SGLang's
--speculative-num-draft-tokens are the tokens that the target verifies. They include the token before the draft: a chain
of --speculative-num-steps 5 has 6 of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from specjax.errors import UsageError, require
from specjax.files.untrusted import parse_json, quote

PANEL = "Names of vLLM and SGLang"
ConfigOption = Annotated[
    str | None,
    typer.Option(
        "--speculative-config",
        help='vLLM\'s JSON: {"method": "eagle3", "model": HEAD, "num_speculative_tokens": 5}. The number is that of '
        "drafted tokens.",
        rich_help_panel=PANEL,
        show_default=False,
    ),
]
AlgorithmOption = Annotated[
    str | None,
    typer.Option(
        "--speculative-algorithm",
        help="SGLang's method: EAGLE, EAGLE3, STANDALONE, NGRAM, ...",
        rich_help_panel=PANEL,
        show_default=False,
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--speculative-draft-model-path", help="SGLang's name of --draft.", rich_help_panel=PANEL, show_default=False
    ),
]
StepsOption = Annotated[
    int | None,
    typer.Option(
        "--speculative-num-steps",
        help="SGLang's depth of the tree: drafted tokens on the longest path.",
        rich_help_panel=PANEL,
        show_default=False,
    ),
]
TopKOption = Annotated[
    int | None,
    typer.Option(
        "--speculative-eagle-topk",
        help="SGLang's number of children per node; 1 drafts a chain.",
        rich_help_panel=PANEL,
        show_default=False,
    ),
]
TokensOption = Annotated[
    int | None,
    typer.Option(
        "--speculative-num-draft-tokens",
        help="SGLang's size of the tree; it includes the token before the draft.",
        rich_help_panel=PANEL,
        show_default=False,
    ),
]
MapOption = Annotated[
    Path | None,
    typer.Option(
        "--speculative-token-map",
        help="FR-Spec's list of the ids that an EAGLE head drafts, a .pt file.",
        rich_help_panel=PANEL,
        show_default=False,
    ),
]


@dataclass(frozen=True)
class SpeculativeOptions:
    """The names that vLLM and SGLang use for drafting."""

    speculative_config: ConfigOption = None
    speculative_algorithm: AlgorithmOption = None
    speculative_draft_model_path: ModelOption = None
    speculative_num_steps: StepsOption = None
    speculative_eagle_topk: TopKOption = None
    speculative_num_draft_tokens: TokensOption = None
    speculative_token_map: MapOption = None


MTP_FAMILIES = "deepseek", "ernie", "exaone_moe", "glm4_moe", "mimo", "nemotron_h", "qwen3_5", "qwen3_next", "step3p5"
VLLM_METHODS = {"ngram": "prompt_lookup", "draft_model": "two_model"} | {
    f"{family}_mtp": "mtp" for family in MTP_FAMILIES
}
SGLANG_METHODS = {
    "EAGLE": "eagle", "EAGLE3": "eagle3", "STANDALONE": "two_model", "NGRAM": "prompt_lookup", "NEXTN": "mtp",
}  # fmt: skip
COVERED = {"eagle3": ("p_eagle",), "dflash": ("dflash2", "domino", "jetspec")}
"""More kinds of draft heads by the name of their method. vLLM and SGLang serve P-EAGLE as eagle3, and block heads
without a Markov head as dflash. The files of a head decide its kind."""
KEYS = {
    "method": "--method", "model": "--draft", "num_speculative_tokens": "--num-draft-tokens",
    "prompt_lookup_max": "max_ngram", "prompt_lookup_min": "min_ngram",
}  # fmt: skip


class DraftFlags(NamedTuple):
    """The flags of this command line for drafting."""

    method: str | None = None
    draft: str | None = None
    num_draft_tokens: int | None = None
    tree: str | None = None
    settings: list[str] | None = None
    kinds: tuple[str, ...] = ()  # more kinds of draft heads that the method's name means


def translate(flags: DraftFlags, speculative: SpeculativeOptions) -> DraftFlags:
    """Combine this command line's flags with vLLM's and SGLang's.

    Raises: UsageError for an unknown name, or two flags that contradict each other.
    """
    values: dict[str, dict[str, Any]] = {
        "method": {"--method": flags.method},
        "draft": {"--draft": flags.draft, "--speculative-draft-model-path": speculative.speculative_draft_model_path},
        "num_draft_tokens": {"--num-draft-tokens": flags.num_draft_tokens},
        "tree": {"--tree": flags.tree},
    }
    config, algorithm, settings = speculative.speculative_config, speculative.speculative_algorithm, flags.settings
    if config is not None:
        settings = [*(settings or ()), *_read_config(config, values)]
    if algorithm is not None:
        name = _method(algorithm.upper(), SGLANG_METHODS, "--speculative-algorithm")
        values["method"]["--speculative-algorithm"] = name
    _read_shape(speculative, values)
    combined = {name: _combine(entries) for name, entries in values.items()}
    kinds = () if flags.method else COVERED.get(combined["method"], ())
    return DraftFlags(**combined, settings=settings, kinds=kinds)


def _read_config(text: str, values: Mapping[str, dict[str, Any]]) -> list[str]:
    """Add the values of vLLM's JSON; return those that --set takes."""
    from specjax.models.loading.families.config_fields import ConfigFields

    flag = "--speculative-config"
    contents = parse_json(text.encode("utf-8", "replace"), flag, 'write {"method": "eagle3", "model": "FOLDER"}')
    require(isinstance(contents, dict), f"{flag} must be a JSON object, not {quote(contents)}")
    unknown = [name for name in contents if name not in KEYS]
    first = quote(next(iter(unknown), ""))
    require(not unknown, f"{flag} has the unknown key {first}; the supported keys are {', '.join(KEYS)}")
    fields = ConfigFields(contents, flag)
    word = fields.text("method", None)
    if word is not None:
        values["method"][f"{flag}: method"] = _method(word, VLLM_METHODS, f"{flag}: method")
    values["draft"][f"{flag}: model"] = fields.text("model", None)
    values["num_draft_tokens"][f"{flag}: num_speculative_tokens"] = fields.size("num_speculative_tokens", None)
    return [f"{KEYS[name]}={fields.size(name)}" for name in KEYS if name.startswith("prompt") and fields.has(name)]


def _method(word: str, names: Mapping[str, str], flag: str) -> str:
    """Return the method of this command line for a name of vLLM or SGLang."""
    from specjax.catalog import of_kind

    drafters = of_kind("drafter")
    name = names.get(word, word.lower())
    if name not in drafters:
        words = ", ".join([*names, *(name for name, row in drafters.items() if "head" in row.needs)])
        raise UsageError(f"{flag}: unknown method {quote(word)}; choose one of {words}")
    return name


def _read_shape(flags: SpeculativeOptions, values: Mapping[str, dict[str, Any]]) -> None:
    """Add the draft that SGLang's three numbers describe: a chain, or the most likely nodes of a tree."""
    steps, topk = flags.speculative_num_steps, flags.speculative_eagle_topk
    tokens = flags.speculative_num_draft_tokens
    names = "--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens"
    for name, value, minimum in zip(names, (steps, topk, tokens), (1, 1, 2), strict=True):
        require(value is None or value >= minimum, f"{name} must be at least {minimum}, not {value}")
    if (topk or 1) == 1:
        chain = steps if steps is not None else tokens and tokens - 1
        require(
            steps is None or tokens is None or tokens == steps + 1,
            f"{names[2]} includes the token before the draft: a chain of {names[0]} {steps} has {(steps or 0) + 1}, "
            f"not {tokens}",
        )
        values["num_draft_tokens"][names[0] if steps is not None else names[2]] = chain
        return
    require(
        steps is not None and tokens is not None,
        f"{names[1]} {topk} also needs {names[0]}, the depth of the tree, and {names[2]}, its size with the token "
        "before the draft",
    )
    values["tree"][f"{names[1]} {topk}, {names[0]} {steps} and {names[2]} {tokens}"] = (
        f"eagle2:{topk}x{steps}x{(tokens or 2) - 1}"
    )


def _combine(flags: Mapping[str, Any]) -> Any:
    """Return the one value of several flags. Raises: UsageError for two different values."""
    values = [(flag, value) for flag, value in flags.items() if value is not None]
    for flag, value in values:
        if value != values[0][1]:
            raise UsageError(f"{values[0][0]} is {values[0][1]} and {flag} is {value}; remove one of them")
    return values[0][1] if values else None
