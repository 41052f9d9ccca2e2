"""What the head that comes with specjax was trained on: texts with free licences, and prompts to measure it by.

    python benchmarks/shipped_head_prompts.py CORPORA --texts > texts.jsonl
    python benchmarks/shipped_head_prompts.py CORPORA > prompts.jsonl

CORPORA holds gsm8k_train.jsonl (MIT), gpteacher_codegen_instruct.json (MIT), c4_demo.jsonl (ODC-BY),
wikitext2_valid.txt and wikitext2_test.txt (CC BY-SA), tinystories_sample.txt (CDLA-Sharing). Then, as its card says:

    specjax train --method eagle3 --texts texts.jsonl --prompts prompts.jsonl --out head ...
"""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path

SUMMARIES = ("Summarize: {}", "Summarize the text below in a few sentences.\n\n{}", "{}\n\nTL;DR:",
    "What is this text about?\n\n{}",
)  # fmt: skip
TASKS = ("Rewrite this in simple words: {}", "Explain this to a child: {}", "Write a friendly email about this: {}",
    "List the most important points of this text:\n{}",
)  # fmt: skip
QUESTIONS = ("Use the text to say who or what it is about.\n\n{}", "Ask three questions about this text and answer "
    "them.\n\n{}", "Continue this text: {}",
)  # fmt: skip


def first(text: str, words: int) -> str:
    return " ".join(text.split()[:words])


def plain(text: str) -> str:
    """WikiText without the spaces and marks of its tokens."""
    text = re.sub(r" ([,.;:!?)])", r"\1", text)
    return text.replace(" @-@ ", "-").replace(" @,@ ", ",").replace("( ", "(")


def prompts(folder: Path, draw: random.Random) -> list[str]:
    lines = lambda name: (folder / name).read_text(encoding="utf-8").split("\n")
    sums = [json.loads(line)["question"] for line in lines("gsm8k_train.jsonl") if line]
    draw.shuffle(sums)
    code = [entry for entry in json.loads((folder / "gpteacher_codegen_instruct.json").read_text(encoding="utf-8"))
            if len(entry["instruction"]) + len(entry["input"]) < 400]  # fmt: skip
    draw.shuffle(code)
    pages = [json.loads(line)["text"] for line in lines("c4_demo.jsonl") if line]
    draw.shuffle(pages)
    found = sums[:300]
    found += [e["instruction"] + ("\n" + e["input"] if e["input"].strip() else "") for e in code[:150]]
    found += [draw.choice(SUMMARIES).format(first(text, 110)) for text in pages[:150]]
    found += [draw.choice(TASKS).format(first(text, 60)) for text in pages[150:250]]
    wiki = [text.strip() for text in lines("wikitext2_valid.txt") if len(text) > 400 and "<unk>" not in text[:300]]
    draw.shuffle(wiki)
    found += [draw.choice(QUESTIONS).format(plain(first(text, 80))) for text in wiki[:100]]
    draw.shuffle(found)
    return found


def texts(folder: Path, draw: random.Random) -> list[str]:
    """Pages, articles, stories, and questions with their answers in the demo model's template."""
    lines = lambda name: (folder / name).read_text(encoding="utf-8").split("\n")
    chat = lambda asked, told: f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n{told}<|im_end|>\n"
    found = [json.loads(line)["text"] for line in lines("c4_demo.jsonl") if line.strip()]
    for name in ("wikitext2_valid.txt", "wikitext2_test.txt"):
        article = ""
        for line in lines(name):
            if line.strip():
                article += plain(line.strip()).replace("<unk>", "") + "\n"
            if len(article) > 1600:
                found.append(article)
                article = ""
    stories = (folder / "tinystories_sample.txt").read_text(encoding="utf-8").split("<|endoftext|>")
    found += [story.strip() for story in stories if story.strip()][:700]
    for entry in json.loads((folder / "gpteacher_codegen_instruct.json").read_text(encoding="utf-8")):
        asked = entry["instruction"] + ("\n" + entry["input"] if entry["input"].strip() else "")
        found.append(chat(asked, entry["response" if "response" in entry else "output"]))
    sums = [json.loads(line) for line in lines("gsm8k_train.jsonl") if line.strip()]
    draw.shuffle(sums)
    for entry in sums[:2500]:
        answer = re.sub(r"<<.*?>>", "", entry["answer"]).replace("####", "The answer is")
        found.append(chat(entry["question"], answer))
    draw.shuffle(found)
    return found


if __name__ == "__main__":
    chosen = texts if "--texts" in sys.argv else prompts
    for prompt in chosen(Path(sys.argv[1]), random.Random(0)):
        print(json.dumps({"prompt": prompt}))
