"""Which tree to draft on which chip: the compiler's cost of a verify pass against what its nodes are worth.

Chen et al.: Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding (2024), arXiv 2402.12374: of all sizes
n and depths d, choose those that minimise (d * t_draft + t_target(n)) / T(n, d), seconds per token. T(n, d) is the
value of the best tree (`specjax.trees.sequoia`) for the acceptance measured; t_target(n) and t_draft come from compiled
programs, by the schedule and by the roofline (see `cost`), not from a chip.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specjax.errors import UsageError
from specjax.planning import compiler, cost
from specjax.planning.report import ProgramReport
from specjax.trees import sequoia
from specjax.trees.best_shapes import Paths

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
SIDES = ("schedule", "roofline")


@dataclass(frozen=True)
class Choice:
    """The best tree by one side's seconds."""

    side: str  # of SIDES
    num_nodes: int  # root included; 1: do not draft
    depth: int
    tokens: float  # per target pass
    seconds_per_token: float
    speedup: float  # over plain decoding
    paths: tuple[tuple[int, ...], ...]  # rank paths, for trees.static
    spec: str | None  # the best tree of the form AxBxC, for --tree; None: do not draft
    spec_speedup: float


@dataclass(frozen=True)
class Plan:
    """The cost curve and the choices."""

    inputs: dict[str, Any]
    versions: dict[str, str]
    acceptance: tuple[float, ...]  # by rank
    acceptance_source: str
    widths: tuple[ProgramReport, ...]  # a verify pass over 1, 2, 4, ... nodes
    draft: ProgramReport | None  # one pass of the draft model
    choices: tuple[Choice, ...]

    def to_json(self) -> dict:
        """Plain dicts and lists."""
        return dataclasses.asdict(self)


def plan(
    target: str | Any,
    topology: str,
    *,
    acceptance: str | Path | Sequence[float],
    widths: Sequence[int] = WIDTHS,
    cache: bool = True,
    on_step: compiler.Notify | None = None,
    **options: Any,
) -> Plan:
    """Propose the tree for a pair of models, a chip and a measured acceptance.

    Args:
      acceptance: chances by rank, ".6,.2,.1" or numbers: that the r-th child of an accepted node is the accepted one;
        or a JSON file that `specjax compare-verifiers` or `specjax bench` wrote.
      widths: numbers of nodes to compile a verify pass for; between them costs are interpolated.
      cache, on_step, options: of `compile_report`, without method, tree and num_draft_tokens. Without a draft model
        drafting costs nothing, as for prompt lookup.

    Raises: UsageError for bad options, a missing compiler, or a plain step that does not compile.
    """
    curve, source = read_acceptance(acceptance)
    sizes = sorted({1, *widths})
    if len(sizes) < 2 or sizes[0] < 1 or sizes[-1] > 512:
        raise UsageError(f"--widths must be numbers from 1 to 512, at least one above 1, not {list(widths)}")
    notify = on_step or (lambda name: None)
    draft = options.pop("draft", None)
    pair = compiler.make_job(target, topology, draft=draft, **options)
    job = dataclasses.replace(pair, method="autoregressive", draft=None)
    reports = []
    for n in sizes:
        found = compiler.compile_programs(job, cache, notify, only=("step",), rename={"step": f"verify {n}"}, nodes=n)
        reports += found
    draft_report = None
    if pair.draft is not None:
        alone = dataclasses.replace(job, target=pair.draft)
        (draft_report,) = compiler.compile_programs(
            alone, cache, notify, only=("step",), rename={"step": "draft"}, nodes=1
        )
        _require(draft_report)
    _require(reports[0])
    good = [(n, r) for n, r in zip(sizes, reports, strict=True) if r.compiles]
    choices = []
    for side in SIDES:
        curve_of_cost = [(n, r.seconds[side]) for n, r in good]
        choices.append(choose(curve, curve_of_cost, draft_report.seconds[side] if draft_report else 0.0, side))
    inputs = compiler.describe(job) | {"draft": pair.draft.name if pair.draft else None}
    return Plan(inputs, compiler.versions(), tuple(curve), source, tuple(reports), draft_report, tuple(choices))


