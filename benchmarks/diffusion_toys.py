"""Diffusion methods on small models that were trained for this comparison: training, and results of each method.

    python benchmarks/diffusion_toys.py train full --out tests/data/diffusion --run /tmp/full
    python benchmarks/diffusion_toys.py train block4 --steps 800 --start tests/data/diffusion/full.safetensors ...
    python benchmarks/diffusion_toys.py train words --rows 64 --out tests/data/diffusion --run /tmp/words
    python benchmarks/diffusion_toys.py measure --out docs/diffusion_results.md
    python benchmarks/diffusion_toys.py grid --out docs/diffusion_results.md

`train` teaches one model of 0.8 million parameters the tasks of `toy_tasks.parallel_bench` or of
`toy_tasks.word_problems`. Attention is full, or block-causal in blocks of 4. An interrupted run continues from its
folder.

`measure` decodes the same questions greedily with every diffusion method that takes the model, with its defaults and a
small grid. Per task it reports the share of right answers (Wilson's 95 % interval), the tokens per pass and the columns
per token. Finished cells are stored in a JSON file beside the document.

`grid` answers ParallelBench's operations on lists of 3 to 6 names with the exact distribution, at temperature 1 and
several degrees of parallelism. It reports the area under accuracy (AUP) of each family of methods.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections import defaultdict
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import numpy as np
from toy_tasks import parallel_bench as bench
from toy_tasks import parallel_bench_grid, word_problems

import specjax
from specjax.analysis import aup, global_ar_ness, local_ar_ness, wilson_interval
from specjax.catalog import of_kind
from specjax.diffusion import Denoised, Denoiser, Procedure
from specjax.diffusion.methods.learn2pd import Filter
from specjax.diffusion.prepare import prepare
from specjax.diffusion.procedures import procedure_of
from specjax.engine.prepare import Settings
from specjax.engine.run import run
from specjax.models import LlamaConfig
from specjax.training import TrainingText, recipe_of, train
from specjax.training.data.packing import pack
from specjax.training.methods import denoisers, learn2pd_filter


class Suite(NamedTuple):
    """Tasks that one model is taught."""

    bench: ModuleType  # its tasks, and the numbers of its tokens
    shares: dict[str, int]  # of the lessons
    measured: tuple[str, ...]
    length: int  # of a question and its answer

    @property
    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=self.bench.VOCABULARY, width=128, num_layers=4, num_heads=4, num_kv_heads=4, head_dim=32,
            mlp_width=384, tied=False, qk_norm=True, max_positions=256, name="toy",
        )  # fmt: skip

    def texts(self, count: int, seed: int, causal: bool) -> list[TrainingText]:
        """Questions and answers; of block-causal models to the end of the block."""
        rng = np.random.default_rng(seed)
        weights = np.array(list(self.shares.values()))
        texts = []
        for name in rng.choice(list(self.shares), count, p=weights / weights.sum()):
            item = self.bench.training_item(rng, name)
            answer = bench.pad_answer(item.answer, self.bench.END)
            answer = answer if causal else answer[: self.bench.TASKS_BY_NAME[name].columns]
            texts.append(TrainingText((*item.prompt, *answer), len(item.prompt)))
        return texts


LISTS = Suite(
    bench,
    # The square and the sums need more of them than the copies do.
    {"copy": 2, "reverse": 2, "sort": 3, "shuffle": 4, "replace": 4, "latin": 3, "sudoku": 3, "sum": 4},
    ("copy", "reverse", "sort", "shuffle", "replace", "latin", "sudoku"),  # of sums the models know too little
    20,
)
WORDS = Suite(word_problems, dict.fromkeys(word_problems.TASKS_BY_NAME, 1), tuple(word_problems.TASKS_BY_NAME), 36)
SUITES = {"full": LISTS, "block4": LISTS, "words": WORDS, "words_block4": WORDS}
"""By model."""


def teach(args: argparse.Namespace) -> None:
    suite, causal = SUITES[args.model], args.model.endswith("block4")
    block = bench.BLOCK if causal else None
    read = {"mask_token": suite.bench.MASK, "attention": "block_causal" if causal else "full", "block": block}
    pupil = denoisers.init_denoiser(suite.config, seed=args.seed, **read)
    if args.start:
        pupil = pupil.replace(params=denoisers.load_denoiser(args.start).params)
    recipe = recipe_of("masked_diffusion", learning_rate=args.learning_rate)
    lessons = suite.texts(args.steps * args.rows, args.seed + 1, causal)
    started = time.perf_counter()

    def on_progress(progress) -> None:
        if progress.step % 25 == 0 or progress.step == 1:
            print(f"{progress.step}/{progress.steps} loss {progress.loss:.3f} right {progress.accuracy[0]:.3f} "
                  f"{progress.seconds:.0f} s", flush=True)  # fmt: skip

    trained = train(
        None, pupil, lessons, recipe=recipe, rows=args.rows, length=suite.length, starts_per_row=1,
        evaluate_every=args.keep,
        seed=args.seed, folder=args.run, on_progress=on_progress,
    )  # fmt: skip
    Path(args.out).mkdir(parents=True, exist_ok=True)
    about = {name: str(getattr(args, name)) for name in ("model", "steps", "rows", "learning_rate", "seed")}
    about["seconds"] = f"{time.perf_counter() - started:.0f}"
    denoisers.save_denoiser(Path(args.out) / f"{args.model}.safetensors", trained, **about)


GRID: dict[str, list[dict[str, Any]]] = {
    "llada": [{"steps": 8}, {"steps": 2}, {"steps": 1}],
    "dream": [{"alg": "entropy"}, {"alg": "entropy", "steps": 4}],
    "sdar": [{"tau": 0.5}, {"tau": 0.99}, {"steps": 2, "remasking": "static"}],
    "fast_dllm": [
        {"tau": 0.5}, {"tau": 0.99}, *({"rule": "factor", "factor": factor} for factor in (0.5, 1.0, 2.0)),
    ],
    "fast_dllm_pp": [{"delta": 0.0}],
    "entropy_bound": [{"gamma": 0.1}, {"gamma": 1.0}],
    "dimple": [{"prefill": False}, {"gamma": 0.5}, {"steps": 64}, {"steps": 64, "prefill": False}],
    "local_leap": [{"near": 0.5}],
    "dparallel": [{"eta": 0.1}, {"eta": 1.0}],
    "llada21": [{"edit_tau": 2.0}],  # no edits
    "r2_dllm": [{"cluster": 0.6, "repeat": 0.6, "steady": 0.6}],
}  # fmt: skip
"""Beside the defaults of each method."""


def questions(suite: Suite, count: int) -> dict[str, list[bench.Item]]:
    rng = np.random.default_rng(2026)
    return {name: [task.draw(rng) for _ in range(count)] for name, task in suite.bench.TASKS_BY_NAME.items()}


def procedure(suite: Suite, name: str, denoiser: Denoiser, options: dict[str, Any]) -> Procedure:
    """Raises: UsageError where the method is of other models."""
    if name == "learn2pd":
        options = {**options, "filter": filter_of(suite, denoiser)}
    return procedure_of(name, denoiser, **options)


def filter_of(suite: Suite, denoiser: Denoiser, count: int = 32) -> Filter:
    """Fitted to the oracle's replay of texts that the model wrote to questions of its own, one column a pass."""
    rng = np.random.default_rng(7)
    items = [(name, suite.bench.training_item(rng, name)) for name in suite.measured for _ in range(count)]
    written = decoded(suite, denoiser, procedure_of("llada", denoiser), items, eos=None).to_lists()
    texts = [
        TrainingText((*item.prompt, *text), len(item.prompt)) for (_, item), text in zip(items, written, strict=True)
    ]
    (lesson,) = pack(texts, len(texts), suite.length, one_per_row=True)
    return learn2pd_filter.fit_filter(
        learn2pd_filter.replay(denoiser, lesson, denoiser.block or 8), jax.random.key(0), steps=3000
    )


