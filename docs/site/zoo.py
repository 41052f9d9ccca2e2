"""A page for each method of the catalogue, and the index of them: written while the site is built."""

import inspect
import re

import mkdocs_gen_files

from specjax import METHODS

PROMISES = {
    "distribution": "exact: the text has the target's own distribution, and at temperature 0 it is the target's text",
    "greedy": "exact at temperature 0 only",
    "lossy": "**lossy**: faster, and not the target's text",
}
KINDS = {
    "drafter": ("Drafters", "They draft for the loop of `specjax.decode`; the target verifies."),
    "decoder": ("Loops of their own", "Called in Python, from `specjax.decoders`."),
    "diffusion": ("Diffusion language models", "They decide the columns of a canvas, in `specjax.denoise`."),
    "collaboration": (
        "Collaboration",
        "Several models, or samples, that write one text: `specjax.collaborate.methods`.",
    ),
    "adaptive": ("Models that do less", "Each token runs a part of the target's layers: `specjax.adaptive`."),
}


def linked(paper):
    """With a link for each number of arXiv."""
    return re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", paper)


def page(method):
    promise = PROMISES.get(method.guarantee, method.guarantee)
    lines = [f"# {method.name}", "", f"{method.summary[:1].upper()}{method.summary[1:]}.", ""]
    lines += [f"- **Promise**: {promise}"]
    lines += [f"- **Paper**: {linked(method.paper)}"] if method.paper else []
    lines += [f"- **Needs**: {', '.join(sorted(method.needs))}"] if method.needs else []
    lines += [f"- **Can use**: {', '.join(sorted(method.takes))}"] if method.takes else []
    lines += ["", *usage(method), ""]
    if method.options:
        lines += ["## Options", "", "| `--set` | default | what it is |", "| --- | --- | --- |"]
        for option in method.options:
            said = "" if option.default is None else f"`{option.default}`"
            lines.append(f"| `{option.name}` | {said} | {option.help} |".replace("<", "&lt;"))
    notes = inspect.getdoc(inspect.getmodule(inspect.unwrap(method.make))) if method.kind != "drafter" else None
    if notes and method.name in (inspect.getmodule(method.make).__name__ or ""):
        lines += ["", "## How it works", "", "```text", notes, "```"]
    return "\n".join(lines) + "\n"


def usage(method):
    if method.kind == "decoder":
        return ["```python", f"specjax.decoders.{method.name}(...)", "```"]
    if method.kind == "collaboration":
        return ["```python", f"specjax.collaborate.methods.{method.name}(...)", "```"]
    if method.kind == "adaptive":
        call = f"specjax.adaptive.thinned(target, specjax.adaptive.{method.name}(...))"
        python = ["```python", call, "```"]
        return python if method.needs else ["```bash", f'specjax generate --adapt {method.name} "..."', "```", *python]
    draft = {"draft": " --draft DRAFT", "head": " --draft HEAD", "datastore": " --datastore STORE"}
    given = "".join(words for need, words in draft.items() if need in method.needs)
    target = " --target DIFFUSION_MODEL" if method.kind == "diffusion" else ""
    return ["```bash", f'specjax generate --method {method.name}{target}{given} "..."', "```"]


index = ["# The zoo", "", "Every method by what it promises. `specjax methods NAME` prints the same in a terminal.", ""]
for kind, (title, words) in KINDS.items():
    rows = [method for method in METHODS.values() if method.kind == kind]
    if not rows:
        continue
    index += [f"## {title}", "", words, "", "| method | what it does | promise |", "| --- | --- | --- |"]
    for method in rows:
        promise = method.guarantee if method.guarantee != "lossy" else "**lossy**"
        index.append(f"| [`{method.name}`]({method.name}.md) | {method.summary} | {promise} |")
        with mkdocs_gen_files.open(f"zoo/{method.name}.md", "w") as file:
            file.write(page(method))
    index.append("")
with mkdocs_gen_files.open("zoo/index.md", "w") as file:
    file.write("\n".join(index))
