"""Inputs of methods that the command line can provide. It imports no JAX."""

from __future__ import annotations

from specjax.catalog.method import Method
from specjax.catalog.options import REQUIRED

PROVIDED = {
    "drafter": {"draft", "head", "datastore", "denoiser"},
    "decoder": {"draft", "head", "datastore", "devices", "any_order"},
    "collaboration": {"draft", "safe", "segmenter", "judging", "cues", "reward"},
}
"""The inputs that flags provide, by kind of method: models of --draft, a --datastore, and words of --set."""


STAND_INS = {"draft": "--draft MODEL", "safe": "--draft MODEL", "denoiser": "--draft MODEL", "head": "--draft HEAD"}
"""The flags of models by the need that they provide."""


def command_of(row: Method) -> str | None:
    """Return a command that runs a method, with words in capitals to replace; None if only Python has its inputs."""
    if missing_inputs(row):
        return None
    required = [f"{option.name}={option.form}" for option in row.settable if option.default is REQUIRED]
    models = [flag for need, flag in STAND_INS.items() if need in row.needs]
    if row.kind == "diffusion" or "any_order" in row.needs:
        models.append("--target MODEL")
    if "datastore" in row.needs:
        models.append("--datastore FOLDER")
    if row.kind == "adaptive":
        return f"specjax generate PROMPT --adapt {row.name}" + (f":{','.join(required)}" if required else "")
    if row.kind == "compression":
        return f"specjax generate PROMPT --compress {row.name}"
    if row.kind == "cache":
        return f"specjax generate PROMPT --cache-dtype {row.name}"
    scores = [f"--set {option.name}={option.form}" for option in row.words if option.type == "reward_model"][:1]
    words = [
        f"specjax generate PROMPT --method {row.name}",
        *models,
        *scores,
        *(f"--set {setting}" for setting in required),
    ]
    return " ".join(words)


def missing_inputs(row: Method) -> list[str]:
    """Return the required inputs that only Python can provide."""
    return sorted(row.needs - PROVIDED.get(row.kind, set()))
