"""Writes a page for each method of the catalogue, and their index, while the site is built."""

import importlib.util
import inspect
import re

import mkdocs_gen_files

from specjax import METHODS
from specjax.catalog.inputs import command_of
from specjax.models.heads import kinds

GUARANTEES = {
    "distribution": "exact: the text has the target's distribution, and at temperature 0 its greedy text",
    "greedy": "exact at temperature 0 only",
    "lossy": "**lossy**: faster, but the text differs from the target's",
}
KINDS = {
    "drafter": ("Drafters", "These methods draft for `specjax.decode`, and the target verifies."),
    "decoder": ("Separate decoding loops", "These methods do not use the loop of `specjax.decode`."),
    "diffusion": ("Diffusion language models", "These rules fill the positions of a canvas in `specjax.denoise`."),
    "collaboration": (
        "Collaboration",
        "Several models or samples write one text with `specjax.collaborate.methods`.",
    ),
    "adaptive": ("Adaptive depth", "Each token runs a subset of the target's layers: `specjax.adaptive`."),
    "cache": ("Compression of caches", "The target stores its keys and values in fewer bits: `specjax.compression`."),
    "compression": (
        "Compression of prompts",
        "The target reads or caches a part of the prompt: `specjax.compression`.",
    ),
}


def link_papers(paper):
    """Return the text with a link for each arXiv number."""
    return re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", paper)


def page(method):
    guarantee = GUARANTEES.get(method.guarantee, method.guarantee)
    lines = [f"# {method.name}", "", f"{method.summary[:1].upper()}{method.summary[1:]}.", ""]
    lines += [f"- **Guarantee**: {guarantee}"]
    lines += [f"- **Paper**: {link_papers(method.paper)}"] if method.paper else []
    lines += [f"- **Needs**: {', '.join(sorted(method.needs))}"] if method.needs else []
    lines += [f"- **Can use**: {', '.join(sorted(method.takes))}"] if method.takes else []
    lines += ["", *usage(method), ""]
    if method.options:
        lines += ["## Options", "", "| `--set` | default | meaning |", "| --- | --- | --- |"]
        for option in method.options:
            default = "" if option.default is None else f"`{option.default}`"
            lines.append(f"| `{option.name}` | {default} | {option.help} |".replace("<", "&lt;"))
    notes = read_notes(method)
    if notes:
        lines += ["", "## How it works", "", "```text", notes, "```"]
    return "\n".join(lines) + "\n"


def read_notes(method):
    """Return the docstring of the method's file; for draft heads that is the file of the mathematics."""
    name = method.module
    if method.kind == "drafter" and "head" in method.needs:
        name = kinds.KINDS[method.name].head.__module__
    return inspect.getdoc(importlib.import_module(name)) if importlib.util.find_spec(name) else None


def usage(method):
    """Return the command that runs a method, if there is one, and the call in Python of a loop or a policy."""
    command = command_of(method)
    lines = ["```bash", command, "```"] if command else []
    if method.kind in ("drafter", "diffusion"):
        return lines
    call = f"{method.path}(...)"
    call = f"specjax.adaptive.skip_layers(target, {call})" if method.kind == "adaptive" else call
    return [*lines, "```python", call, "```"]


index = ["# Method catalogue", "", "Every method has a page. `specjax methods NAME` prints the same in a terminal.", ""]
for kind, (title, words) in KINDS.items():
    rows = [method for method in METHODS.values() if method.kind == kind]
    if not rows:
        continue
    index += [f"## {title}", "", words, "", "| method | summary | guarantee |", "| --- | --- | --- |"]
    for method in rows:
        guarantee = method.guarantee if method.guarantee != "lossy" else "**lossy**"
        index.append(f"| [`{method.name}`]({method.name}.md) | {method.summary} | {guarantee} |")
        with mkdocs_gen_files.open(f"zoo/{method.name}.md", "w") as file:
            file.write(page(method))
    index.append("")
with mkdocs_gen_files.open("zoo/index.md", "w") as file:
    file.write("\n".join(index))
