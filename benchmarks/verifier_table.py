"""Tokens per pass and speed of acceptance rules and trees at equal node budgets, on real models.

    python benchmarks/verifier_table.py question.jsonl --target TARGET --draft DRAFT --temperature 0 0.6 1
    python benchmarks/verifier_table.py question.jsonl --target TARGET --token-recycling --temperature 0 0.6 1
    python benchmarks/verifier_table.py ... --time        # afterwards, on a machine that does nothing else
    python benchmarks/verifier_table.py ... --time whole --budget 16

Each cell decodes the same prompts for a few passes and says how many tokens one pass adds, the bonus token included,
expected over the rule's draws (`specjax.analysis.expected_tokens`): the first rule of a tree decides where the next one
is drafted, and all rules of that tree judge the same drafts. With the standard error over prompts, and the difference
from the tree's first rule on the same drafts. A budget counts drafted nodes. A drafter that learns from the text needs
more than the default of four passes: `--passes 64`.

`--time` adds tokens per second at batch 1, the tokens per pass over the time of a step, beside plain decoding timed in
the same run. That time is the sum of the draft, the target's pass over so many tokens and the rule, each the median of
its own runs: of 200 cells many share a part, and a whole step takes a minute to compile. `--time whole` times whole
steps, to hold that against. Results are kept in a JSON file, so that a run may be stopped and taken up again; at the
end Markdown tables are printed, one per temperature, and a plot goes beside the JSON.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import itertools
import json
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp

import specjax
from specjax import analysis, trees, verifiers
from specjax.drafters import autoregressive, token_recycling, two_model
from specjax.engine.prefill import prefill
from specjax.types import Context, Output, Sampling, TokenTree, Verdict

WIDE = {8: "2x1x1x1", 16: "2x2x1x1", 32: "4x2x1x1", 64: "4x2x2x1x1"}  # branching specs of at most as many nodes


def two_model_cells(n: int, greedy: bool):
    """(tree, rules) at a budget of `n` drafted nodes."""
    half = n // 2
    chain, beam, wide = "x".join("1" * min(n, 8)), f"beam:2x{half}", WIDE[n]
    top, dyspec, eagle2 = f"top:{wide}", f"dyspec:{n}", f"eagle2:4x{max(2, half // 2)}x{n}"
    if greedy:  # one token is right at every node: every exact rule accepts the same path
        for tree in (chain, beam, wide, top, dyspec, eagle2):
            yield tree, [verifiers.greedy]
        return
    yield chain, [verifiers.standard, verifiers.block]
    yield f"paths:2x{half}", [verifiers.specinfer, verifiers.spectr, verifiers.multipath_block(2), verifiers.traversal]
    for tree in (beam, wide, dyspec):
        yield tree, [verifiers.recursive_rejection, verifiers.traversal]
    yield f"mixed:{wide}", [verifiers.greedy_multi_draft]
    for tree in (top, eagle2):
        yield tree, [verifiers.sample_and_match]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts")
    parser.add_argument("--target", required=True)
    drafter = parser.add_mutually_exclusive_group(required=True)
    drafter.add_argument("--draft")
    drafter.add_argument("--token-recycling", action="store_true")
    parser.add_argument("--budget", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--temperature", type=float, nargs="+", default=[1.0])
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--passes", type=int, default=4, help="per prompt")
    parser.add_argument("--draws", type=int, default=8, help="verdicts per tree")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--draft-dtype", default="float32")
    parser.add_argument("--time", nargs="?", const="parts", choices=["parts", "whole"])
    parser.add_argument("--steps", type=int, default=8, help="timed runs of each part")
    parser.add_argument("--out", default="verifier_table.json")
    args = parser.parse_args()

    # Stacked layers compile in seconds; timing wants the layout that the command line uses, and stacked bfloat16 is
    # slow on CPU (SmolLM2, 17 tokens: 284 ms against 44 ms apart and 92 ms for stacked float32).
    layout = lambda dtype: {"dtype": dtype, "stacked": dtype == "float32" and not args.time}
    target, tokenizer = specjax.load(args.target, **layout(args.dtype))
    draft = specjax.load(args.draft, **layout(args.draft_dtype))[0] if args.draft else None
    prompts = [tokenizer.chat(text) for text in read_prompts(args.prompts, args.limit)]
    cells_by_name = {}
    if os.path.exists(args.out):
        with open(args.out) as file:
            cells_by_name = {name(cell): cell for cell in json.load(file)}

    def record(cell: dict) -> None:
        cells_by_name[name(cell)] = cells_by_name.get(name(cell), {}) | cell
        with open(args.out, "w") as file:
            json.dump(list(cells_by_name.values()), file, indent=1)

    def drafter_of(tree: str, n: int):
        if draft is None:
            return token_recycling(target.model.vocab_size, num_nodes=n)
        return two_model(draft, tree=trees.parse(tree))

    def measure(cell: dict, drafter, rules, temperature: float) -> None:
        counts = analysis.expected_tokens(
            rules, target, drafter, prompts, key=jax.random.key(0), temperature=temperature, passes=args.passes,
            draws=args.draws,
        )  # fmt: skip
        for rule in rules:
            rows = counts[rule.name].mean(1)  # per prompt
            about = {"rule": rule.name, "first": rules[0].name, "nodes": drafter.num_nodes - 1, "mean": rows.mean()}
            record(cell | about | {"standard_error": standard_error(rows.tolist()), "rows": rows.tolist()})

    clocks = Clocks(target, prompts[0], args.steps)

    def clock(cell: dict, drafter, rules, temperature: float) -> None:
        times = clocks.whole if args.time == "whole" else clocks.parts
        for rule, parts in zip(rules, times(drafter, rules, temperature), strict=True):
            record(cell | {"rule": rule.name, **parts})

    wanted, run = {None: ("rows", measure), "parts": ("step_ms", clock), "whole": ("whole_ms", clock)}[args.time]
    for temperature in args.temperature:
        if args.time:
            rule = verifiers.sample_and_match if temperature else verifiers.greedy
            clock({"temperature": temperature, "budget": 0, "tree": "1"}, autoregressive(), [rule], temperature)
        for n in args.budget:
            if draft is None:
                cells = [(f"recycling:{n}", [verifiers.sample_and_match if temperature else verifiers.greedy])]
            else:
                cells = list(two_model_cells(n, temperature == 0))
            for tree, rules in cells:
                cell = {"temperature": temperature, "budget": n, "tree": tree}
                places = [name(cell | {"rule": rule.name}) for rule in rules]
                start = time.perf_counter()
                if not all(wanted in cells_by_name.get(place, {}) for place in places):
                    run(cell, drafter_of(tree, n), rules, temperature)
                summary = {place[-1]: round(cells_by_name[place].get("mean", 0), 3) for place in places}
                print(f"{temperature:g} {n} {tree} {summary} {time.perf_counter() - start:.0f} s", flush=True)
    print(markdown(list(cells_by_name.values())))
    plot([cell for cell in cells_by_name.values() if "rows" in cell], Path(args.out).with_suffix(".png"))


def read_prompts(path: str, limit: int) -> list[str]:
    """`limit` prompts from all over a JSONL file with "turns" or, as HumanEval has, "prompt"."""
    opener = gzip.open if path.endswith(".gz") else open
    with opener(path, "rt") as lines:
        entries = [json.loads(line) for line in lines]
    entries = entries[:: max(1, len(entries) // limit)][:limit]
    return [
        entry["turns"][0] if "turns" in entry else f"Complete this Python function.\n```python\n{entry['prompt']}```"
        for entry in entries
    ]


def standard_error(rows: list[float]) -> float:
    return statistics.stdev(rows) / len(rows) ** 0.5 if len(rows) > 1 else 0.0


def name(cell: dict) -> tuple:
    return cell["budget"], cell["temperature"], cell["tree"], cell["rule"]


class Clocks:
    """Milliseconds of a step at batch 1 after `prompt`: medians of `steps` runs, after one that compiles."""

    def __init__(self, target, prompt: list[int], steps: int):
        self.target, self.prompt, self.steps = target, prompt, steps
        self.pass_ms = functools.cache(self._pass_ms)

    def parts(self, drafter, rules, temperature: float) -> Iterator[dict[str, float]]:
        vocab_size = self.target.model.vocab_size
        draft_ms, tree = self._draft(drafter, bool(temperature))
        pass_ms = self.pass_ms(drafter.num_nodes)
        keys = jax.random.split(jax.random.key(1), tree.tokens.shape)
        logits = 3 * jax.random.normal(jax.random.key(2), (*tree.tokens.shape, vocab_size))
        for rule in rules:
            verify_ms = self._median(lambda rule=rule: verify(rule, keys, tree, logits))
            parts = {"draft_ms": draft_ms, "pass_ms": pass_ms, "verify_ms": verify_ms}
            yield parts | {"step_ms": sum(parts.values())}

    def whole(self, drafter, rules, temperature: float) -> Iterator[dict[str, float]]:
        for rule in rules:
            stream = specjax.stream(
                self.target, drafter, [self.prompt], key=jax.random.key(0), max_new_tokens=16 * (self.steps + 3),
                temperature=temperature, verifier=rule if temperature else None,
            )  # fmt: skip
            times, last = [], time.perf_counter()
            for _ in itertools.islice(stream, self.steps + 3):
                moment = time.perf_counter()
                times.append(moment - last)
                last = moment
            stream.close()
            yield {"whole_ms": 1000 * statistics.median(times[3:])}

    def _draft(self, drafter, sampled: bool) -> tuple[float, TokenTree]:
        """A round's `propose` and `update`, and its tree; the temperature is an argument of the program."""
        length = len(self.prompt)
        tokens = jnp.zeros((1, length + 256 + drafter.num_nodes), jnp.int32).at[0, :length].set(jnp.array(self.prompt))
        context = Context(tokens, jnp.array([length]), Sampling(jnp.float32(1.0)) if sampled else Sampling())
        keys = jax.random.split(jax.random.key(0), 1)
        logits = jnp.zeros((1, drafter.num_nodes, self.target.model.vocab_size))
        arguments = drafter, keys, draft_start(drafter, context), context, logits
        return self._median(lambda: draft_round(*arguments)), draft_round(*arguments)[0]

    def _pass_ms(self, width: int) -> float:
        length = len(self.prompt)
        tokens = jnp.zeros((1, length + 256), jnp.int32)
        caches = [filled(self.target, tokens, jnp.array([length]))]  # donated, so that it is not copied

        def run():
            caches[0], token = target_pass(self.target, caches[0], jnp.zeros((1, width), jnp.int32), length)
            return token

        return self._median(run)

    def _median(self, run) -> float:
        times = []
        for _ in range(self.steps + 1):
            start = time.perf_counter()
            jax.block_until_ready(run())
            times.append(time.perf_counter() - start)
        return 1000 * statistics.median(times[1:])