def decoded(
    suite: Suite, denoiser: Denoiser, way: Procedure, items: list[tuple[str, bench.Item]], **settings: Any
) -> Denoised:
    """Greedily, all questions in one program; each row ends where an answer of its task does."""
    columns = np.array([suite.bench.TASKS_BY_NAME[task].columns for task, _ in items])
    prompts = [list(item.prompt) for _, item in items]
    job = prepare(denoiser, way, prompts, Settings(**settings), key=1, max_new_tokens=int(columns.max()))
    return run(dataclasses.replace(job, stop=job.lengths + columns))


def measured(
    suite: Suite, denoiser: Denoiser, name: str, options: dict[str, Any], items_by_task: dict[str, list[bench.Item]]
) -> dict:
    """Return the results by task. Raises: UsageError if the method does not apply to the model."""
    items = [(task, item) for task in suite.measured for item in items_by_task[task]]
    result = decoded(suite, denoiser, procedure(suite, name, denoiser, options), items, eos=suite.bench.END)
    texts, order = result.to_lists(), np.asarray(result.decided_at)
    results = {}
    for task in suite.measured:
        rows = np.array([row for row, (other, _) in enumerate(items) if other == task])
        orders = [order[row, : len(texts[row])].tolist() for row in rows]
        tokens, passes, columns, computed = (
            int(np.asarray(of_rows)[rows].sum())
            for of_rows in (result.lengths, result.stats.target_passes, result.columns, result.computed)
        )
        results[task] = {
            "right": sum(is_right(suite, task, items[row][1], texts[row]) for row in rows),
            "asked": len(rows),
            "tokens": tokens,
            "passes": passes,
            "columns": columns,
            "computed": computed,
            "local": float(np.nanmean([local_ar_ness(one) for one in orders])),
            "global": float(np.nanmean([global_ar_ness(one) for one in orders])),
        }
    return results


