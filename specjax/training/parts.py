"""Trained parts of methods: probes, routers, filters, decision heads and changed models, by the name of their method.

Each entry trains on texts and writes files that the method reads. `specjax train --method NAME` calls them. Draft heads
and draft models have a pipeline of their own (`specjax.training.pipeline`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

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
from specjax.api import denoise
from specjax.catalog import REQUIRED, Option, shared
from specjax.diffusion.types import Denoiser
from specjax.errors import UsageError
from specjax.models.heads.kinds import KINDS
from specjax.models.loading.decision_heads import save_acceptance, save_judge
from specjax.models.loading.formats.writing import save_model
from specjax.models.loading.heads import save_head
from specjax.models.loading.trained_arrays import save_arrays
from specjax.training.data.packing import TrainingText, pack
from specjax.training.loop.head_init import new_head
from specjax.training.loop.trainer import train
from specjax.training.methods.arbitrage_router import collect_steps, train_router
from specjax.training.methods.consistency import collect_trajectories, train_consistency
from specjax.training.methods.hamburger import train_hamburger
from specjax.training.methods.judge_head import JudgedResponse, fit_judge, make_examples, threshold_for
from specjax.training.methods.learn2pd_filter import train_filter
from specjax.training.methods.lexical_units import train_lud
from specjax.training.objectives.recipes import recipe_of
from specjax.training.objectives.stopping import init_stopping
from specjax.types import Array, Target

Data = Literal["responses", "prompts", "judged"]


@dataclass(frozen=True)
class PartJob:
    """The inputs of a training run."""

    target: Target
    folder: Path
    options: Mapping[str, Any]  # of the entry, all of them
    texts: Sequence[TrainingText] = ()  # responses, or texts of a file
    prompts: Sequence[Sequence[int]] = ()
    judged: Sequence[JudgedResponse] = ()
    draft: Target | None = None
    denoiser: Denoiser | None = None
    tokenizer: Any = None  # saved with a changed model: a folder or a tokenizer
    inputs: Mapping[str, Any] = field(default_factory=dict)  # arguments that the caller makes from words and models
    max_new_tokens: int = 256
    temperature: float = 0.0
    rows: int = 4
    length: int = 512
    epochs: int = 1
    seed: int = 0
    learning_rate: float | None = None

    @property
    def rate(self) -> dict[str, Any]:
        """Return the learning rate as an argument, or nothing."""
        return {} if self.learning_rate is None else {"learning_rate": self.learning_rate}

    def batch(self) -> tuple[Array, Array, Array]:
        """Return (tokens int32[N, T], prompt lengths int32[N], lengths int32[N]) of all texts, cut at `length`."""
        cut = [text.cut(self.length) for text in self.texts]
        if not cut:
            raise UsageError("there are no texts to train on; give more prompts, or a larger `length`")
        size = max(len(text.tokens) for text in cut)
        rows = np.array([[*text.tokens, *[0] * (size - len(text.tokens))] for text in cut], np.int32)
        lengths = (np.array([number(text) for text in cut], np.int32) for number in _LENGTHS)
        return (jnp.asarray(rows), *map(jnp.asarray, lengths))  # type: ignore[return-value]


_LENGTHS = (lambda text: text.prompt_length, lambda text: len(text.tokens))


class PartResult(NamedTuple):
    """A written part."""

    flags: str  # of `specjax generate`, which use it
    numbers: dict[str, float]  # results of the training, by name


class PartKind(NamedTuple):
    """A kind of part that can be trained."""

    summary: str
    train: Callable[[PartJob], PartResult]
    options: tuple[Option, ...] = ()
    data: Data = "responses"
    takes_draft: bool = False
    denoises: bool = False  # True: the target is a diffusion model
    settings: frozenset[str] = frozenset({"learning_rate"})  # fields of `PartJob` that the training reads

    @property
    def flags(self) -> frozenset[str]:
        """Return the flags of `specjax train` that the part reads, besides those of all parts."""
        return _DATA_FLAGS[self.data] | self.settings


_OWN_PROMPTS = frozenset({"own_prompts", "answers", "batch_size", "max_new_tokens"})
_DATA_FLAGS: Mapping[str, frozenset[str]] = {
    "responses": _OWN_PROMPTS | {"temperature"}, "prompts": _OWN_PROMPTS, "judged": frozenset(),
}  # fmt: skip


STEPS = Option("steps", "int", 200, "optimisation steps over all texts")


def _losses(losses: Array) -> dict[str, float]:
    """Return the first and the last loss. Raises: UsageError for a last one that is not finite."""
    values = np.asarray(losses)
    if not np.isfinite(values[-1:]).all():
        raise UsageError(f"the loss became {values[-1]}, and nothing is written; train with a smaller learning rate")
    return {"first_loss": float(values[0]), "last_loss": float(values[-1])} if len(values) else {}


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
        flags, numbers = f"--target {job.folder} {flags}", _losses(losses)
        save_model(job.folder, changed, job.tokenizer)
    return PartResult(flags, numbers)


def _train_corrections(job: PartJob) -> PartResult:
    (tokens, prompt, length), options = job.batch(), {**job.options, **job.rate}
    corrections, losses = train_corrections(job.target, tokens, prompt, length, key=job.seed, **options)
    file = job.folder / "corrections.safetensors"
    numbers = _losses(losses)
    save_corrections(file, corrections)
    return PartResult(f"--adapt lora_drop:{file}", numbers)


def _train_model(job: PartJob, trainer: Callable[..., tuple[Target, Array]], flags: str) -> PartResult:
    """Train a whole model on texts, and write it as a model folder."""
    tokens, _, length = job.batch()
    model, losses = trainer(job.draft or job.target, tokens, length, **job.options, **job.rate)
    numbers = _losses(losses)
    save_model(job.folder, model, job.tokenizer)
    return PartResult(flags.format(folder=job.folder), numbers)


def _train_sorted(job: PartJob) -> PartResult:
    depth = f"s2d:exits={job.options['exits']}"
    as_draft = f"--draft {{folder}} --method two_model --set depth={depth}"
    return _train_model(job, train_sorted, f"--target {{folder}} --adapt {depth}" if job.draft is None else as_draft)


def _train_lud(job: PartJob) -> PartResult:
    trainer = lambda target, tokens, length, **options: train_lud(target, tokens, length, key=job.seed, **options)
    settings = " ".join(f"--set {name}={job.options[name]}" for name in ("pad_token", "slots"))
    return _train_model(job, trainer, f"--target {{folder}} --method lud {settings}")


def _train_consistency(job: PartJob) -> PartResult:
    options = dict(job.options)
    block = options.pop("block")
    data = collect_trajectories(job.target, job.prompts, key=job.seed, max_new_tokens=job.max_new_tokens, block=block)
    model, losses = train_consistency(job.target, data, key=job.seed, **options, **job.rate)
    numbers = _losses(losses)
    save_model(job.folder, model, job.tokenizer)
    return PartResult(f"--target {job.folder} --method ceed_vla --set block={block}", numbers)


def _train_hamburger(job: PartJob) -> PartResult:
    tokens, prompt, length = job.batch()
    config = KINDS["hamburger"].of_target(job.target.model.config)
    head = new_head("hamburger", config, job.target, jax.random.key(job.seed))
    model, head, losses = train_hamburger(job.target, head, tokens, prompt, length, **job.options, **job.rate)
    numbers = _losses(losses)
    save_model(job.folder / "base", model, job.tokenizer)
    save_head(job.folder / "head", head, target=model)
    return PartResult(f"--target {job.folder}/base --draft {job.folder}/head --method hamburger_decoding", numbers)


def _train_filter(job: PartJob) -> PartResult:
    """Write texts with one column per pass, and fit a filter to their replay."""
    denoiser, options = job.denoiser, dict(job.options)
    assert denoiser is not None
    block = options.pop("block")
    if denoiser.block not in (None, block):
        raise UsageError(f"--set block={block} differs from the model's block of {denoiser.block} columns; give that")
    settings = {"key": job.seed, "max_new_tokens": job.max_new_tokens, "eos": job.inputs["eos"]}
    texts = []
    for start in range(0, len(job.prompts), job.rows):
        prompts = job.prompts[start : start + job.rows]
        responses = denoise(denoiser, None, prompts, **settings).to_lists()
        texts += [TrainingText((*a, *b), len(a)) for a, b in zip(prompts, responses, strict=True)]
    batches = pack(texts, job.rows, job.length, one_per_row=True)
    learned = train_filter(denoiser, batches, block=block, key=job.seed, **options, **job.rate)
    save_arrays(job.folder / "filter.safetensors", "filter", learned, block=block)
    return PartResult(f"--method learn2pd --set filter={job.folder}", {})


def _train_stopping(job: PartJob) -> PartResult:
    assert job.draft is not None
    blocks = job.options["blocks"]
    head = train(
        job.target, init_stopping(job.draft, blocks), list(job.texts), recipe=recipe_of("specdec++", **job.rate),
        epochs=job.epochs, rows=job.rows, length=job.length, seed=job.seed,
    ).head  # fmt: skip
    save_acceptance(job.folder, head)
    return PartResult(f"--method two_model --set acceptance={job.folder} --draft-stop trained:0.3", {})


def _train_judge(job: PartJob) -> PartResult:
    """Fit a judge to three of four texts, and choose its threshold on the others."""
    options, file = job.options, job.folder / "judge.safetensors"
    trained, held_out = _split_judged(job)
    make = lambda texts: make_examples(job.target, texts, rows=job.rows, length=job.length)
    judge = fit_judge(*make(trained), l2=options["l2"], steps=options["steps"])
    threshold, numbers = None, {}
    features, labels = make(held_out) if held_out else (np.zeros(0), np.ones(0))
    if not labels.all():
        odds = judge(features)
        threshold = threshold_for(odds, labels, wrong=options["wrong"])
        numbers = {"threshold": threshold, "held_out_accuracy": float(np.mean((odds > 0) == (labels > 0)))}
    save_judge(file, judge.weight, judge.bias, threshold)
    return PartResult(f"--verifier judge:{file}" + ("" if threshold is not None else ",0.5"), numbers)


def _split_judged(job: PartJob) -> tuple[list[JudgedResponse], list[JudgedResponse]]:
    """Return the texts to train on, and a quarter of the right and of the wrong ones that is held out.

    Raises: UsageError if all errors are beyond the first `length` tokens.
    """
    order = [job.judged[i] for i in np.random.default_rng(job.seed).permutation(len(job.judged))]
    is_wrong = lambda response: response.wrong is not None and response.wrong < job.length
    wrong, right = ([x for x in order if is_wrong(x) == value] for value in (True, False))
    if not wrong:
        raise UsageError(f"no response has its error in the first {job.length} tokens; give a larger `length`")
    counts = [len(group) // 4 for group in (wrong, right)]
    held_out, trained = wrong[: counts[0]] + right[: counts[1]], wrong[counts[0] :] + right[counts[1] :]
    return trained, held_out


def _train_arbitrage(job: PartJob) -> PartResult:
    assert job.draft is not None
    options, file = job.options, job.folder / "router.safetensors"
    inputs = dict(job.inputs)
    router, source = inputs.pop("router_model"), inputs.pop("router_source")
    names = ("samples", "max_step_tokens")
    examples = collect_steps(
        job.draft, job.target, job.prompts, key=job.seed, max_new_tokens=job.max_new_tokens, router=router,
        temperature=job.temperature, **{name: options[name] for name in names}, **inputs,
    )  # fmt: skip
    head = train_router(examples, l2=options["l2"], steps=options["fit_steps"])
    save_judge(file, head.weight, head.bias)
    labels = examples.labels
    numbers = {
        "steps": len(labels), "target_is_better": float(np.mean(labels)),
        "accuracy": float(np.mean((head(examples.features) > 0) == (labels > 0))),
    }  # fmt: skip
    return PartResult(f"--method arbitrage --set router={source} --set router_head={file}", numbers)


_L2 = Option("l2", "float", 1e-3, "weight of the penalty of the head's size")
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
        "corrections that replace layers between two tokens that run all of them", _train_corrections,
        (
            Option("every", "int", EVERY, "k: all layers run at every k-th token"),
            Option("alpha", "float", ALPHA, "scale of the corrections; it is divided by their rank"),
            Option("rank", "int", 8, "rank of the corrections"), Option("steps", "int", 100, STEPS.help),
        ),
    ),
    "matformer": PartKind(
        "a model whose first hidden units are smaller models",
        lambda job: _train_model(job, train_nested, "--target {folder} --adapt matformer"),
        (
            Option("shares", "floats_in_call", (0.125, 0.25, 0.5, 1.0), "parts of the hidden units that are trained"),
            Option("steps", "int", 100, STEPS.help),
        ),
    ),
    "s2d": PartKind(
        "a draft model with several exits: that of --draft, or the target", _train_sorted,
        (
            Option("exits", "int", 3, "number of exits, at equal distances in depth"),
            Option("steps", "int", 100, STEPS.help),
        ),
        takes_draft=True,
    ),
    "lud": PartKind(
        "a model that fills several positions in one pass", _train_lud,
        (
            Option("pad_token", "int", REQUIRED, "id of a token that no text contains"),
            Option("slots", "int", 3, "positions of a pass"),
            Option("threshold", "float", 0.9, "least probability of the later tokens of a unit"), STEPS,
        ),
    ),
    "ceed_vla": PartKind(
        "a model that jumps to the fixed point of Jacobi decoding", _train_consistency,
        (Option("block", "int", 16, "tokens per block"), STEPS), data="prompts",
    ),
    "hamburger_decoding": PartKind(
        "a model that reads segments as one token, and its head", _train_hamburger,
        (STEPS, Option("base_rate", "float", 5e-5, "learning rate of the model")),
    ),
    "learn2pd": PartKind(
        "a filter that accepts proposals of a diffusion model", _train_filter,
        (
            Option("block", "int", 32, "columns per block"),
            Option("steps", "int", 2000, "optimisation steps over all passes"),
        ),
        data="prompts", denoises=True, settings=frozenset({"learning_rate", "rows"}),
    ),
    "specdec++": PartKind(
        "a head that ends the draft of the model of --draft", _train_stopping,
        (Option("blocks", "int", 3, "residual blocks of the head"),), takes_draft=True,
        settings=frozenset({"learning_rate", "rows", "epochs"}),
    ),
    "judge": PartKind(
        "the head of the rule judge, from responses with their first error", _train_judge,
        (STEPS, _L2, Option("wrong", "float", 0.02, "share of wrong tokens that the threshold accepts")), data="judged",
        settings=frozenset({"rows"}),
    ),
    "arbitrage": PartKind(
        "the head of a router, from steps of both models that a reward model compares", _train_arbitrage,
        (
            *shared.reward_words(),
            Option("router", "reward_model", None, "model below the head; default: the model of --draft"),
            Option("samples", "int", 1, "steps of the target per step of the draft model"),
            Option("max_step_tokens", "int", 512, "maximum number of tokens per step"),
            shared.steps("an empty line"),
            Option("fit_steps", "int", 200, "optimisation steps of the head"), _L2,
        ),
        data="prompts", takes_draft=True, settings=frozenset({"temperature"}),
    ),
}  # fmt: skip
"""The parts by the name of their method or rule."""
