"""Trained parts of methods of adaptive depth: probes, routers, corrections, and models with smaller models inside."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from specjax.adaptive import (
    save_corrections,
    save_probes,
    save_routers,
    train_corrections,
    train_lora,
    train_nested,
    train_probes,
    train_routers,
    train_sorted,
)
from specjax.adaptive.lora_drop import ALPHA, EVERY
from specjax.catalog import Option, shared
from specjax.models.loading.formats.writing import save_model
from specjax.training.parts.contract import STEPS, PartJob, PartKind, PartResult, describe_losses
from specjax.types import Array, Target


def _train_probes(job: PartJob) -> PartResult:
    tokens, _, length = job.batch()
    every = job.options["every"]
    probes = train_probes(job.target, tokens, length, **job.options, **job.rate)
    file = job.folder / "probes.safetensors"
    save_probes(file, probes)
    return PartResult(f"--adapt dynamax:{file},every={every}", {})


def _train_routers(job: PartJob) -> PartResult:
    tokens, prompt, length = job.batch()
    options = dict(job.options)
    lora = {name: options.pop(name) for name in ("rank", "alpha", "lora_steps", "lora_rate")}
    routers = train_routers(job.target, tokens, prompt, length, **options, **job.rate)
    file = job.folder / "routers.safetensors"
    save_routers(file, routers)
    flags, numbers = f"--adapt first:{file}", {}
    if lora["lora_steps"]:
        changed, losses = train_lora(
            job.target, routers, tokens, prompt, length, rank=lora["rank"], alpha=lora["alpha"],
            steps=lora["lora_steps"], learning_rate=lora["lora_rate"], key=job.seed,
        )  # fmt: skip
        flags, numbers = f"--target {job.folder} {flags}", describe_losses(losses)
        save_model(job.folder, changed, job.tokenizer)
    return PartResult(flags, numbers)


def _train_corrections(job: PartJob) -> PartResult:
    (tokens, prompt, length), options = job.batch(), {**job.options, **job.rate}
    corrections, losses = train_corrections(job.target, tokens, prompt, length, key=job.seed, **options)
    file = job.folder / "corrections.safetensors"
    numbers = describe_losses(losses)
    save_corrections(file, corrections)
    return PartResult(f"--adapt lora_drop:{file}", numbers)


def train_model(job: PartJob, trainer: Callable[..., tuple[Target, Array]], flags: str) -> PartResult:
    """Train a whole model on texts, and write it as a model folder."""
    tokens, _, length = job.batch()
    model, losses = trainer(job.draft or job.target, tokens, length, **job.options, **job.rate)
    numbers = describe_losses(losses)
    save_model(job.folder, model, job.tokenizer)
    return PartResult(flags.format(folder=job.folder), numbers)


def _train_sorted(job: PartJob) -> PartResult:
    """Train the exits of the draft model, which then drafts with them, or of the target."""
    depth = f"s2d:exits={job.options['exits']}"
    draft, alone = f"--draft {{folder}} --method two_model --set depth={depth}", f"--target {{folder}} --adapt {depth}"
    return train_model(job, train_sorted, alone if job.draft is None else draft)


PARTS: Mapping[str, PartKind] = {
    "dynamax": PartKind("probes that predict that the output will not change", _train_probes, (shared.EVERY, STEPS)),
    "first": PartKind(
        "routers that select layers from the prompt, and a low-rank change of the model for them", _train_routers,
        (
            Option("weight", "float", 0.01, "weight of the mean router output, which makes layers cheaper"),
            Option("bias", "float", 2.0, "initial bias of the routers"),
            Option("steps", "int", 100, "optimisation steps of the routers"),
            Option("lora_steps", "int", 0, "steps of the second stage, which changes the model; 0: none"),
            Option("rank", "int", 8, "rank of the change"),
            Option("alpha", "float", 16.0, "scale of the change; it is divided by the rank"),
            Option("lora_rate", "float", 1e-3, "learning rate of the second stage"),
        ),
    ),
    "lora_drop": PartKind(
        "low-rank corrections that replace layers between every k-th token", _train_corrections,
        (
            Option("every", "int", EVERY, "k: all layers run at every k-th token"),
            Option("rank", "int", 8, "rank of the corrections"),
            Option("alpha", "float", ALPHA, "scale of the corrections; it is divided by their rank"),
            Option("steps", "int", 100, STEPS.help),
        ),
        changes_target=True,
    ),
    "matformer": PartKind(
        "a model whose first hidden units are smaller models",
        lambda job: train_model(job, train_nested, "--target {folder} --adapt matformer"),
        (
            Option("shares", "floats_in_call", (0.125, 0.25, 0.5, 1.0), "parts of the hidden units that are trained"),
            Option("steps", "int", 100, STEPS.help),
        ),
        changes_target=True,
    ),
    "s2d": PartKind(
        "a draft model with several exits: that of --draft, or the target", _train_sorted,
        (
            Option("exits", "int", 3, "number of exits, at equal distances in depth"),
            Option("steps", "int", 100, STEPS.help),
        ),
        takes_draft=True,
    ),
}  # fmt: skip
"""The parts by the name of their method."""
