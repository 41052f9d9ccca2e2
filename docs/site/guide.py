"""Copies the developer guide, a file in the root of the repository, into the site."""

import pathlib
import re

import mkdocs_gen_files

SOURCE = "https://github.com/specjax/specjax/blob/main/"


def site_link(match: re.Match) -> str:
    """Return the link for the site: a neighbouring page for files of docs/, else the file on GitHub."""
    path = match[1]
    return f"]({path.removeprefix('docs/')})" if path.startswith("docs/") else f"]({SOURCE}{path})"


text = pathlib.Path("CONTRIBUTING.md").read_text(encoding="utf-8")
with mkdocs_gen_files.open("contributing.md", "w") as file:
    file.write(re.sub(r"\]\((?!https?:|#)([^)]+)\)", site_link, text))
