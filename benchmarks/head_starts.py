"""Shapes and initial weights of heads, compared on equal tokens: one change at a time.

    python benchmarks/head_starts.py prompts.jsonl --answers answers --states states --out starts

Each variant is a run of `specjax train` over the same answers, read once, and measured on the same that are held out:
tokens per pass of a greedy chain of three, bonus included, and how often the first draft is right. Answers that are in
--answers are not written again, what the target says of them is kept in --states, and runs that are in --out are not
run again. `--only Muon` runs those whose names have the word, a whole name that one. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

HEAD = {
    "--method": "eagle3", "--draft-vocab": "4096", "--depths": "3", "--shape": "mlp_width=640", "--start": "target",
    "--optimizer": "adamw", "--learning-rate": "1e-3",
}  # fmt: skip
OTHER = dict.fromkeys(("--draft-vocab", "--depths", "--shape", "--start", "taps", "--states"))
"""What heads of EAGLE-3's streams have. Others read the target, or some of its layers, anew."""
MODEL = OTHER | {"--method": "two_model"}
MUON = {"--optimizer": "muon", "--learning-rate": "1e-2"}
VARIANTS: dict[str, dict[str, str | None]] = {
    "the reference": {},
    "random parameters": {"--start": "random"},
    "the MLP of the target's last layer too": {"--shape": "mlp_width=1536"},
    "hard labels": {"--loss": "ce"},
    "training-time test of 1": {"--depths": "1"},
    "training-time test of 7": {"--depths": "7"},
    "a draft vocabulary of 8,192": {"--draft-vocab": "8192"},
    "AdamW at 3e-3": {"--learning-rate": "3e-3"},
    "AdamW at 6e-3": {"--learning-rate": "6e-3"},
    "Muon at 1e-3": MUON | {"--learning-rate": "1e-3"},
    "Muon at 4e-3": MUON | {"--learning-rate": "4e-3"},
    "Muon at 1e-2": MUON,
    "Muon at 2e-2": MUON | {"--learning-rate": "2e-2"},
    "Muon at 4e-3, hard labels": MUON | {"--learning-rate": "4e-3", "--loss": "ce"},
    "Muon at 1e-2, the MLP of the target's last layer": MUON | {"--shape": "mlp_width=1536"},
    "Muon at 1e-2, a draft vocabulary of 8,192": MUON | {"--draft-vocab": "8192"},
    "Muon at 1e-2, all tokens by rank 128": MUON | {"--draft-vocab": "49152", "--shape": "mlp_width=640 head_rank=128"},
    "Muon at 1e-2, five streams": MUON | {"taps": "2+8+15+21+27", "--states": None},
    "Muon at 1e-2, streams 1, 8, 20": MUON | {"taps": "1+8+20", "--states": None},
    "Kangaroo on 2 layers, Muon at 5e-3": OTHER | MUON | {"--method": "kangaroo", "--learning-rate": "5e-3"},
    "Kangaroo on 6 layers, Muon at 5e-3": OTHER | MUON
    | {"--method": "kangaroo", "--learning-rate": "5e-3", "--shape": "exit_layer=6"},
    "a copy of 2 of its layers, AdamW at 1e-3": MODEL | {"--layers": "0,29"},
    "a copy of 4 of its layers, AdamW at 1e-3": MODEL | {"--layers": "0,1,28,29"},
    "a copy of 4 of its layers, Muon at 1e-3": MODEL | {"--layers": "0,1,28,29", "--optimizer": "muon"},
}  # fmt: skip


def run(name: str, changes: dict[str, str | None], args: argparse.Namespace, prompts: Path) -> dict:
    """The card of a variant, trained if it is not there."""
    folder = args.out / name.replace(" ", "_").replace(",", "").replace("'", "")
    card = folder / "card.json"
    if not card.exists():
        flags = HEAD | {"taps": args.taps, "--states": str(args.states)} | changes | {
            "--prompts": str(prompts), "--out": str(folder), "--answers": str(args.answers),
            "--held-out": str(args.held_out), "--max-new-tokens": str(args.max_new_tokens), "--dtype": args.dtype,
            "--every": "100000",
        }  # fmt: skip
        taps, shapes = flags.pop("taps"), (flags.pop("--shape") or "").split()
        shapes += [f"taps={taps}"] if taps else []
        command = [sys.executable, "-m", "specjax.cli", "train", *(part for one in shapes for part in ("--shape", one))]
        command += ["--keep-states", str(args.gib)] if flags["--states"] else []
        command += [part for flag, value in flags.items() if value is not None for part in (flag, value)]
        if args.target:
            command += ["--target", args.target]
        with (args.out / f"{folder.name}.log").open("w") as log:
            subprocess.run(command, check=True, stdout=log, stderr=log)
    return json.loads(card.read_text(encoding="utf-8"))


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("prompts", type=Path, help="JSONL, as of specjax train")
    flags.add_argument("--target", help="default: the demo model")
    flags.add_argument("--answers", type=Path, required=True, help="a folder")
    flags.add_argument("--states", type=Path, required=True, help="a folder")
    flags.add_argument("--gib", type=float, default=6, help="of states, at most")
    flags.add_argument("--out", type=Path, required=True, help="a folder")
    flags.add_argument("--taps", default="2+15+27", help="streams of the target")
    flags.add_argument("--only", default="", help="of the variants those with this in their names")
    flags.add_argument("--limit", type=int, default=600, help="prompts")
    flags.add_argument("--held-out", type=int, default=48)
    flags.add_argument("--max-new-tokens", type=int, default=128)
    flags.add_argument("--dtype", default="bfloat16")
    args = flags.parse_args()
    named = [args.only] if args.only in VARIANTS else [name for name in VARIANTS if args.only in name]
    selected = {name: VARIANTS[name] for name in named}
    if not selected:
        flags.error(f"--only {args.only} is in no name; there are {', '.join(VARIANTS)}")
    args.out.mkdir(parents=True, exist_ok=True)
    prompts = args.out / "prompts.jsonl"
    lines = args.prompts.read_text(encoding="utf-8").splitlines()
    prompts.write_text("\n".join(lines[: args.limit]) + "\n", encoding="utf-8")
    print("| | tokens per pass | first draft right | seconds of training |", flush=True)
    print("| --- | --- | --- | --- |", flush=True)
    for name, changes in selected.items():
        card = run(name, changes, args, prompts)
        served = card["served"]
        print(
            f"| {name} | {served['tokens_per_pass']:.3f} | {served['first']:.1%} | {card['seconds']:.0f} |", flush=True
        )
    print(f"\n{card['answers']} answers of {card['answer_tokens']:,} tokens, read once")


if __name__ == "__main__":
    main()
