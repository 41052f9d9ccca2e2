"""Every method on real weights: is the text that of plain decoding, and how many tokens does a pass add, per task?

    python benchmarks/every_method.py question.jsonl --limit 11 --max-new-tokens 128 --transformers
    python benchmarks/every_method.py question.jsonl --plot docs/every_method.png  # of what has been run

Greedy, SmolLM2-135M-Instruct in float32 unless --target and --draft name others; `--limit` prompts per task, taken
evenly from a Spec-Bench file; at most `--budget` drafted nodes per pass for every method. SmolLM2 has no smaller
sibling: its draft model is its own first 8 of 30 layers. The datastore of `rest` holds the prompts of the file that are
not decoded.

Where texts differ, the gap between the two best logits is given: below 1e-3 it is a near-tie that the width of the pass
decides; with `--same-bits`, in bfloat16, there is no such thing. Methods that are in the file --out already are not run
again. Exit code 1 if a text differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import specjax
from specjax import drafters, trees
from specjax.bench.near_ties import next_logits
from specjax.cli.options import prompts as prompt_files
from specjax.models import make_model
from specjax.retrieval import datastore

BATCH = 8
MODELS_OF_THEIR_OWN = {"fill", "denoiser", "head"}
"""What a method may need that SmolLM2 has not."""


def make(name: str, target: specjax.Target, draft: specjax.Target, store, nodes: int) -> specjax.Drafter:
    """A method that drafts at most `nodes` nodes per pass."""
    half, third = nodes // 2, nodes // 3
    tree = trees.parse(f"eagle2:4x{half + 1}x{nodes}")
    options: dict[str, Any] = {
        "auto": {"widths": (1, half + 1, nodes + 1)},
        "choice": {"num_nodes": nodes, "depths": (half, nodes)},
        "rasd": {"tree": f"top:{half}x1", "retrieval": drafters.suffix(nodes - 2 * half)},
        "superposed": {"num_tokens": third, "drafts": 3},
        "lookahead": {"ngram": 3, "window": (half + 2) // 2, "guesses": (half + 1) // 2},
        "jacobi": {"window": nodes},
        **{key: {"tree": tree} for key in ("two_model", "easyspec", "rapid", "early_exit")},
        **{key: {"num_nodes": nodes} for key in ("token_recycling", "aded", "stand", "rest")},
        **{key: {"num_tokens": nodes} for key in ("prompt_lookup", "suffix", "input_guided", "swift", "dynamic_exit")},
    }.get(name, {})
    if name == "hierarchical":
        drafter = drafters.hierarchical(draft, drafters.prompt_lookup(half), min_tokens=nodes - half)
    else:
        drafter = specjax.make_drafter(
            name, target, draft, datastore=store if "datastore" in specjax.METHODS[name].needs else None, **options
        )
    assert drafter.num_nodes <= nodes + 1, (name, drafter.num_nodes)
    return drafter


def first_layers(target: specjax.Target, layers: int) -> specjax.Target:
    """The target cut after its first layers, with its own head."""
    params = dict(target.params, layers={i: target.params["layers"][i] for i in range(layers)})
    return specjax.Target(make_model(dataclasses.replace(target.model.config, num_layers=layers)), params)


def select(path: Path, limit: int) -> tuple[list[prompt_files.Prompt], list[prompt_files.Prompt]]:
    """Up to `limit` prompts of each task, evenly spread, and all others."""
    prompts, _ = prompt_files.read(path, "prompts")
    by_task: dict[str, list] = {}
    for prompt in prompts:
        by_task.setdefault(prompt.task, []).append(prompt)
    selected = [
        of_task[i]
        for of_task in by_task.values()
        for i in np.linspace(0, len(of_task) - 1, min(limit, len(of_task))).astype(int)
    ]
    return selected, [prompt for prompt in prompts if prompt not in selected]


def decode_all(target, drafter, prompts, max_new_tokens, eos) -> tuple[list[list[int]], list[int]]:
    """Texts and target passes of all prompts, in ragged batches of prompts of similar length."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    batches = [order[start : start + BATCH] for start in range(0, len(order), BATCH)]
    widths = sorted({len(prompts[batches[i][-1]]) for i in (len(batches) // 2, -1)})
    rows: list[list[int]] = [[] for _ in prompts]
    passes = [0] * len(prompts)
    for selected in batches:
        # Two programs: one for the shorter half. A row short of a full batch repeats the last.
        width = next(width for width in widths if len(prompts[selected[-1]]) <= width)
        filled = [prompts[i] for i in selected] + [prompts[selected[-1]]] * (BATCH - len(selected))
        tokens = np.stack([np.pad(prompt, (0, width - len(prompt))) for prompt in filled])
        result = specjax.decode(
            target,
            drafter,
            (tokens, np.asarray([len(prompt) for prompt in filled])),
            key=jax.random.key(0),
            max_new_tokens=max_new_tokens,
            eos=eos,
        )
        for i, row, count in zip(selected, result.to_lists(), result.stats.target_passes.tolist(), strict=False):
            rows[i], passes[i] = row, count
    return rows, passes


def gap(target, prompt, common) -> float:
    """Distance of the two best logits after prompt + common."""
    best = np.sort(next_logits(target, [*prompt, *common], len(prompt)))[-2:]
    return float(best[1] - best[0])


def differences(target, prompts, ours, theirs) -> list[dict]:
    """First difference per prompt, with the gap there."""
    differences = []
    for i, (prompt, a, b) in enumerate(zip(prompts, ours, theirs, strict=True)):
        if a != b:
            at = next((j for j, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            differences.append({"prompt": i, "position": at, "gap": gap(target, prompt, a[:at])})
    return differences


def tokens_per_pass(tasks, rows, passes) -> dict[str, float]:
    """Per task and over all prompts, the bonus token included."""
    mean = lambda selected: sum(len(rows[i]) for i in selected) / sum(passes[i] for i in selected)
    by_task = {task: mean([i for i, other in enumerate(tasks) if other == task]) for task in dict.fromkeys(tasks)}
    return by_task | {"overall": mean(range(len(rows)))}


def with_transformers(target, prompts, max_new_tokens, eos) -> list[list[int]]:
    """Greedy texts of the same float32 weights in `transformers` (torch)."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    model = hf_model(target, LlamaConfig, LlamaForCausalLM, torch)
    texts = []
    for prompt in prompts:
        with torch.no_grad():
            out = model.generate(
                torch.tensor([prompt]),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=list(eos),
                pad_token_id=0,
            )
        texts.append(out[0, len(prompt) :].tolist())
    return texts


def hf_model(target, config_class, model_class, torch):
    """SmolLM2 in torch with the weights of `target`."""
    model = model_class(
        config_class(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
            num_key_value_heads=3, max_position_embeddings=8192, rope_theta=100000.0, rms_norm_eps=1e-5,
            tie_word_embeddings=True,
        )
    ).eval()  # fmt: skip
    p = target.params
    names = {"model.embed_tokens.weight": p["embed"]["weight"], "model.norm.weight": p["norm"]["weight"]}
    for i in range(30):
        layer, prefix = p["layers"][i], f"model.layers.{i}"
        names[f"{prefix}.input_layernorm.weight"] = layer["attention_norm"]["weight"]
        names[f"{prefix}.post_attention_layernorm.weight"] = layer["mlp_norm"]["weight"]
        for part in "qkvo":
            names[f"{prefix}.self_attn.{part}_proj.weight"] = layer["attention"][part]["weight"]
        for part in ("gate", "up", "down"):
            names[f"{prefix}.mlp.{part}_proj.weight"] = layer["mlp"][part]["weight"]
    state = {name: torch.from_numpy(np.array(x)) for name, x in names.items()}
    missing, extra = model.load_state_dict(state, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not extra, (missing, extra)
    model.tie_weights()
    return model


def run(args, report: dict[str, Any]) -> None:
    """Add to `report`, and to the file after each method, what it lacks."""
    options = {"dtype": "bfloat16" if args.same_bits else args.dtype, "same_bits": args.same_bits}
    target, tokenizer = specjax.load(args.target, **options)
    draft = specjax.load(args.draft, **options)[0] if args.draft else first_layers(target, 8)
    selected, remaining = select(args.prompts, args.limit)
    prompts = [tokenizer.chat(prompt.text) for prompt in selected]
    texts = [np.asarray(tokenizer.encode(prompt.text)) for prompt in remaining]
    store = datastore.from_documents(texts, target.model.vocab_size)
    lacks = lambda row: MODELS_OF_THEIR_OWN & set(row.needs)
    runnable = [name for name, row in specjax.METHODS.items() if row.kind == "drafter" and not lacks(row)]
    names = [name for name in runnable if name in (args.method or runnable)]
    settings = {
        "target": target.model.name, "draft": draft.model.name if args.draft else "first 8 layers",
        "prompts": len(prompts), "max_new_tokens": args.max_new_tokens, "budget": args.budget, **options,
    }  # fmt: skip
    if report.setdefault("settings", settings) != settings:
        raise SystemExit(f"--out: {args.out} was made with other settings, {report['settings']}; give another file")

    def decode(name):
        drafter = make(name, target, draft, store, args.budget)
        return decode_all(target, drafter, prompts, args.max_new_tokens, tokenizer.eos)

    if "plain" not in report:
        report["plain"], _ = decode("autoregressive")
    plain = report["plain"]
    if args.texts:
        args.texts.write_text(json.dumps({"prompts": prompts, "texts": plain}))
    if args.transformers and "transformers" not in report:
        theirs = with_transformers(target, prompts, args.max_new_tokens, tokenizer.eos)
        report["transformers"] = {"differences": differences(target, prompts, plain, theirs)}
        print("transformers", json.dumps(report["transformers"]), flush=True)
    methods = report.setdefault("methods", {})
    for name in names:
        if name in methods:
            continue
        start = time.perf_counter()
        rows, passes = decode(name)
        methods[name] = {
            "tokens_per_pass": tokens_per_pass([prompt.task for prompt in selected], rows, passes),
            "differences": differences(target, prompts, plain, rows),
        }
        print(name, f"{time.perf_counter() - start:.0f} s", json.dumps(methods[name]), flush=True)
        args.out.write_text(json.dumps(report, indent=1))


def table(report: dict[str, Any]) -> str:
    """Markdown, best method first."""
    rows = ranked(report)
    tasks = list(rows[0][1])
    lines = ["| method | " + " | ".join(tasks) + " |", "| --- |" + " --- |" * len(tasks)]
    return "\n".join(
        lines + [f"| `{name}` | " + " | ".join(f"{x:.2f}" for x in of.values()) + " |" for name, of in rows]
    )


def ranked(report: dict[str, Any]) -> list[tuple[str, dict[str, float]]]:
    rows = [(name, of["tokens_per_pass"]) for name, of in report["methods"].items()]
    return sorted(rows, key=lambda row: -row[1]["overall"])


def plot(report: dict[str, Any], path: Path) -> None:
    """A heat map, methods by tasks."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = ranked(report)
    names, tasks = [name for name, _ in rows], list(rows[0][1])
    values = np.array([list(of.values()) for _, of in rows])
    figure, axes = plt.subplots(figsize=(9, 0.36 * len(names) + 1.6), layout="constrained")
    axes.imshow(values, cmap="viridis", aspect="auto", vmin=1)
    for (i, j), value in np.ndenumerate(values):
        bright = value > 1 + 0.6 * (values.max() - 1)
        axes.text(j, i, f"{value:.2f}", ha="center", va="center", color="black" if bright else "white")
    axes.set_xticks(range(len(tasks)), tasks)
    axes.set_yticks(range(len(names)), names)
    s = report["settings"]
    axes.set_title(f"tokens per pass: {s['target']}, greedy, {s['budget']} drafted nodes, {s['prompts']} prompts")
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--target", help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--draft", help="default: the first 8 layers of the target")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--same-bits", action="store_true", help="bfloat16 with the same bits: any difference counts")
    parser.add_argument("--limit", type=int, default=11, help="prompts per task")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--budget", type=int, default=7, help="drafted nodes per pass, 6 or more")
    parser.add_argument("--method", action="append", help="only these (default: all)")
    parser.add_argument("--transformers", action="store_true", help="compare plain decoding with transformers too")
    parser.add_argument("--texts", type=Path, help="write the plain texts, as token ids, to this JSON file")
    parser.add_argument("--out", type=Path, default=Path("every_method.json"))
    parser.add_argument("--plot", type=Path, help="only draw what is in --out already, to this PNG")
    args = parser.parse_args()
    report = json.loads(args.out.read_text()) if args.out.exists() else {}
    if args.plot:
        plot(report, args.plot)
    else:
        run(args, report)
    print(table(report))
    return int(any(of["differences"] for of in report["methods"].values()))


if __name__ == "__main__":
    sys.exit(main())