def _require(report: ProgramReport) -> None:
    if not report.compiles:
        raise UsageError(f"--topology: {report.name} does not compile: {report.reason}; see specjax compile")


def choose(acceptance: Sequence[float], target: Sequence[tuple[int, float]], draft: float, side: str = "") -> Choice:
    """The tree with the fewest seconds per token.

    Args:
      acceptance: by rank. target: (nodes, seconds of a verify pass), rising, the first for one node.
      draft: seconds of one pass of the draft model, which drafts one level.
    """
    sizes, seconds = [n for n, _ in target], [s for _, s in target]
    plain = seconds[0]
    cost_of = lambda nodes, depth: depth * draft + float(np.interp(nodes, sizes, seconds))
    best: tuple[float, int, float, Paths] = (plain, 1, 1.0, ())
    for n in sizes[1:]:
        for depth in range(1, n) if draft else [n - 1]:
            most = sum(sum(acceptance) ** j for j in range(depth + 1))  # every level full
            if cost_of(n, depth) / most >= best[0]:
                continue
            tokens, paths = sequoia(acceptance, n, depth)
            if not np.isfinite(tokens):
                continue  # no tree of this size is so shallow with so few ranks
            per_token = cost_of(n, depth) / tokens
            if per_token < best[0] * (1 - 1e-9):
                best = per_token, n, tokens, paths
    spec, spec_seconds = _best_spec(acceptance, sizes[-1], cost_of)
    per_token, n, tokens, paths = best
    drafts, deepest = n > 1, max(map(len, paths), default=0)
    return Choice(
        side, n, deepest, float(tokens), per_token, plain / per_token, tuple(paths),
        spec if drafts else None, plain / spec_seconds if drafts else 1.0,
    )  # fmt: skip


def _best_spec(acceptance: Sequence[float], most: int, cost_of) -> tuple[str, float]:
    """The best of the trees AxBxC with at most `most` nodes, and its seconds per token."""
    best = ("1", cost_of(2, 1) / cost.expected_tokens(((0,),), acceptance))
    levels: list[tuple[int, ...]] = [()]
    while levels:
        following = []
        for widths, width in itertools.product(levels, range(1, len(acceptance) + 1)):
            if widths and width > widths[-1]:
                continue  # a deeper node is worth less: no reason to branch more below it
            shape = (*widths, width)
            nodes = 1 + sum(int(np.prod(shape[: i + 1])) for i in range(len(shape)))
            if nodes > most:
                continue
            following.append(shape)
            mass = [sum(acceptance[:w]) for w in shape]  # a level's children share the chance of one accepted node
            tokens = 1 + sum(float(np.prod(mass[: i + 1])) for i in range(len(shape)))
            seconds = cost_of(nodes, len(shape)) / tokens
            if seconds < best[1]:
                best = "x".join(map(str, shape)), seconds
        levels = following
    return best


# --- acceptance -------------------------------------------------------------------------------------------------------


def read_acceptance(source: str | Path | Sequence[float]) -> tuple[list[float], str]:
    """(chances by rank, where they are from). Raises: UsageError for what is neither numbers nor a known file."""
    if isinstance(source, str | Path):
        path = Path(source).expanduser()
        if path.suffix == ".json" or path.is_file():
            return _from_file(path)
        try:
            numbers = [float(part) for part in str(source).split(",")]
        except ValueError:
            raise UsageError(
                f'--acceptance must be numbers joined by commas, such as .6,.2,.1, or a JSON file, not "{source}"'
            ) from None
        source = numbers
    curve = [float(x) for x in source]
    if not curve or min(curve) < 0 or sum(curve) > 1 + 1e-9 or not np.isfinite(curve).all():
        raise UsageError(f"--acceptance must be chances of at least 0 that sum to at most 1, not {curve}")
    return curve, "given"