@jax.jit
def draft_start(drafter, context):
    return drafter.init(drafter.params, context)


@jax.jit
def draft_round(drafter, keys, state, context, logits):
    """A tree, and the memory after a round that accepted nothing."""
    limit = jnp.full_like(context.length, drafter.max_depth)
    tree, state = drafter.propose(drafter.params, keys, state, context, limit)
    verdict = Verdict(jnp.zeros_like(tree.parents), jnp.ones_like(limit), jnp.zeros_like(limit))
    output = Output(logits, logits[..., :1])
    summary = drafter.observe(drafter.params, state, context, tree, verdict, output)
    return tree, drafter.update(drafter.params, state, summary, verdict)


@jax.jit
def filled(target, tokens, count):
    """The cache of the first `count` int32[1] of tokens int32[1, S]."""
    model, params = target.model, target.params
    return prefill(model, params, model.init_cache(params, None, *tokens.shape), tokens, count)


@jax.jit
def verify(rule, keys, tree, logits):
    return rule(keys, tree, logits)


@functools.partial(jax.jit, donate_argnames="cache")
def target_pass(target, cache, tokens, length: int):
    """A pass over a tree's tokens, and the cache with the first of them, as if no more had been before."""
    width = tokens.shape[1]
    positions, mask = length + jnp.arange(width)[None], jnp.tril(jnp.ones((1, width, width), bool))
    output, pending = target.model.forward(target.params, tokens, cache, positions=positions, mask=mask)
    cache = target.model.commit(cache, pending, jnp.arange(width)[None], jnp.ones((1,), jnp.int32))
    return target.model.rewind(cache, jnp.full((1,), length)), jnp.argmax(output.logits, -1)


