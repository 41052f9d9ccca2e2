"""Trained parts of diffusion methods: filters, models that are certain of more columns, and small models that draft."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from specjax.api import denoise
from specjax.catalog import Option
from specjax.errors import UsageError
from specjax.models.loading.trained_arrays import save_arrays
from specjax.training.data.packing import TrainingText, pack
from specjax.training.data.vocabulary import find_unused_token
from specjax.training.methods.certainty_forcing import train_certainty
from specjax.training.methods.denoisers import save_denoiser_model
from specjax.training.methods.draft_denoiser import train_draft_denoiser
from specjax.training.methods.learn2pd_filter import train_filter
from specjax.training.parts.contract import LOOP_SETTINGS, PartJob, PartKind, PartResult, describe_losses


def _write_texts(job: PartJob, block: int) -> list[TrainingText]:
    """Return texts that the denoiser writes with one column per pass. Raises: UsageError for another block size."""
    denoiser = job.denoiser
    assert denoiser is not None
    if denoiser.block not in (None, block):
        raise UsageError(f"--set block={block} differs from the model's block of {denoiser.block} columns; give that")
    settings = {"key": job.seed, "max_new_tokens": job.max_new_tokens, "eos": job.inputs["eos"]}
    texts = []
    for start in range(0, len(job.prompts), job.rows):
        prompts = job.prompts[start : start + job.rows]
        responses = denoise(denoiser, None, prompts, **settings).to_lists()
        texts += [TrainingText((*a, *b), len(a)) for a, b in zip(prompts, responses, strict=True)]
    return texts


def _train_filter(job: PartJob) -> PartResult:
    """Fit a filter to the replay of texts that the model writes."""
    assert job.denoiser is not None
    options = dict(job.options)
    block = options.pop("block")
    batches = pack(_write_texts(job, block), job.rows, job.length, one_per_row=True)
    learned = train_filter(job.denoiser, batches, block=block, key=job.seed, **options, **job.rate)
    save_arrays(job.folder / "filter.safetensors", "filter", learned, block=block)
    return PartResult(f"--method learn2pd --set filter={job.folder}", {})


def _train_certainty(job: PartJob) -> PartResult:
    """Train the model on texts that it writes itself."""
    assert job.denoiser is not None
    options = dict(job.options)
    block = options.pop("block")
    batches = pack(_write_texts(job, block), job.rows, job.length)
    denoiser, losses = train_certainty(
        job.denoiser, batches, block=block, key=job.seed, epochs=job.epochs, **options, **job.rate
    )  # fmt: skip
    numbers = describe_losses(losses)
    save_denoiser_model(job.folder, denoiser, job.tokenizer)
    settings = "" if denoiser.block else f" --set block={block}"
    return PartResult(f"--target {job.folder} --method dparallel{settings}", numbers)


def _train_drafter(job: PartJob, method: str) -> PartResult:
    """Train a small model, which starts from layers of the target, to draft for it."""
    options = dict(job.options)
    mask_token = options.pop("mask_token")
    if mask_token is None:
        mask_token = find_unused_token(job.texts, job.target.model.vocab_size, job.inputs["eos"])
    denoiser, losses = train_draft_denoiser(
        job.target, job.texts, mask_token=mask_token, epochs=job.epochs, rows=job.rows, length=job.length,
        seed=job.seed, **options, **job.rate,
    )  # fmt: skip
    numbers = describe_losses(losses) | {"mask_token": mask_token}
    save_denoiser_model(job.folder, denoiser, job.tokenizer)
    count, (name, default) = options["num_tokens"], _LENGTHS.get(method, ("", 0))
    more = f" --set {name}={count}" if count < default else ""
    return PartResult(f"--draft {job.folder} --method {method} --num-draft-tokens {count}{more}", numbers)


_LENGTHS = {"diffuspec": ("min_tokens", 20), "failfast": ("chunk", 8)}
"""The options of drafters that are at most the length of a draft, and their defaults."""

_DRAFTER_OPTIONS = (
    Option("layers", "int", None, "layers of the target from which it starts; default: a quarter of all"),
    Option("num_tokens", "int", 32, "drafted tokens per step"),
    Option("mask_token", "int", None, "id of the mask token, which no text contains; default: an unused one"),
    Option("refine", "int", 1, "passes over all texts in which only the next tokens are masked"),
    Option("alpha", "float", 1.01, "weight of a token in them, relative to that of the token after it"),
)


PARTS: Mapping[str, PartKind] = {
    "learn2pd": PartKind(
        "a filter that accepts proposals of a diffusion model", _train_filter,
        (
            Option("block", "int", 32, "columns per block"),
            Option("steps", "int", 2000, "optimisation steps over all passes"),
        ),
        data="prompts", denoises=True, settings=frozenset({"rows", "learning_rate"}),
    ),
    "dparallel": PartKind(
        "a diffusion model that is certain of more columns at the same time", _train_certainty,
        (
            Option("block", "int", 32, "columns per block"),
            Option("beta", "float", 2.0, "weight of the entropy of correct columns; 1 for Dream"),
        ),
        data="prompts", denoises=True, changes_target=True, settings=LOOP_SETTINGS,
    ),
    **{
        name: PartKind(
            "a small diffusion model that drafts for the target", functools.partial(_train_drafter, method=name),
            _DRAFTER_OPTIONS, settings=LOOP_SETTINGS,
        )
        for name in ("deer", "diffuspec", "failfast")
    },
}  # fmt: skip
"""The parts by the name of their method."""
