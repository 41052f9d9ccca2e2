"""GRPO on word problems from templates: rollouts with drafts against plain decoding, in one process.

    python benchmarks/rollout_grpo.py --epochs 4 --json rollouts.json --plot rollouts.png

Each step samples a group of answers to one prompt with both samplers, from the same weights and keys, in alternating
order. Then it takes one policy gradient step on them, whose time counts for both. Both samplers must return the same
tokens, and the largest difference of their log-probabilities is printed. The samplers share nothing: the drafts come
from the drafting sampler's own samples. Epochs repeat the prompts, as GRPO does. The first step compiles, and medians
leave it out.

The policy is SmolLM2-135M with float32 weights, and the last `--layers` layers are trained. The reward is 1 if the
correct number is in the answer, and less for numbers near it.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import re
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import specjax
from specjax.catalog.methods import METHODS
from specjax.files.plotting import hide_top_right_spines, new_figure, to_png
from specjax.models.heads.contract import DraftHead
from specjax.models.loading.heads import load_head
from specjax.rollouts import RolloutSampler, RolloutStore, Samples
from specjax.rollouts.refresh import HeadRefresher
from specjax.types import Array, Model, PyTree, Target

CLIP = 0.2
GAP = 1e-5  # wanted limit of the difference between the log-probabilities of both samplers
TEMPLATES = (
    ("Ann has {a} apples. She buys {b} more and gives {c} to Ben. How many apples does Ann have?", "{a}+{b}-{c}"),
    ("A box holds {a} pens. Tom has {b} boxes and loses {c} pens. How many pens does Tom have?", "{a}*{b}-{c}"),
    ("Mia reads {a} pages on Monday, {b} on Tuesday and {c} on Friday. How many in all?", "{a}+{b}+{c}"),
    ("Sam sells {a} cakes at {b} dollars each and spends {c} dollars. How many dollars are left?", "{a}*{b}-{c}"),
)


class Problem(NamedTuple):
    text: str
    answer: int


class Step(NamedTuple):
    """A step of the run, with figures of both samplers."""

    epoch: int
    plain: float  # seconds of the rollout
    drafted: float
    plain_cpu: float  # seconds of the processor, over its cores, which other jobs on the machine change less
    drafted_cpu: float
    update: float
    tokens: int
    tokens_per_pass: float
    acceptance: float  # of the first drafted token
    reward: float
    mean_length: float  # of the texts, as a share of the longest: the others wait for it
    gap: float  # between the log-probabilities of both samplers
    trainer_gap: float  # between those of the sampler and of the trainer


def problems(count: int, seed: int = 0) -> list[Problem]:
    """Return word problems like those of GSM8K, with numbers drawn from a seed."""
    draws = np.random.default_rng(seed)
    tasks = []
    for (text, rule), _ in zip(itertools.cycle(TEMPLATES), range(count), strict=False):
        a, b, c = (int(x) for x in draws.integers(3, 10, 3))
        numbers = {"a": a + 5, "b": b, "c": c}
        values = [int(x) for x in re.findall(r"\d+", rule.format(**numbers))]
        first = values[0] * values[1] if "*" in rule else values[0] + values[1]
        tasks.append(Problem(text.format(**numbers), first + values[2] * (-1 if rule.endswith("-{c}") else 1)))
    return tasks


def reward_of(text: str, answer: int) -> float:
    """Return 1 if the answer is among the numbers of the text, else a reward below 1 for the nearest one."""
    numbers = [int(number[:9]) for number in re.findall(r"\d+", text)]
    return max((float(np.exp(-abs(number - answer) / abs(answer))) for number in numbers), default=0.0)


def split(params: dict[str, Any], layers: int) -> tuple[PyTree, PyTree]:
    """Return the parameters of the last layers, and the others."""
    names = sorted(params["layers"], key=int)[-layers:]
    trained = {name: params["layers"][name] for name in names}
    frozen = {name: layer for name, layer in params["layers"].items() if name not in trained}
    return trained, params | {"layers": frozen}


def merge(trained: PyTree, frozen: dict[str, Any]) -> PyTree:
    return frozen | {"layers": frozen["layers"] | trained}


@functools.partial(jax.jit, static_argnames=("model", "optimizer"))
def update(
    model: Model,
    optimizer: Any,
    trained,
    frozen,
    state,
    text: Array,
    mask: Array,
    old: Array,
    advantages: Array,
    temperature: float,
):
    """Take one GRPO step on texts int32[B, L]. `mask` and `old` [B, L - 1]: sampled tokens and their log p."""
    batch, size = text.shape

    def loss(trained):
        params = merge(trained, frozen)
        output, _ = model.forward(
            params, text, model.init_cache(params, None, batch, 1),
            positions=jnp.broadcast_to(jnp.arange(size), (batch, size)),
            mask=jnp.broadcast_to(jnp.tril(jnp.ones((size, size), bool)), (batch, size, size)),
        )  # fmt: skip
        log_p = jax.nn.log_softmax(output.logits[:, :-1] / temperature)
        log_p = jnp.take_along_axis(log_p, text[:, 1:, None], 2)[..., 0]
        ratio = jnp.exp(jnp.where(mask, log_p - old, 0.0))
        objective = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantages)
        gap = jnp.max(jnp.where(mask, jnp.abs(log_p - old), 0.0))
        return -jnp.sum(jnp.where(mask, objective, 0.0)) / jnp.sum(mask), gap

    gradients, gap = jax.grad(loss, has_aux=True)(trained)
    changes, state = optimizer.update(gradients, state, trained)
    return optax.apply_updates(trained, changes), state, gap


def arrays_of(prompt: list[int], samples: Samples, rewards: list[float], size: int) -> tuple[np.ndarray, ...]:
    """Return the texts, masks, log-probabilities and advantages of a group, padded to `size` tokens."""
    assert samples.logprobs is not None
    text, mask = np.zeros((len(rewards), size), np.int32), np.zeros((len(rewards), size - 1), bool)
    old = np.zeros((len(rewards), size - 1), np.float32)
    for row, (tokens, logprobs) in enumerate(zip(samples.tokens, samples.logprobs, strict=True)):
        begin, end = len(prompt), len(prompt) + len(tokens)
        text[row, :end] = [*prompt, *tokens]
        mask[row, begin - 1 : end - 1], old[row, begin - 1 : end - 1] = True, logprobs
    values = np.array(rewards, np.float32)
    return text, mask, old, ((values - values.mean()) / (values.std() + 1e-4))[:, None]


def compare(plain: Samples, drafted: Samples) -> float:
    """Return the largest difference of the log-probabilities of both samplers; their tokens must be equal."""
    assert plain.logprobs is not None and drafted.logprobs is not None
    if [row.tolist() for row in plain.tokens] != [row.tolist() for row in drafted.tokens]:
        raise SystemExit("the texts of both samplers differ; float32 rounding may do this once in many thousand tokens")
    return max(float(np.abs(a - b).max()) for a, b in zip(plain.logprobs, drafted.logprobs, strict=True))


def timed(call) -> tuple[tuple[float, float], Any]:
    """Return seconds of the wall clock and of the processor, and the result."""
    begin, begin_cpu = time.perf_counter(), time.process_time()
    result = jax.block_until_ready(call())
    return (time.perf_counter() - begin, time.process_time() - begin_cpu), result


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="default: the demo model")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=4, help="samples per prompt")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--layers", type=int, default=4, help="last layers that are trained")
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--drafter", default="auto", help="a method, or the name or folder of a draft head for auto")
    parser.add_argument("--refresh", type=int, default=0, help="calls per update of the draft head; 0: none")
    parser.add_argument("--estimated-costs", action="store_true", help="do not measure the cost of wider passes")
    parser.add_argument("--rescore", action="store_true", help="score the finished texts of both samplers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args(arguments)
    target, tokenizer = specjax.load(options.target, stacked=False)
    report = run(target, tokenizer, options)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if options.plot:
        options.plot.write_bytes(draw(report))
    return report


def run(target: Target, tokenizer: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Run all epochs, and return the figures of each step and their medians."""
    tasks = problems(options.prompts, options.seed)
    prompts = [list(tokenizer.chat(task.text)) for task in tasks]
    longest = max(map(len, prompts))
    stores = RolloutStore(siblings=options.group - 1)
    drafter = options.drafter if options.drafter in METHODS else load_head(options.drafter, target)
    refresher = HeadRefresher(drafter, every=max(options.refresh, 1)) if isinstance(drafter, DraftHead) else None
    common = {"max_prompt_length": longest, "rescore": options.rescore}
    measures = False if options.estimated_costs else None
    samplers = {
        "drafted": RolloutSampler(drafter, store=stores, measure_costs=measures, **common),
        "plain": RolloutSampler("autoregressive", **common),
    }
    trained, frozen = split(target.params, options.layers)
    optimizer = optax.adam(options.learning_rate)
    state, steps = optimizer.init(trained), []
    for epoch, (number, (task, prompt)) in itertools.product(
        range(options.epochs), enumerate(zip(tasks, prompts, strict=True))
    ):
        policy = Target(target.model, merge(trained, frozen))
        seconds, samples = {}, {}
        for name in sorted(samplers, reverse=(epoch + number) % 2 == 1):
            sample = functools.partial(
                samplers[name].sample, policy, [prompt] * options.group, key=options.seed,
                max_new_tokens=options.max_new_tokens, temperature=options.temperature, eos=tokenizer.eos,
            )  # fmt: skip
            seconds[name], samples[name] = timed(sample)
        ours = samples["drafted"]
        rewards = [reward_of(tokenizer.decode(row.tolist()), task.answer) for row in ours.tokens]
        batch = arrays_of(prompt, ours, rewards, longest + options.max_new_tokens)
        gap = compare(samples["plain"], ours)
        (spent, _), (trained, state, trainer_gap) = timed(
            functools.partial(update, target.model, optimizer, trained, frozen, state, *batch, options.temperature)
        )
        if refresher is not None and options.refresh and refresher.add([prompt] * options.group, ours.tokens):
            update_head = functools.partial(refresher.update, Target(target.model, merge(trained, frozen)))
            (of_head, cpu_of_head), params = timed(update_head)
            samplers["drafted"].refresh(params)
            seconds["drafted"] = seconds["drafted"][0] + of_head, seconds["drafted"][1] + cpu_of_head
        cost, lengths = ours.report, [len(row) for row in ours.tokens]
        first = cost.acceptance[0] if cost.acceptance else 0.0
        steps.append(
            Step(
                epoch, seconds["plain"][0], seconds["drafted"][0], seconds["plain"][1], seconds["drafted"][1], spent,
                cost.tokens, cost.tokens_per_pass, first, float(np.mean(rewards)),
                float(np.mean(lengths)) / max(lengths), gap, float(trainer_gap),
            )
        )  # fmt: skip
        print(", ".join(f"{name} {value:.3g}" for name, value in steps[-1]._asdict().items()), flush=True)
    return summary(steps, options)