def families(cells: list[dict], temperature: float) -> dict[tuple[str, str], dict[int, dict]]:
    """The cells of one kind of tree and one rule, by budget. Rules of a tree stand together, its first one first."""
    cells_by_name: dict[tuple[str, str], dict[int, dict]] = {}
    for cell in cells:
        if "rows" in cell and cell["temperature"] == temperature:
            kind, _, size = cell["tree"].rpartition(":")
            kind = kind or ("chain" if set(size) <= set("1x") else "branching")
            cells_by_name.setdefault((kind, cell["rule"]), {})[cell["budget"]] = cell
    return cells_by_name


def markdown(cells: list[dict]) -> str:
    """Per temperature a table of tokens per pass and, where a step was timed, the speed over plain decoding."""
    plain = {cell["temperature"]: cell["step_ms"] for cell in cells if cell["budget"] == 0}
    by_name = {name(cell): cell for cell in cells}
    budgets = sorted({cell["budget"] for cell in cells} - {0})
    lines = []
    for temperature in sorted({cell["temperature"] for cell in cells}):
        lines += [
            f"\nTemperature {temperature:g}\n",
            f"| tree | rule | {' | '.join(map(str, budgets))} | over the first |",
            "| --- " * (len(budgets) + 3) + "|",
        ]
        for (kind, rule), row in families(cells, temperature).items():
            columns, difference = [], ""
            for budget in budgets:
                cell = row.get(budget, {})
                column = f"{cell['mean']:.2f}" if cell else ""
                if "step_ms" in cell:
                    column += f" ({cell['mean'] * plain[temperature] / cell['step_ms']:.2f} x)"
                columns.append(column)
                if cell and rule != cell["first"]:
                    first = by_name[name(cell | {"rule": cell["first"]})]["rows"]
                    gap = [a - b for a, b in zip(cell["rows"], first, strict=True)]
                    difference = f"{statistics.mean(gap):+.2f} ± {standard_error(gap):.2f}"
            lines.append(f"| {kind} | `{rule}` | {' | '.join(columns)} | {difference} |")
    return "\n".join(lines)


def plot(cells: list[dict], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    temperatures = sorted({cell["temperature"] for cell in cells})
    figure, panels = plt.subplots(
        1, len(temperatures), figsize=(5 * len(temperatures), 4.5), layout="constrained", sharey=True, squeeze=False
    )
    kinds: dict[str, str] = {}  # one colour per kind of tree; rules by their lines
    for axes, temperature in zip(panels[0], temperatures, strict=True):
        for (kind, rule), row in families(cells, temperature).items():
            color = kinds.setdefault(kind, f"C{len(kinds)}")
            first = next(iter(row.values()))["first"]
            style = {"linestyle": "-" if rule == first else {"traversal": "--"}.get(rule, ":"), "marker": "o"}
            budgets = sorted(row)
            axes.plot(budgets, [row[n]["mean"] for n in budgets], color=color, label=f"{kind}, {rule}", **style)
        axes.set_xscale("log", base=2)
        axes.set(title=f"temperature {temperature:g}", xlabel="drafted nodes", xticks=[8, 16, 32, 64])
        axes.xaxis.set_major_formatter("{x:g}")
        axes.legend(fontsize=7, frameon=False)
    panels[0][0].set_ylabel("tokens per pass")
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main()
