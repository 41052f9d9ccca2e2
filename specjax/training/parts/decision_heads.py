"""Small networks that decide for a method: the end of a draft, its length, the acceptance of tokens, or the writer."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np

from specjax.catalog import Option, shared
from specjax.controllers import fit_spec_kv, save_spec_kv
from specjax.errors import UsageError
from specjax.models.loading.decision_heads import save_acceptance, save_judge
from specjax.training.data.judged_files import JudgedResponse
from specjax.training.loop.trainer import train
from specjax.training.methods.arbitrage_router import collect_steps, train_router
from specjax.training.methods.draft_lengths import record_steps
from specjax.training.methods.judge_head import fit_judge, make_examples, threshold_for
from specjax.training.objectives.recipes import recipe_of
from specjax.training.objectives.stopping import init_stopping
from specjax.training.parts.contract import LOOP_SETTINGS, STEPS, PartJob, PartKind, PartResult

_L2 = Option("l2", "float", 1e-3, "weight of the penalty of the head's size")


def _train_stopping(job: PartJob) -> PartResult:
    assert job.draft is not None
    blocks = job.options["blocks"]
    head = train(
        job.target, init_stopping(job.draft, blocks), list(job.texts), recipe=recipe_of("specdec++", **job.rate),
        epochs=job.epochs, rows=job.rows, length=job.length, seed=job.seed,
    ).head  # fmt: skip
    save_acceptance(job.folder, head)
    return PartResult(f"--method two_model --set acceptance={job.folder} --draft-stop trained:0.3", {})


def _train_lengths(job: PartJob) -> PartResult:
    """Record decoding with random draft lengths, and fit the network that predicts the accepted share."""
    assert job.draft is not None
    gammas, file = job.options["gammas"], job.folder / "spec_kv.safetensors"
    features, drafted, accepted = record_steps(
        job.target, job.draft, job.prompts, key=job.seed, max_new_tokens=job.max_new_tokens, gammas=gammas,
        temperature=job.temperature, rows=job.rows, code=job.options["code"], eos=job.inputs["eos"],
    )  # fmt: skip
    key, steps = jax.random.key(job.seed), job.options["steps"]
    weights = fit_spec_kv(features, drafted, accepted, key=key, steps=steps, **job.rate)
    save_spec_kv(file, weights)
    listed = "/".join(map(str, gammas))
    drafter = f"--method two_model --num-draft-tokens {max(gammas)}"
    numbers = {"steps": len(drafted), "accepted_share": float(accepted.sum() / drafted.sum())}
    return PartResult(
        f"{drafter} --controller spec_kv:{file},gammas={listed},start={gammas[0]},code={job.options['code']}", numbers
    )


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
        temperature=job.temperature, batch_size=job.batch_size, **{name: options[name] for name in names}, **inputs,
    )  # fmt: skip
    head = train_router(examples, l2=options["l2"], steps=options["fit_steps"])
    save_judge(file, head.weight, head.bias)
    labels = examples.labels
    numbers = {
        "steps": len(labels), "target_is_better": float(np.mean(labels)),
        "accuracy": float(np.mean((head(examples.features) > 0) == (labels > 0))),
    }  # fmt: skip
    return PartResult(f"--method arbitrage --set router={source} --set router_head={file}", numbers)


PARTS: Mapping[str, PartKind] = {
    "specdec++": PartKind(
        "a head that ends the draft of the model of --draft", _train_stopping,
        (Option("blocks", "int", 3, "residual blocks of the head"),), takes_draft=True,
        settings=LOOP_SETTINGS,
    ),
    "spec_kv": PartKind(
        "the network that chooses the draft length of the model of --draft", _train_lengths,
        (
            Option("gammas", "integers_in_call", (2, 4, 6, 8), "draft lengths, joined by /"),
            Option("code", "int", 0, "compression of the draft model: 0 float16, 1 int8, 2 nf4"),
            Option("steps", "int", 500, "optimisation steps over all recorded steps"),
        ),
        data="prompts", takes_draft=True, settings=frozenset({"rows", "learning_rate", "temperature"}),
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
"""The parts by the name of their method, rule or controller."""
