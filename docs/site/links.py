"""Rewrites links that leave docs/ so that they lead to GitHub from the site."""

import re

SOURCE = "https://github.com/specjax/specjax/blob/main/"


def on_page_markdown(markdown: str, **_) -> str:
    """Rewrite the links of one page; mkdocs calls this for every page."""
    return re.sub(r"\]\(\.\./([^)]+)\)", rf"]({SOURCE}\1)", markdown)
