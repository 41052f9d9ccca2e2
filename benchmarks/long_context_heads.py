"""Heads in long contexts: tokens per pass after prompts of several lengths, and the memory of a row.

    python benchmarks/long_context_heads.py texts CORPORA FOLDER
    specjax train --method longspec --texts FOLDER/short.jsonl --prompts FOLDER/prompts.jsonl ... --out before
    specjax train --draft before --texts FOLDER/long.jsonl ... --out head
    python benchmarks/long_context_heads.py measure CORPORA longspec=head eagle3=smollm2-135m-eagle3

`texts` writes training texts of about 1,000 and 4,000 tokens, of the validation part of WikiText-2 and of C4. It also
writes prompts, whose answers select the best head. `measure` decodes after texts of WikiText-2's test part. The shipped
EAGLE-3 head was trained on answers to prompts with short passages of this part, and LongSpec heads were not. `measure`
prints the results, and writes them to OUT.json and OUT.png.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from pathlib import Path

from head_memory import of_row
from shipped_head_prompts import lines, plain

import specjax

SHORT, LONG = 4_000, 16_500  # characters of a text
LENGTHS = 512, 2048, 4000


def documents(path: Path) -> list[str]:
    """Return the articles of a file of WikiText."""
    articles = re.split(r"\n (?== [^=]+ = \n)", path.read_text(encoding="utf-8"))
    return [plain(article.strip()) for article in articles if len(article) > 200]


def pieces(texts: list[str], size: int) -> list[str]:
    """Return consecutive pieces of `size` characters of the texts, joined."""
    joined = "\n\n".join(texts)
    return [joined[start : start + size] for start in range(0, len(joined) - size, size)]


def write_texts(args: argparse.Namespace) -> None:
    """Write the files of texts and prompts."""
    articles = documents(args.corpora / "wikitext2_valid.txt")
    web = [json.loads(line)["text"] for line in lines(args.corpora / "c4_demo.jsonl")]
    draw = random.Random(0)
    draw.shuffle(web)
    short = pieces(articles[8:], SHORT) + pieces(web, SHORT)
    draw.shuffle(short)
    files = {
        "short": [{"text": text} for text in short],
        "long": [{"text": text} for text in pieces(articles[8:], LONG)],
        "prompts": [{"prompt": f"Continue this text: {text[:600]}"} for text in articles[:8]],
    }
    args.folder.mkdir(parents=True, exist_ok=True)
    for name, entries in files.items():
        (args.folder / f"{name}.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        print(name, len(entries))


def measure(args: argparse.Namespace) -> None:
    """Measure heads, and write the results."""
    target, tokenizer = specjax.load(args.target, dtype=args.dtype)
    joined = tokenizer.encode("\n\n".join(documents(args.corpora / "wikitext2_test.txt")))
    heads = {}
    for named in args.heads:
        name, _, path = named.partition("=")
        heads[name] = specjax.load_head(path or name, target)
    rows = []
    for length in args.lengths:
        prompts = [joined[8_000 * i : 8_000 * i + length] for i in range(args.texts)]
        for name, head in heads.items():
            drafter = specjax.make_drafter(head.head.kind, target, head, num_tokens=args.num_draft_tokens)
            passes = tokens = 0
            for prompt in prompts:
                result = specjax.decode(target, drafter, [prompt], key=0, max_new_tokens=args.max_new_tokens)
                passes, tokens = passes + int(result.stats.target_passes.sum()), tokens + len(result.to_lists()[0])
            state = of_row(target, head, head.head.kind, length)
            rows.append({"head": name, "context": length, "per_pass": tokens / passes, "state_bytes": state})
            print(json.dumps(rows[-1]), flush=True)
    args.out.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    draw(rows, args.out.with_suffix(".png"))


def draw(rows: list[dict], path: Path) -> None:
    """Draw tokens per pass and the memory of a row over the context."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    for name in dict.fromkeys(row["head"] for row in rows):
        of_head = [row for row in rows if row["head"] == name]
        context = [row["context"] for row in of_head]
        left.plot(context, [row["per_pass"] for row in of_head], "o-", label=name)
        right.plot(context, [row["state_bytes"] / 1e6 for row in of_head], "o-", label=name)
    left.set(xlabel="tokens of the prompt", ylabel="tokens per pass", ylim=(1, None))
    right.set(xlabel="tokens of the prompt", ylabel="state of a row, MB", ylim=(0, None))
    left.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    texts = commands.add_parser("texts")
    texts.add_argument("corpora", type=Path)
    texts.add_argument("folder", type=Path)
    texts.set_defaults(run=write_texts)
    measured = commands.add_parser("measure")
    measured.add_argument("corpora", type=Path)
    measured.add_argument("heads", nargs="+", help="NAME=FOLDER, or the name of a head that comes with specjax")
    measured.add_argument("--target", help="default: the demo model")
    measured.add_argument("--dtype", default="bfloat16")
    measured.add_argument("--texts", type=int, default=4)
    measured.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    measured.add_argument("--max-new-tokens", type=int, default=64)
    measured.add_argument("--num-draft-tokens", type=int, default=3)
    measured.add_argument("--out", type=Path, default=Path("long_context"))
    measured.set_defaults(run=measure)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
