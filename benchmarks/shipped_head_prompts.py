"""Training prompts of the shipped head, made of texts with free licences.

    python benchmarks/shipped_head_prompts.py CORPORA --texts > texts.jsonl
    python benchmarks/shipped_head_prompts.py CORPORA > prompts.jsonl
    python benchmarks/shipped_head_prompts.py CORPORA --more > more.jsonl
    python benchmarks/shipped_head_prompts.py CORPORA --further > further.jsonl
    python benchmarks/shipped_head_prompts.py CORPORA --longer > longer.jsonl
    python benchmarks/shipped_head_prompts.py CORPORA --begun > begun.jsonl

CORPORA holds gsm8k_train.jsonl (MIT), gpteacher_codegen_instruct.json (MIT), c4_demo.jsonl (ODC-BY),
wikitext2_valid.txt and wikitext2_test.txt (CC BY-SA), tinystories_sample.txt (CDLA-Sharing). Then, as its card says, it
was trained on the first three, and by what that gave on 1,150 and 1,600 of the last two:

    specjax train --method eagle3 --prompts prompts.jsonl --prompts more.jsonl --prompts further.jsonl ...
    specjax train --method eagle3 --draft before --prompts begun.jsonl --prompts longer.jsonl ...

Those of --texts are what the heads before it began with. Those of --begun are user turns that the target itself writes
once their first words are there: questions and tasks, shorter and of more kinds than those of `--own-prompts`.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterator
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


def lines(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]


def sums(folder: Path, draw: random.Random) -> list[dict]:
    prompts = [json.loads(line) for line in lines(folder / "gsm8k_train.jsonl")]
    draw.shuffle(prompts)
    return prompts


def tasks_of_code(folder: Path) -> list[dict]:
    return json.loads((folder / "gpteacher_codegen_instruct.json").read_text(encoding="utf-8"))


def question(entry: dict) -> str:
    return entry["instruction"] + ("\n" + entry["input"] if entry["input"].strip() else "")


def pages(folder: Path) -> list[str]:
    return [json.loads(line)["text"] for line in lines(folder / "c4_demo.jsonl")]


def short_tasks_of_code(folder: Path, draw: random.Random) -> list[str]:
    prompts = [entry for entry in tasks_of_code(folder) if len(entry["instruction"]) + len(entry["input"]) < 400]
    draw.shuffle(prompts)
    return list(map(question, prompts))


def prompts(folder: Path, draw: random.Random) -> list[str]:
    prompts = [entry["question"] for entry in sums(folder, draw)[:300]]
    prompts += short_tasks_of_code(folder, draw)[:150]
    passages = pages(folder)
    draw.shuffle(passages)
    prompts += [draw.choice(SUMMARIES).format(first(text, 110)) for text in passages[:150]]
    prompts += [draw.choice(TASKS).format(first(text, 60)) for text in passages[150:250]]
    wiki = lines(folder / "wikitext2_valid.txt")
    wiki = [text.strip() for text in wiki if len(text) > 400 and "<unk>" not in text[:300]]
    draw.shuffle(wiki)
    prompts += [draw.choice(QUESTIONS).format(plain(first(text, 80))) for text in wiki[:100]]
    draw.shuffle(prompts)
    return prompts


def more(folder: Path, draw: random.Random) -> list[str]:
    """Prompts of the same kinds, none of those: of other problems, and of what stands further on in the pages."""
    prompts = [entry["question"] for entry in sums(folder, draw)[300:1500]]
    prompts += short_tasks_of_code(folder, draw)[150:950]
    passages = [" ".join(text.split()[110:]) for text in pages(folder)]
    passages = [text for text in passages if len(text) > 400]
    prompts += [draw.choice(SUMMARIES).format(first(text, 110)) for text in passages]
    prompts += [draw.choice(TASKS + QUESTIONS).format(first(text, 60)) for text in passages]
    wiki = [text.strip() for text in lines(folder / "wikitext2_test.txt")]
    wiki = [text for text in wiki if len(text) > 400 and "<unk>" not in text[:300]]
    prompts += [draw.choice(QUESTIONS + SUMMARIES).format(plain(first(text, 80))) for text in wiki]
    draw.shuffle(prompts)
    return prompts


def further(folder: Path, draw: random.Random) -> list[str]:
    """Prompts about texts again, longer ones, none of those: stories, and what stands behind in pages and articles."""
    passages = [" ".join(text.split()[220:]) for text in pages(folder)]
    passages = [first(text, 180) for text in passages if len(text) > 600]
    for name in ("wikitext2_valid.txt", "wikitext2_test.txt"):
        prompts = [plain(text.strip()) for text in lines(folder / name) if "<unk>" not in text]
        passages += [" ".join(text.split()[80:][:180]) for text in prompts if len(text.split()) > 120]
    passages += stories(folder)[700:1000]
    prompts = [draw.choice(SUMMARIES + SUMMARIES + TASKS + QUESTIONS).format(text) for text in passages]
    draw.shuffle(prompts)
    return prompts


def longer(folder: Path, draw: random.Random) -> list[str]:
    """Other sums and tasks of code; and summaries of longer texts, as news are summarized. Others may have asked of
    pieces of these."""
    prompts = [entry["question"] for entry in sums(folder, draw)[1500:2400]]
    prompts += short_tasks_of_code(folder, draw)[950:1200]
    passages = [first(text, 260) for text in pages(folder) if len(text.split()) > 120]
    passages += [first(text, 260) for text in stories(folder)[1000:1300]]
    prompts += ["Summarize: " + text for text in passages]
    draw.shuffle(prompts)
    return prompts


QUESTION = ("Who", "Who plays", "Who wrote", "When did", "When was the", "When does", "Where is", "Where did the",
    "What is the", "What", "Which", "How many", "How long", "What does", "What year", "Name the",
)  # fmt: skip
TASK = ("Write", "Imagine", "Describe", "Explain", "Compose", "Could you", "Give me", "How can", "Create", "Suppose",
    "Help me", "Draft", "What are", "Act as", "Pretend", "Discuss", "Tell me", "Why", "Compare", "If you", "Provide",
)  # fmt: skip


def begun(folder: Path, draw: random.Random) -> list[str]:
    """Return user turns that the demo model writes from these beginnings."""
    import specjax
    from specjax.training import generate_responses
    from specjax.training.data.target_responses import chat_prefix

    target, tokenizer = specjax.load(dtype="bfloat16")
    begin = chat_prefix(tokenizer)
    words = [word for word in QUESTION for _ in range(62)] + [word for word in TASK for _ in range(60)]
    rows = [[*begin, *tokenizer.encode(word)] for word in words]
    responses = generate_responses(
        target, rows, eos=tokenizer.eos, max_new_tokens=64, temperature=1.0, slots=32, seed=4, numbers=range(len(rows))
    )  # fmt: skip
    turns = {tokenizer.decode(text.tokens[len(begin) :]).strip() for text, ended, _ in responses if ended == "eos"}
    prompts = sorted(turns)
    draw.shuffle(prompts)
    return prompts


def stories(folder: Path) -> list[str]:
    prompts = (folder / "tinystories_sample.txt").read_text(encoding="utf-8").split("<|endoftext|>")
    return [story.strip() for story in prompts if story.strip()]


def articles(path: Path) -> Iterator[str]:
    """WikiText in pieces of some 1,600 letters."""
    piece = ""
    for line in lines(path):
        piece += plain(line.strip()).replace("<unk>", "") + "\n"
        if len(piece) > 1600:
            yield piece
            piece = ""


def texts(folder: Path, draw: random.Random) -> list[str]:
    """Pages, articles, stories, and questions with their answers in the demo model's template."""
    chat = lambda question, response: (
        f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{response}<|im_end|>\n"
    )
    prompts = pages(folder)
    for name in ("wikitext2_valid.txt", "wikitext2_test.txt"):
        prompts += articles(folder / name)
    prompts += stories(folder)[:700]
    for entry in tasks_of_code(folder):
        prompts.append(chat(question(entry), entry["response" if "response" in entry else "output"]))
    for entry in sums(folder, draw)[:2500]:
        answer = re.sub(r"<<.*?>>", "", entry["answer"]).replace("####", "The answer is")
        prompts.append(chat(entry["question"], answer))
    draw.shuffle(prompts)
    return prompts


if __name__ == "__main__":
    sets = {"--texts": texts, "--more": more, "--further": further, "--longer": longer, "--begun": begun}
    for text in sets.get(sys.argv[-1], prompts)(Path(sys.argv[1]), random.Random(0)):
        print(json.dumps({"prompt": text}))