def _from_file(path: Path) -> tuple[list[float], str]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--acceptance: {path} cannot be read as JSON ({error})") from None
    if not isinstance(document, dict) or not {"rules", "overall"} & set(document):
        raise UsageError(
            f"--acceptance: {path} was not written by specjax compare-verifiers or specjax bench: no rules, no overall"
        )
    curve, what = _from_rules(document["rules"]) if "rules" in document else _from_bench(document["overall"])
    if not curve:
        raise UsageError(f"--acceptance: {path} holds no acceptance of a drafter; give numbers such as .6,.2,.1")
    return read_acceptance(curve)[0], f"{path.name}: {what}"


def _from_rules(rules: list[dict]) -> tuple[list[float], str]:
    """compare-verifiers: how much each further draft adds to the chance that one of them is accepted."""
    by_rule = {name: {e["n"]: e["acceptance"] for e in rules if e.get("rule") == name} for name in
               ("standard", "recursive_rejection", "specinfer")}  # fmt: skip
    name = next((name for name in ("recursive_rejection", "specinfer") if by_rule[name]), "standard")
    total = by_rule["standard"] | by_rule[name]
    curve, before, seen = [], 0.0, 0
    for n in sorted(total):
        step = max(total[n] - before, 0.0) / (n - seen)  # where sizes were left out, the same for each
        curve += [step] * (n - seen)
        before, seen = max(total[n], before), n
    return sorted(curve, reverse=True), name


def _from_bench(overall: dict[str, dict]) -> tuple[list[float], str]:
    """bench: the mean over depths of the first method that drafted. Runners-up were not measured: a chain."""
    for name, record in overall.items():
        depths = [a for a in record.get("acceptance_by_depth") or [] if a is not None]
        if depths:
            return [sum(depths) / len(depths)], f"{name}, rank 1 only"
    return [], ""


def show(found: Plan, out) -> None:
    """The curve and the proposal on a rich console."""
    from rich import box
    from rich.table import Table

    from specjax.planning.report import dtypes, mesh_of, milliseconds

    say = lambda text, **style: out.print(text, highlight=False, markup=False, soft_wrap=True, **style)
    inputs = found.inputs
    models = inputs["target"] + (f", draft {inputs['draft']}" if inputs["draft"] else "")
    say(
        f"{models}; batch {inputs['batch']}, {inputs['context']} cached tokens, {dtypes(inputs)}; "
        f"{inputs['topology']}, {mesh_of(inputs)}"
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("program", no_wrap=True)
    for heading in ("roofline ms", "schedule ms", "of plain", "GFLOP", "moved MB"):
        table.add_column(heading, justify="right")
    plain = found.widths[0].seconds["schedule"]
    for report in (*found.widths, *([found.draft] if found.draft else [])):
        if not report.compiles:
            table.add_row(report.name, report.reason, style="yellow")
            continue
        s = report.seconds
        table.add_row(
            report.name, milliseconds(s["roofline"]), milliseconds(s["schedule"]), f"{s['schedule'] / plain:.2f}",
            f"{report.flops / 1e9:.4g}", f"{report.moved_bytes / 1e6:.0f}",
        )  # fmt: skip
    out.print(table)
    say(f"acceptance by rank {', '.join(f'{a:.3g}' for a in found.acceptance)} ({found.acceptance_source})")
    for choice in found.choices:
        if choice.spec is None:
            say(f"by the {choice.side}: do not draft; no tree is faster than plain decoding")
            continue
        say(
            f"by the {choice.side}: {choice.num_nodes} nodes, {choice.depth} deep, {choice.tokens:.2f} tokens per "
            f"pass, {choice.speedup:.2f} times plain decoding; of the form AxBxC --tree {choice.spec} "
            f"({choice.spec_speedup:.2f} times)"
        )
    say("estimates, not measurements: docs of specjax.planning.cost say what each is good for", style="dim")