def is_right(suite: Suite, task: str, item: bench.Item, text: list[int]) -> bool:
    task_rules = suite.bench.TASKS_BY_NAME[task]
    return task_rules.is_right(item.prompt, bench.answer_of(tuple(text), suite.bench.END))


def measure(args: argparse.Namespace) -> None:
    results_file = Path(args.out).with_suffix(".json")
    cells = json.loads(results_file.read_text()) if results_file.exists() else {}
    items_by_task = {model: questions(SUITES[model], args.count) for model in args.models}
    readers = {model: denoisers.load_denoiser(Path(args.weights) / f"{model}.safetensors") for model in args.models}
    names = args.methods or list(of_kind("diffusion"))
    jobs = [(model, name, {}) for model in readers for name in names]  # defaults first
    jobs += [(model, name, options) for model in readers for name in names for options in GRID.get(name, [])]
    refused = set()
    for model, name, options in jobs:
        cell = f"{model} {name} {json.dumps(options)}"
        if cell in cells or (model, name) in refused:  # without its defaults a method is of other models
            continue
        started = time.perf_counter()
        try:
            by_task = measured(SUITES[model], readers[model], name, options, items_by_task[model])
        except specjax.UsageError as error:
            print(f"{cell}: {error}", flush=True)
            refused |= set() if options else {(model, name)}
            continue
        cells[cell] = {"model": model, "method": name, "options": options, "tasks": by_task}
        results_file.write_text(json.dumps(cells, indent=1) + "\n")
        print(cell, {t: f"{of(x)[0]:.0f}@{of(x)[1]:.2f}" for t, x in by_task.items()},
              f"{time.perf_counter() - started:.0f} s", flush=True)  # fmt: skip
    document(Path(args.out), list(cells.values()), args.count)


FAMILIES: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "by confidence, n, 3, 2 and 1 passes": ("llada", [{}, {"steps": 3}, {"steps": 2}, {"steps": 1}]),
    "by margin": ("llada", [{"by": "margin", "steps": steps} for steps in (3, 2)]),
    "by entropy": ("llada", [{"by": "entropy", "steps": steps} for steps in (3, 2)]),
    "from left to right": ("llada", [{"by": "left_to_right", "steps": steps} for steps in (3, 2)]),
    "at random": ("llada", [{"by": "random", "steps": steps} for steps in (3, 2)]),
    "threshold": ("fast_dllm", [{"tau": tau} for tau in (0.9, 0.5, 0.3)]),
    "factor": ("fast_dllm", [{"rule": "factor", "factor": factor} for factor in (0.5, 1.0, 2.0)]),
}
"""Degrees of parallelism, by what chooses columns."""


def grid(args: argparse.Namespace) -> None:
    """All tasks and sizes with all degrees of parallelism, into the document."""
    tasks = {(task, n): make(n) for task, make in parallel_bench_grid.GRID.items() for n in parallel_bench_grid.SIZES}
    rows = max(map(len, tasks.values()))
    columns = max(len(answers[0]) for answers in tasks.values())
    cells: dict[tuple[str, int], dict[tuple[str, int], tuple[float, float, float]]] = defaultdict(dict)
    for family, (method, settings) in FAMILIES.items():
        for degree, options in enumerate(settings):
            for question, answers in tasks.items():
                denoiser = parallel_bench_grid.exact(answers, rows, columns)
                way = procedure_of(method, denoiser, block=None, **options)
                prompts = [[bench.NOTHING]] * args.count
                job = prepare(denoiser, way, prompts, Settings(temperature=1.0), key=1, max_new_tokens=columns)
                result = run(dataclasses.replace(job, stop=job.lengths + len(answers[0])))
                right = np.mean([tuple(text) in set(answers) for text in result.to_lists()])
                tokens, passes = int(result.lengths.sum()), int(result.stats.target_passes.sum())
                cells[family, degree][question] = (
                    100 * float(right),
                    tokens / passes,
                    float(result.columns.sum()) / tokens,
                )
            print(family, options, {f"{t}{n}": f"{x[0]:.0f}@{x[1]:.2f}" for (t, n), x in cells[family, degree].items()},
                  flush=True)  # fmt: skip
    into(Path(args.out), "grid", grid_tables(cells, args.count))