def summary(steps: list[Step], options: argparse.Namespace) -> dict[str, Any]:
    """Return medians over the epochs, without the first step, which compiles."""

    def of(steps: list[Step]) -> dict[str, float]:
        rollout = statistics.median(step.plain / step.drafted for step in steps)
        of_step = statistics.median((step.plain + step.update) / (step.drafted + step.update) for step in steps)
        cpu = statistics.median(step.plain_cpu / step.drafted_cpu for step in steps)
        mean = lambda name: statistics.mean(getattr(step, name) for step in steps)
        names = "tokens_per_pass", "acceptance", "reward", "mean_length", "plain", "drafted", "update"
        return {"rollout": rollout, "step": of_step, "rollout_cpu": cpu} | {name: mean(name) for name in names}

    warm = steps[1:]
    epochs = [of([step for step in warm if step.epoch == epoch]) for epoch in sorted({step.epoch for step in warm})]
    gaps = {"gap": max(step.gap for step in steps), "trainer_gap": max(step.trainer_gap for step in steps)}
    settings = {name: str(value) for name, value in vars(options).items()}
    report = {"all": of(warm), "epochs": epochs, **gaps, "settings": settings, "steps": [s._asdict() for s in steps]}
    for number, row in enumerate([*epochs, report["all"]]):
        label = "all" if number == len(epochs) else f"epoch {number}"
        print(f"{label}: " + ", ".join(f"{name} {value:.3f}" for name, value in row.items()))
    print(f"log-probabilities differ by at most {gaps['gap']:.1e} (limit {GAP})")
    print(f"sampler and trainer differ by at most {gaps['trainer_gap']:.1e}")
    return report


def draw(report: dict[str, Any]) -> bytes:
    """Draw acceptance, tokens per pass and the speed of the rollout over the run."""
    steps = report["steps"]
    figure = new_figure(7, 3)
    left, right = figure.subplots(1, 2)
    left.plot([step["tokens_per_pass"] for step in steps], label="tokens per pass")
    left.plot([step["acceptance"] for step in steps], label="acceptance of the first token")
    right.plot([None, *(step["plain"] / step["drafted"] for step in steps[1:])], label="rollout, times plain decoding")
    right.axhline(1, color="gray", linewidth=0.5)
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)
        hide_top_right_spines(axes)
    return to_png(figure)


if __name__ == "__main__":
    main()
