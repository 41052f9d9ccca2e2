"""The developer guide, which lies at the root of the repository, as a page of the site."""

import pathlib
import re

import mkdocs_gen_files

SOURCE = "https://github.com/specjax/specjax/blob/main/"


def moved(match: re.Match) -> str:
    """A link as the site has it: pages are beside this one, all else is on GitHub."""
    path = match[1]
    return f"]({path.removeprefix('docs/')})" if path.startswith("docs/") else f"]({SOURCE}{path})"


text = pathlib.Path("CONTRIBUTING.md").read_text(encoding="utf-8")
with mkdocs_gen_files.open("contributing.md", "w") as file:
    file.write(re.sub(r"\]\((?!https?:|#)([^)]+)\)", moved, text))
