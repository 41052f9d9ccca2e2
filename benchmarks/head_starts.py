"""What a drafter begins with, on equal tokens: the target's layers, random parameters, other streams, a part of itself.

    python benchmarks/head_starts.py prompts.jsonl --answers answers --out starts

Each variant is a run of `specjax train` over the same answers, read once, and measured on the same that are held out:
tokens per pass of a greedy chain of three, bonus included, and how often the first draft is right. Answers that are in
--answers are not written again, and runs that are in --out are not run again. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

SMALL = ("--shape", "mlp_width=640")
TAPS = ("--shape", "taps=2+15+27")
EAGLE3 = ("--method", "eagle3", "--draft-vocab", "4096", "--depths", "3")
VARIANTS: dict[str, tuple[str, ...]] = {
    "EAGLE-3, the target's last layer": (*EAGLE3, *TAPS),
    "EAGLE-3, random": (*EAGLE3, *TAPS, "--start", "random"),
    "EAGLE-3, a small MLP of its own": (*EAGLE3, *TAPS, *SMALL),
    "EAGLE-3, one stream, the last": (*EAGLE3, "--shape", "taps=30"),
    "EAGLE-3, five streams": (*EAGLE3, "--shape", "taps=2+9+15+21+27"),
    "Kangaroo on 3 layers": ("--method", "kangaroo", "--shape", "exit_layer=3"),
    "a pruned copy, layers 0, 1, 28, 29": ("--method", "two_model", "--layers", "0,1,28,29"),
}


def run(name: str, flags: tuple[str, ...], args: argparse.Namespace, prompts: Path) -> dict:
    """The card of a variant, trained if it is not there."""
    folder = args.out / "-".join(part.strip(",") for part in name.lower().split())
    card = folder / "card.json"
    if not card.exists():
        with (args.out / f"{folder.name}.log").open("w") as log:
            command = [
                sys.executable, "-m", "specjax.cli", "train", *flags, "--prompts", str(prompts), "--out", str(folder),
                "--answers", str(args.answers), "--held-out", str(args.held_out), "--epochs", str(args.epochs),
                "--dtype", args.dtype, "--max-new-tokens", str(args.max_new_tokens), "--every", "1000",
            ]  # fmt: skip
            if args.target:
                command += ["--target", args.target]
            subprocess.run(command, check=True, stdout=log, stderr=log)
    return json.loads(card.read_text(encoding="utf-8"))


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("prompts", type=Path, help="JSONL, as of specjax train")
    flags.add_argument("--target", help="default: the demo model")
    flags.add_argument("--answers", type=Path, required=True, help="a folder")
    flags.add_argument("--out", type=Path, required=True, help="a folder")
    flags.add_argument("--limit", type=int, default=600, help="prompts")
    flags.add_argument("--held-out", type=int, default=48)
    flags.add_argument("--epochs", type=int, default=1)
    flags.add_argument("--max-new-tokens", type=int, default=128)
    flags.add_argument("--dtype", default="bfloat16")
    args = flags.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    prompts = args.out / "prompts.jsonl"
    lines = args.prompts.read_text(encoding="utf-8").splitlines()
    prompts.write_text("\n".join(lines[: args.limit]) + "\n", encoding="utf-8")
    print("| | tokens per pass | first draft right | seconds of training |\n| --- | --- | --- | --- |", flush=True)
    for name, variant in VARIANTS.items():
        card = run(name, variant, args, prompts)
        served = card["served"]
        print(
            f"| {name} | {served['tokens_per_pass']:.3f} | {served['first']:.1%} | {card['seconds']:.0f} |", flush=True
        )
    print(f"\n{card['answers']} answers of {card['answer_tokens']:,} tokens, read {args.epochs} times")


if __name__ == "__main__":
    main()
