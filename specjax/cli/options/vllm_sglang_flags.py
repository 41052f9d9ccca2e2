"""vLLM's and SGLang's words for drafting, as the flags of this command line.

They count differently. vLLM's num_speculative_tokens are drafted tokens, as --num-draft-tokens is. SGLang's
--speculative-num-draft-tokens are what the target verifies, the token before the drafts included: a chain of
--speculative-num-steps 5 has 6 of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from specjax.cli.options.common import require
from specjax.errors import UsageError
from specjax.files.untrusted import parse_json, quote

PANEL = "As vLLM and SGLang call it"
ConfigOption = Annotated[
    str | None,
    typer.Option(
        "--speculative-config",
        help='vLLM\'s JSON: {"method": "eagle3", "model": HEAD, "num_speculative_tokens": 5}; the tokens are drafted '
        "ones.",
        rich_help_panel=PANEL,
        show_default=False,
    ),
]
AlgorithmOption = Annotated[
    str | None,
    typer.Option(
        "--speculative-algorithm",
        help="SGLang's: EAGLE, EAGLE3, STANDALONE, NGRAM, ...",
        rich_help_panel=PANEL,
        show_default=False,
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option("--speculative-draft-model-path", help="SGLang's --draft.", rich_help_panel=PANEL, show_default=False),
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
        help="SGLang's children of a node; 1: a chain.",
        rich_help_panel=PANEL,
        show_default=False,
    ),
]
TokensOption = Annotated[
    int | None,
    typer.Option(
        "--speculative-num-draft-tokens",
        help="SGLang's size of the tree: one more than is drafted, for the token before the drafts counts.",
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

OF_VLLM = {"ngram": "prompt_lookup", "draft_model": "two_model"}
OF_SGLANG = {"EAGLE": "eagle", "EAGLE3": "eagle3", "STANDALONE": "two_model", "NGRAM": "prompt_lookup"}
COVERED = {"eagle3": ("p_eagle",), "dflash": ("dflash2", "domino")}
"""What else a word of theirs is said of: P-EAGLE is served as eagle3, all that drafts blocks without a Markov head as
dflash. Which of them a head is, its files say."""
KEYS = {
    "method": "--method", "model": "--draft", "num_speculative_tokens": "--num-draft-tokens",
    "prompt_lookup_max": "max_ngram", "prompt_lookup_min": "min_ngram",
}  # fmt: skip


class Asked(NamedTuple):
    """What all of them say together."""

    method: str | None
    draft: str | None
    num_draft_tokens: int | None
    tree: str | None
    settings: list[str] | None
    also: tuple[str, ...] = ()  # kinds of heads that the method is, too, for it is a word of theirs


def read_speculative(
    method: str | None,
    draft: str | None,
    num_draft_tokens: int | None,
    tree: str | None,
    settings: list[str] | None,
    *,
    config: str | None,
    algorithm: str | None,
    model: str | None,
    steps: int | None,
    topk: int | None,
    tokens: int | None,
) -> Asked:
    """The flags of this command line, from those and from vLLM's and SGLang's.

    Raises: UsageError for a word that is not known, or two flags that contradict each other.
    """
    found: dict[str, dict[str, Any]] = {
        "method": {"--method": method}, "draft": {"--draft": draft, "--speculative-draft-model-path": model},
        "num_draft_tokens": {"--num-draft-tokens": num_draft_tokens}, "tree": {"--tree": tree},
    }  # fmt: skip
    if config is not None:
        settings = [*(settings or ()), *_read_config(config, found)]
    if algorithm is not None:
        found["method"]["--speculative-algorithm"] = _method(algorithm.upper(), OF_SGLANG, "--speculative-algorithm")
    _read_shape(steps, topk, tokens, found)
    agreed = {name: _agreed(flags) for name, flags in found.items()}
    return Asked(**agreed, settings=settings, also=() if method else COVERED.get(agreed["method"], ()))


def _read_config(text: str, found: Mapping[str, dict[str, Any]]) -> list[str]:
    """Adds what vLLM's JSON says. Returns what of it is for --set."""
    from specjax.models.loading.families.config_fields import ConfigFields

    flag = "--speculative-config"
    contents = parse_json(text.encode("utf-8", "replace"), flag, 'write {"method": "eagle3", "model": "FOLDER"}')
    require(isinstance(contents, dict), f"{flag} must be a JSON object, not {quote(contents)}")
    unknown = [name for name in contents if name not in KEYS]
    first = quote(next(iter(unknown), ""))
    require(not unknown, f"{flag} has the key {first}, and of vLLM's only {', '.join(KEYS)} mean something here")
    fields = ConfigFields(contents, flag)
    word = fields.text("method", None)
    if word is not None:
        found["method"][f"{flag}: method"] = _method(word, OF_VLLM, f"{flag}: method")
    found["draft"][f"{flag}: model"] = fields.text("model", None)
    found["num_draft_tokens"][f"{flag}: num_speculative_tokens"] = fields.size("num_speculative_tokens", None)
    return [f"{KEYS[name]}={fields.size(name)}" for name in KEYS if name.startswith("prompt") and fields.has(name)]


def _method(word: str, names: Mapping[str, str], flag: str) -> str:
    from specjax.catalog import of_kind

    known = of_kind("drafter")
    name = names.get(word, word.lower())
    if name not in known:
        words = ", ".join([*names, *(name for name, row in known.items() if "head" in row.needs)])
        raise UsageError(f"{flag} {quote(word)} is no method here; choose one of {words}")
    return name


def _read_shape(steps: int | None, topk: int | None, tokens: int | None, found: Mapping[str, dict[str, Any]]) -> None:
    """Adds the draft of SGLang's three numbers: a chain, or the likeliest nodes of a tree."""
    flags = "--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens"
    for flag, value, least in zip(flags, (steps, topk, tokens), (1, 1, 2), strict=True):
        require(value is None or value >= least, f"{flag} must be at least {least}, not {value}")
    if (topk or 1) == 1:
        chain = steps if steps is not None else tokens and tokens - 1
        require(
            steps is None or tokens is None or tokens == steps + 1,
            f"{flags[2]} counts the token before the drafts: a chain of {flags[0]} {steps} has {(steps or 0) + 1}, not "
            f"{tokens}",
        )
        found["num_draft_tokens"][flags[0] if steps is not None else flags[2]] = chain
        return
    require(
        steps is not None and tokens is not None,
        f"{flags[1]} {topk} wants {flags[0]}, the depth of the tree, and {flags[2]}, its size with the token before "
        "the drafts, too",
    )
    found["tree"][f"{flags[1]} {topk}, {flags[0]} {steps} and {flags[2]} {tokens}"] = (
        f"eagle2:{topk}x{steps}x{(tokens or 2) - 1}"
    )


def _agreed(flags: Mapping[str, Any]) -> Any:
    """The one value that was given. Raises: UsageError for two that differ."""
    given = [(flag, value) for flag, value in flags.items() if value is not None]
    for flag, value in given:
        if value != given[0][1]:
            raise UsageError(f"{given[0][0]} says {given[0][1]} and {flag} says {value}; leave one out")
    return given[0][1] if given else None