def grid_tables(cells: dict, count: int) -> list[str]:
    names, sizes = list(parallel_bench_grid.GRID), parallel_bench_grid.SIZES
    lines = ["| names | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    at_once = cells["by confidence, n, 3, 2 and 1 passes", 3]
    for n in sizes:
        levels = [100 * parallel_bench_grid.together(parallel_bench_grid.GRID[name](n)) for name in names]
        cells_text = [f"{at_once[name, n][0]:.1f} ({level:.1f})" for name, level in zip(names, levels, strict=True)]
        lines.append(f"| {n}, all in one pass (expected for independent draws) | " + " | ".join(cells_text) + " |")
    largest = sizes[-1]
    for (family, degree), results in cells.items():
        options = ", ".join(f"{key} {x}" for key, x in FAMILIES[family][1][degree].items() if key not in ("by", "rule"))
        cells_text = [f"{y:.0f} @ {rho:.2f} @ {c:.1f}" for y, rho, c in (results[name, largest] for name in names)]
        lines.append(f"| {largest}, {family}{': ' * bool(options)}{options} | " + " | ".join(cells_text) + " |")
    one = cells["by confidence, n, 3, 2 and 1 passes", 0]
    for family in FAMILIES:
        method_cells = [results for (other, _), results in cells.items() if other == family]
        if one not in method_cells:  # all grids begin with one decided column per pass
            method_cells = [one, *method_cells]
        area = [np.mean([aup([results[name, n][1::-1] for results in method_cells]) for n in sizes]) for name in names]
        lines.append(f"| AUP, {family} | " + " | ".join(f"{x:.0f}" for x in area) + " |")
    low, high = wilson_interval(count // 2, count)
    return [
        *lines,
        "",
        f"Each cell has {count} texts. At 50 % right the 95 % interval is {100 * low:.0f} to {100 * high:.0f}.",
    ]


def into(file: Path, mark: str, lines: list[str]) -> None:
    """Write lines between two marks of the document. The text around the marks stays."""
    begin, end = f"<!-- {mark} -->\n", f"<!-- end of {mark} -->\n"
    head, tail = file.read_text().split(begin)
    file.write_text(head + begin + "\n".join(lines) + "\n" + end + tail.split(end)[1])


def of(x: dict) -> tuple[float, float, float]:
    """(percent right, tokens per pass, columns per token)."""
    return 100 * x["right"] / x["asked"], x["tokens"] / max(x["passes"], 1), x["columns"] / max(x["tokens"], 1)


def document(file: Path, cells: list[dict], count: int) -> None:
    """The tables between two marks of the document, whose words around them stay; and the pictures."""
    lines = []
    for model in dict.fromkeys(cell["model"] for cell in cells):
        method_cells = [cell for cell in cells if cell["model"] == model]
        lines += [f"### {model}", "", "The cells contain percent right @ tokens per pass @ columns per token.", ""]
        lines += [*table(method_cells), "", "The next table has the area under accuracy (AUP) over a method's grid, "
                  "and the AR-ness (local, global) of its defaults.", ""]  # fmt: skip
        lines += [*areas(method_cells), ""]
    ends = [wilson_interval(n, count) for n in (count, round(0.95 * count), round(0.5 * count))]
    first, second, third = (f"{100 * low:.0f} to {100 * high:.0f}" for low, high in ends)
    lines += [f"Each cell has {count} questions. The 95 % intervals (Wilson) at 100, 95 and 50 % right are {first}, "
              f"{second} and {third}."]  # fmt: skip
    if not file.exists():
        file.write_text("# Diffusion methods on small trained models\n\n<!-- tables -->\n<!-- end of tables -->\n")
    into(file, "tables", lines)
    for model in dict.fromkeys(cell["model"] for cell in cells):
        draw(file.with_name(f"{file.stem}_{model}.svg"), [cell for cell in cells if cell["model"] == model])


def words(cell: dict) -> str:
    options = ", ".join(f"{key} {value}" for key, value in cell["options"].items())
    return f"`{cell['method']}`" + (f" {options}" if options else "")


def table(cells: list[dict]) -> list[str]:
    tasks = list(cells[0]["tasks"])
    lines = [f"| method | {' | '.join(tasks)} |", "|---" * (len(tasks) + 1) + "|"]
    for cell in cells:
        cells_text = [of(cell["tasks"][task]) for task in tasks]
        lines.append(
            f"| {words(cell)} | " + " | ".join(f"{y:.1f} @ {rho:.2f} @ {c:.1f}" for y, rho, c in cells_text) + " |"
        )
    return lines


def areas(cells: list[dict]) -> list[str]:
    tasks = list(cells[0]["tasks"])
    lines = [f"| method | {' | '.join(tasks)} | local | global |", "|---" * (len(tasks) + 3) + "|"]
    by_method = defaultdict(list)
    for cell in cells:
        by_method[cell["method"]].append(cell)
    one = next((cell for cell in cells if cell["method"] == "llada" and not cell["options"]), None)
    for name, method_cells in by_method.items():
        has_start = one is None or one in method_cells
        grid = method_cells if has_start else [one, *method_cells]  # all grids begin with one decided column per pass
        area = [aup([(of(cell["tasks"][t])[1], of(cell["tasks"][t])[0]) for cell in grid]) for t in tasks]
        ness = [np.mean([method_cells[0]["tasks"][t][kind] for t in tasks]) for kind in ("local", "global")]
        lines.append(f"| `{name}` | " + " | ".join(f"{x:.0f}" for x in area) + f" | {ness[0]:.2f} | {ness[1]:.2f} |")
    return lines


def draw(file: Path, cells: list[dict]) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "specjax"
    import matplotlib.pyplot as plt

    shown = [task for task in cells[0]["tasks"] if task != "copy"]  # as reverse
    figure, axes = plt.subplots(2, -(-len(shown) // 2), figsize=(11, 6.5), layout="constrained")
    names = list(dict.fromkeys(cell["method"] for cell in cells))
    for task, axis in zip(shown, axes.flat, strict=True):
        for i, name in enumerate(names):
            points = [of(cell["tasks"][task]) for cell in cells if cell["method"] == name]
            rates, right = [p[1] for p in points], [p[0] for p in points]
            low, high = np.array([wilson_interval(c["tasks"][task]["right"], c["tasks"][task]["asked"])
                                  for c in cells if c["method"] == name]).T  # fmt: skip
            bars = np.abs([np.array(right) - 100 * low, 100 * high - np.array(right)])
            axis.errorbar(rates, right, bars, fmt="osD^vP*Xh<>dp8s"[i % 15], color=f"C{i % 10}", ms=5, lw=0.6,
                          alpha=0.75, label=name)  # fmt: skip
        axis.set(title=task, xlabel="tokens per pass", ylabel="% right", ylim=(-5, 107))
        axis.grid(alpha=0.3)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, fontsize=8)
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    learn = commands.add_parser("train")
    learn.add_argument("model", choices=list(SUITES))
    learn.add_argument("--steps", type=int, default=1500)
    learn.add_argument("--rows", type=int, default=128)
    learn.add_argument("--learning-rate", type=float, default=2e-3)
    learn.add_argument("--start", help="weights to begin with")
    learn.add_argument("--seed", type=int, default=0)
    learn.add_argument("--keep", type=int, default=100, help="steps between checkpoints")
    learn.add_argument("--run", help="the folder of checkpoints")
    learn.add_argument("--out", default="tests/data/diffusion")
    learn.set_defaults(do=teach)
    weigh = commands.add_parser("measure")
    weigh.add_argument("--models", nargs="+", default=list(SUITES))
    weigh.add_argument("--methods", nargs="+", help="default: all")
    weigh.add_argument("--weights", default="tests/data/diffusion")
    weigh.add_argument("--count", type=int, default=48, help="questions of each task")
    weigh.add_argument("--out", default="docs/diffusion_results.md")
    weigh.set_defaults(do=measure)
    exactly = commands.add_parser("grid")
    exactly.add_argument("--count", type=int, default=200, help="texts of each cell")
    exactly.add_argument("--out", default="docs/diffusion_results.md")
    exactly.set_defaults(do=grid)
    args = parser.parse_args()
    args.do(args)


if __name__ == "__main__":
    main()
