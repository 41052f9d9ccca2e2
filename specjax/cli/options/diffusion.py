"""What the command line asks before it loads a diffusion model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specjax.cli.options.common import require

OF_DRAFTS = (
    "draft", "datastore", "num_draft_tokens", "tree", "draft_stop", "stop", "exit_layer", "source", "controller",
    "costs", "verifier", "adapt", "checkpoint", "coordinator", "num_processes", "process_id", "data", "model",
    "speculative_config", "speculative_algorithm", "speculative_draft_model_path", "speculative_num_steps",
    "speculative_eagle_topk", "speculative_num_draft_tokens", "speculative_token_map", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "logit_bias", "ban", "regex", "json_schema", "stop_string",
)  # fmt: skip
"""Parameters that say something of drafts, or that diffusion models have no use for yet: processors, several hosts."""

ELSEWHERE = {"sampling": "speculative", "same_bits": False, "distributed": False}
"""And others, with the value that says nothing."""


def is_diffusion(methods: Sequence[str] | None, target: str | None) -> bool:
    """Whether a run is one of a diffusion model, by its methods or its checkpoint."""
    from specjax.catalog import METHODS

    if any(METHODS[name].kind == "diffusion" for name in methods or () if name in METHODS):
        return True
    if target is None:
        return False
    from specjax.models import loading

    return loading.is_diffusion(target)


def check_flags(arguments: Mapping[str, Any]) -> None:
    """Raises: UsageError for flags of a command that are not of diffusion models."""
    nothing = {name: None for name in OF_DRAFTS} | ELSEWHERE
    for name, default in nothing.items():
        require(
            arguments.get(name, default) in (default, []),
            f"--{name.replace('_', '-')} is of autoregressive models; leave it out with a diffusion model",
        )


def check_method(method: str, target: str | None) -> str:
    """The diffusion method of that name.

    Raises: UsageError for the name of another one, and for one that the command line cannot give what it needs.
    """
    from specjax.catalog import METHODS, of_kind

    known = ", ".join(of_kind("diffusion"))
    require(method in METHODS, f'--method: unknown method "{method}"; of diffusion models choose {known}')
    row = METHODS[method]
    require(
        row.kind == "diffusion",
        f"--method {method} is a {row.kind} of autoregressive models, and --target {target} is a diffusion model; "
        f"choose one of {known}",
    )
    require(
        not row.needs,
        f"--method: the command line cannot load what {method} needs; call specjax.diffusion.methods.{method} in "
        "Python",
    )
    return method
