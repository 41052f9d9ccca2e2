"""Models that decode with a loop of their own, several tokens per pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import jax

from specjax.catalog import Option
from specjax.models.heads.kinds import KINDS
from specjax.models.loading.formats.writing import save_model
from specjax.models.loading.heads import save_head
from specjax.training.data.vocabulary import find_unused_token
from specjax.training.loop.head_init import new_head
from specjax.training.methods.consistency import collect_trajectories, train_consistency
from specjax.training.methods.hamburger import train_hamburger
from specjax.training.methods.lexical_units import train_lud
from specjax.training.parts.adaptive_depth import train_model
from specjax.training.parts.contract import STEPS, PartJob, PartKind, PartResult, describe_losses


def _train_lud(job: PartJob) -> PartResult:
    options = dict(job.options)
    if options["pad_token"] is None:
        options["pad_token"] = find_unused_token(job.texts, job.target.model.vocab_size, job.inputs["eos"])
    trainer = lambda target, tokens, length, **options: train_lud(target, tokens, length, key=job.seed, **options)
    settings = " ".join(f"--set {name}={options[name]}" for name in ("pad_token", "slots"))
    return train_model(replace(job, options=options), trainer, f"--target {{folder}} --method lud {settings}")


def _train_consistency(job: PartJob) -> PartResult:
    options = dict(job.options)
    block = options.pop("block")
    data = collect_trajectories(
        job.target, job.prompts, key=job.seed, max_new_tokens=job.max_new_tokens, block=block, eos=job.inputs["eos"],
        batch_size=job.batch_size,
    )  # fmt: skip
    model, losses = train_consistency(job.target, data, key=job.seed, batch_size=job.batch_size, **options, **job.rate)
    numbers = describe_losses(losses)
    save_model(job.folder, model, job.tokenizer)
    return PartResult(f"--target {job.folder} --method ceed_vla --set block={block}", numbers)


def _train_hamburger(job: PartJob) -> PartResult:
    tokens, prompt, length = job.batch()
    config = KINDS["hamburger"].of_target(job.target.model.config)
    head = new_head("hamburger", config, job.target, jax.random.key(job.seed))
    model, head, losses = train_hamburger(job.target, head, tokens, prompt, length, **job.options, **job.rate)
    numbers = describe_losses(losses)
    save_model(job.folder / "base", model, job.tokenizer)
    save_head(job.folder / "head", head, target=model)
    return PartResult(f"--target {job.folder}/base --draft {job.folder}/head --method hamburger_decoding", numbers)


PARTS: Mapping[str, PartKind] = {
    "lud": PartKind(
        "a model that fills several positions in one pass", _train_lud,
        (
            Option("pad_token", "int", None, "id of a token that no text contains; default: an unused one"),
            Option("slots", "int", 3, "positions of a pass"),
            Option("threshold", "float", 0.9, "least probability of the later tokens of a unit"), STEPS,
        ),
        changes_target=True,
    ),
    "ceed_vla": PartKind(
        "a model that jumps to the fixed point of Jacobi decoding", _train_consistency,
        (Option("block", "int", 16, "tokens per block"), STEPS), data="prompts", changes_target=True,
    ),
    "hamburger_decoding": PartKind(
        "a model that reads segments as one token, and its head", _train_hamburger,
        (STEPS, Option("base_rate", "float", 5e-5, "learning rate of the model")),
        changes_target=True,
    ),
}  # fmt: skip
"""The parts by the name of their method."""
