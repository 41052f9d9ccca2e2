"""Links that leave docs/ work on GitHub as they are; on the site they lead there."""

import re

SOURCE = "https://github.com/specjax/specjax/blob/main/"


def on_page_markdown(markdown: str, **_) -> str:
    """Called by mkdocs for every page."""
    return re.sub(r"\]\(\.\./([^)]+)\)", rf"]({SOURCE}\1)", markdown)
