"""A hook of mkdocs: in the search, what users need comes before what was decided."""

from __future__ import annotations

from typing import Any

FIRST = ("reference/", "guides/", "optimizers.md")
LAST = ("decisions/",)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> None:
    """Has the search weigh a page by the folder that it is in."""
    path = page.file.src_uri
    if path.startswith(FIRST):
        page.meta["search"] = {"boost": 2}
    elif path.startswith(LAST):
        page.meta["search"] = {"boost": 0.25}
